// The small operators between the large ones: each is one pass over its rows, where torch needs
// three to five calls that cost more than their work.
#include <cmath>

#include "vector.h"

namespace splitserve::SPLITSERVE_ISA {

// Root mean square norm (Zhang & Sennrich, 2019): x / sqrt(mean(x²) + eps) * weight.
void rms_norm(const float* x, const float* weight, float eps, float* out, std::int64_t rows,
              std::int64_t width) {
  const std::int64_t whole = width / kLanes * kLanes;
  for (std::int64_t row = 0; row < rows; ++row, x += width, out += width) {
    Floats squares = {};
    for (std::int64_t i = 0; i < whole; i += kLanes) squares += load(x + i) * load(x + i);
    float total = sum(squares);
    for (std::int64_t i = whole; i < width; ++i) total += x[i] * x[i];
    const float scale = 1.0f / std::sqrt(total / static_cast<float>(width) + eps);
    for (std::int64_t i = 0; i < whole; i += kLanes) {
      store(out + i, load(x + i) * scale * load(weight + i));
    }
    for (std::int64_t i = whole; i < width; ++i) out[i] = x[i] * scale * weight[i];
  }
}

// gate * sigmoid(gate) * up (SwiGLU, Shazeer, 2020): [rows, 2 width] to [rows, width].
void silu_gate(const float* gate_up, float* out, std::int64_t rows, std::int64_t width) {
  const auto gated = [](Floats gate, Floats up) {
    return gate / (exponential(-gate) + 1.0f) * up;
  };
  const std::int64_t whole = width / kLanes * kLanes;
  for (std::int64_t row = 0; row < rows; ++row, gate_up += 2 * width, out += width) {
    for (std::int64_t i = 0; i < whole; i += kLanes) {
      store(out + i, gated(load(gate_up + i), load(gate_up + width + i)));
    }
    for (std::int64_t i = whole; i < width; ++i) {
      out[i] = gated(splat(gate_up[i]), splat(gate_up[width + i]))[0];
    }
  }
}

// Rotates queries and keys (the two halves of a head are its pairs) and files keys and values.
void rotate_and_store(const RotateAndStore& call, std::int64_t first, std::int64_t last) {
  const std::int64_t dim = call.head_dim;
  const std::int64_t half = dim / 2;
  const std::int64_t rotated = call.query_heads + call.kv_heads;
  const std::int64_t head_size = call.block_size * dim;
  for (std::int64_t token = first; token < last; ++token) {
    float* head = call.heads + token * (rotated + call.kv_heads) * dim;
    const float* cos = call.cos + token * dim;
    const float* sin = call.sin + token * dim;
    float* slot = call.cache + call.block_of[token] * call.block_stride +
                  call.offset_of[token] * dim;
    for (std::int64_t index = 0; index < rotated; ++index, head += dim) {
      for (std::int64_t d = 0; d < half; ++d) {
        const float low = head[d], high = head[half + d];
        head[d] = low * cos[d] + high * sin[d];
        head[half + d] = high * cos[half + d] + low * sin[half + d];
      }
      if (index >= call.query_heads) {
        std::memcpy(slot + (index - call.query_heads) * head_size, head, dim * sizeof(float));
      }
    }
    slot += call.kv_heads * head_size;
    for (std::int64_t index = 0; index < call.kv_heads; ++index, head += dim) {
      std::memcpy(slot + index * head_size, head, dim * sizeof(float));
    }
  }
}

}  // namespace splitserve::SPLITSERVE_ISA
