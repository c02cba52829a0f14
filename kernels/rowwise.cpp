// The small operators between the large ones: each is one pass over its rows, where torch needs
// three to five calls that cost more than their work. They compute in float whatever they are given.
#include <algorithm>
#include <cmath>

#include "vector.h"

namespace splitserve::SPLITSERVE_ISA {
namespace {

template <class Element>
void norm_rows(const Rowwise& call, const float* weight, float eps) {
  const auto* x = static_cast<const Element*>(call.x);
  auto* out = static_cast<Element*>(call.out);
  const std::int64_t width = call.width, whole = width / kLanes * kLanes;
  for (std::int64_t row = 0; row < call.rows; ++row, x += width, out += width) {
    Floats squares = {};
    for (std::int64_t i = 0; i < whole; i += kLanes) squares += load(x + i) * load(x + i);
    float total = sum(squares);
    for (std::int64_t i = whole; i < width; ++i) total += widened(x[i]) * widened(x[i]);
    const float scale = 1.0f / std::sqrt(total / static_cast<float>(width) + eps);
    for (std::int64_t i = 0; i < whole; i += kLanes) {
      store(out + i, load(x + i) * scale * load(weight + i));
    }
    for (std::int64_t i = whole; i < width; ++i) put(out + i, widened(x[i]) * scale * weight[i]);
  }
}

inline Floats gated(Floats gate, Floats up) { return gate / (exponential(-gate) + 1.0f) * up; }

// What is too unlikely for a normal float weighs nothing.
inline Floats weight(Floats x, Floats shift, Floats scale) {
  const Floats power = (x - shift) * scale;
  return power < splat(-87.0f) ? Floats{} : exponential(power);
}

template <class Element>
void gate_rows(const Rowwise& call) {
  const auto* gate = static_cast<const Element*>(call.x);
  auto* out = static_cast<Element*>(call.out);
  const std::int64_t width = call.width, whole = width / kLanes * kLanes;
  for (std::int64_t row = 0; row < call.rows; ++row, gate += 2 * width, out += width) {
    const Element* up = gate + width;
    for (std::int64_t i = 0; i < whole; i += kLanes) {
      store(out + i, gated(load(gate + i), load(up + i)));
    }
    for (std::int64_t i = whole; i < width; ++i) {
      put(out + i, gated(splat(widened(gate[i])), splat(widened(up[i])))[0]);
    }
  }
}

// The two halves of a head are its pairs.
template <class Element>
inline void rotate(Element* head, const Element* cos, const Element* sin, std::int64_t half) {
  std::int64_t d = 0;
  for (; d + kLanes <= half; d += kLanes) {
    const Floats low = load(head + d), high = load(head + half + d);
    store(head + d, low * load(cos + d) + high * load(sin + d));
    store(head + half + d, high * load(cos + half + d) + low * load(sin + half + d));
  }
  for (; d < half; ++d) {
    const float low = widened(head[d]), high = widened(head[half + d]);
    put(head + d, low * widened(cos[d]) + high * widened(sin[d]));
    put(head + half + d, high * widened(cos[half + d]) + low * widened(sin[half + d]));
  }
}

template <class Element>
void rotate_and_store_tokens(const RotateAndStore& call, std::int64_t first, std::int64_t last) {
  const std::int64_t dim = call.head_dim;
  const std::int64_t rotated = call.query_heads + call.kv_heads;
  const std::int64_t head_size = call.block_size * dim;
  for (std::int64_t token = first; token < last; ++token) {
    Element* head = static_cast<Element*>(call.heads) + token * (rotated + call.kv_heads) * dim;
    const Element* cos = static_cast<const Element*>(call.cos) + token * dim;
    const Element* sin = static_cast<const Element*>(call.sin) + token * dim;
    Element* slot = static_cast<Element*>(call.cache) +
                    call.block_of[token] * call.block_stride + call.offset_of[token] * dim;
    for (std::int64_t index = 0; index < rotated; ++index, head += dim) {
      rotate(head, cos, sin, dim / 2);
      if (index >= call.query_heads) {
        std::memcpy(slot + (index - call.query_heads) * head_size, head, dim * sizeof(Element));
      }
    }
    slot += call.kv_heads * head_size;
    for (std::int64_t index = 0; index < call.kv_heads; ++index, head += dim) {
      std::memcpy(slot + index * head_size, head, dim * sizeof(Element));
    }
  }
}

}  // namespace

// Root mean square norm (Zhang & Sennrich, 2019): x / sqrt(mean(x²) + eps) * weight.
void rms_norm(const Rowwise& call, const float* weight, float eps) {
  call.half ? norm_rows<BFloat16>(call, weight, eps) : norm_rows<float>(call, weight, eps);
}

// gate * sigmoid(gate) * up (SwiGLU, Shazeer, 2020): [rows, 2 width] to [rows, width].
void silu_gate(const Rowwise& call) {
  call.half ? gate_rows<BFloat16>(call) : gate_rows<float>(call);
}

// Sums of exp((x - shift) * scale) over each stretch of a row of logits.
void weight_sums(const WeightSums& call, std::int64_t index) {
  const float* x = call.logits + call.rows[index] * call.width;
  float* total = call.sums + index * ((call.width + call.stretch - 1) / call.stretch);
  const Floats shift = splat(call.shifts[index]), scale = splat(call.scales[index]);
  for (std::int64_t begin = 0; begin < call.width; begin += call.stretch, ++total) {
    const std::int64_t end = std::min(begin + call.stretch, call.width);
    Floats sums = {};
    std::int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes) sums += weight(load(x + i), shift, scale);
    *total = sum(sums);
    for (; i < end; ++i) *total += weight(splat(x[i]), shift, scale)[0];
  }
}

// Rotates queries and keys and files keys and values.
void rotate_and_store(const RotateAndStore& call, std::int64_t first, std::int64_t last) {
  call.half ? rotate_and_store_tokens<BFloat16>(call, first, last)
            : rotate_and_store_tokens<float>(call, first, last);
}

}  // namespace splitserve::SPLITSERVE_ISA
