// The kernels as torch operators: takes tensors apart, checks them, picks the processor's kernels
// and gives their work to torch's threads.
//
// Only the library of operators and the thread pool are included; all of torch/extension.h would
// take a minute to compile.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "kernels.h"

namespace splitserve {
namespace {

using at::Tensor;

struct Kernels {
  const char* name;
  std::int64_t panel_width;
  decltype(&plain::attend) attend;
  decltype(&plain::linear) linear;
  decltype(&plain::rms_norm) rms_norm;
  decltype(&plain::silu_gate) silu_gate;
  decltype(&plain::weight_sums) weight_sums;
  decltype(&plain::rotate_and_store) rotate_and_store;
  decltype(&plain::copy_run) copy_run;
};

#define SPLITSERVE_KERNELS(isa)                                                        \
  Kernels {                                                                            \
    #isa, isa::panel_width, isa::attend, isa::linear, isa::rms_norm, isa::silu_gate,   \
        isa::weight_sums, isa::rotate_and_store, isa::copy_run                         \
  }

// The best that this processor has. SPLITSERVE_KERNELS=plain or avx2 asks for less: for tests.
Kernels choose() {
  const char* asked = std::getenv("SPLITSERVE_KERNELS");
  const auto allows = [&](const char* name) {
    return asked == nullptr || *asked == '\0' || std::strcmp(asked, name) == 0;
  };
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
      allows("avx512")) {
    return SPLITSERVE_KERNELS(avx512);
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && allows("avx2")) {
    return SPLITSERVE_KERNELS(avx2);
  }
#endif
  return SPLITSERVE_KERNELS(plain);
}

const Kernels& kernels() {
  static const Kernels chosen = choose();
  return chosen;
}

// Whether bfloat16 has kernels for all of a step, and not only for attention.
bool multiplies_bfloat16() {
#if defined(__x86_64__)
  static const bool tiles = kernels().linear == &avx512::linear && amx::available();
  return tiles;
#else
  return false;
#endif
}

// Runs all tasks on torch's threads. Whoever is free takes the next: tasks differ in length, and a
// thread that something else keeps from its core should not keep the others.
template <class Task>
void share_out(std::int64_t tasks, const Task& task) {
  const std::int64_t threads = std::min<std::int64_t>(at::get_num_threads(), tasks);
  if (threads <= 1) {
    for (std::int64_t index = 0; index < tasks; ++index) task(index);
    return;
  }
  std::atomic<std::int64_t> next{0};
  at::parallel_for(0, threads, 1, [&](std::int64_t, std::int64_t) {
    for (std::int64_t index; (index = next.fetch_add(1)) < tasks;) task(index);
  });
}

// Rows in equal parts, none with fewer than `least` elements: waking a thread takes microseconds.
template <class Task>
void split_rows(std::int64_t rows, std::int64_t width, std::int64_t least, const Task& task) {
  at::parallel_for(0, rows, std::max<std::int64_t>(1, least / std::max<std::int64_t>(1, width)),
                   task);
}

constexpr std::int64_t kLeastElements = 32768;

void check(const Tensor& tensor, at::ScalarType type, const char* name) {
  TORCH_CHECK(tensor.scalar_type() == type && tensor.is_contiguous(), name, " must be contiguous ",
              type, ", not ", tensor.scalar_type());
}

void check_all(std::initializer_list<const Tensor*> tensors, at::ScalarType type,
               const char* name) {
  for (const Tensor* tensor : tensors) check(*tensor, type, name);
}

// Of tensors that may be float or bfloat16: whether this one is bfloat16.
bool is_half(const Tensor& tensor, const char* name) {
  const auto type = tensor.scalar_type();
  TORCH_CHECK(type == at::kFloat || type == at::kBFloat16, name, " must be float or bfloat16");
  check(tensor, type, name);
  return type == at::kBFloat16;
}

// Rows to panels of `width` rows, input after input; inputs padded to pairs, with zeros.
Tensor pack_bytes(const Tensor& weight, std::int64_t width) {
  check(weight, at::kChar, "weight");
  const std::int64_t outputs = weight.size(0), depth = weight.size(1);
  const std::int64_t panels = (outputs + width - 1) / width;
  const std::int64_t padded = (depth + 1) / 2 * 2;
  Tensor packed = at::empty({panels, padded / 2, 2 * width}, weight.options());
  const auto* from = weight.const_data_ptr<std::int8_t>();
  auto* to = packed.mutable_data_ptr<std::int8_t>();
  at::parallel_for(0, panels, 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t panel = first; panel < last; ++panel) {
      for (std::int64_t column = 0; column < width; ++column) {
        const std::int64_t output = panel * width + column;
        for (std::int64_t k = 0; k < padded; ++k) {
          const bool there = output < outputs && k < depth;
          to[(panel * padded + k) * width + column] = there ? from[output * depth + k] : 0;
        }
      }
    }
  });
  return packed;
}

Tensor pack_linear(const Tensor& weight) {
  TORCH_CHECK(weight.dim() == 2, "weight must be [out, in]");
  if (weight.scalar_type() == at::kChar) return pack_bytes(weight, kernels().panel_width);
  const bool stored_half = is_half(weight, "weight");
  const std::int64_t outputs = weight.size(0), depth = weight.size(1);
  const std::int64_t width = kernels().panel_width;
  const std::int64_t panels = (outputs + width - 1) / width;
  const std::int64_t padded = (depth + 1) / 2 * 2;
  const auto* halves = static_cast<const std::uint16_t*>(weight.const_data_ptr());
  const auto* floats = static_cast<const std::uint32_t*>(weight.const_data_ptr());
  // Whether no weight has a bit that bfloat16 hasn't.
  const bool half = stored_half || std::all_of(floats, floats + weight.numel(),
                                               [](std::uint32_t b) { return (b & 0xffffu) == 0; });
  Tensor packed = at::empty({panels, padded / 2, 2 * width},
                            weight.options().dtype(half ? at::kBFloat16 : at::kFloat));
  void* to = packed.mutable_data_ptr();
  at::parallel_for(0, panels, 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t panel = first; panel < last; ++panel) {
      for (std::int64_t column = 0; column < width; ++column) {
        const std::int64_t output = panel * width + column;
        for (std::int64_t k = 0; k < padded; ++k) {
          const bool there = output < outputs && k < depth;
          const std::int64_t at = output * depth + k;
          const std::uint32_t bits = !there ? 0 : stored_half ? halves[at] << 16 : floats[at];
          const std::int64_t pair = (panel * padded + k / 2 * 2) * width;
          if (half) {
            static_cast<std::uint16_t*>(to)[pair + 2 * column + k % 2] = bits >> 16;
          } else {
            static_cast<std::uint32_t*>(to)[pair + k % 2 * width + column] = bits;
          }
        }
      }
    }
  });
  return packed;
}

template <class Element>
const Element* optional_data(const std::optional<Tensor>& tensor, at::ScalarType type,
                             std::int64_t count, const char* name) {
  if (!tensor.has_value()) return nullptr;
  check(*tensor, type, name);
  TORCH_CHECK(tensor->numel() == count, name, " must have ", count, " elements");
  return static_cast<const Element*>(tensor->const_data_ptr());
}

// Several tasks per thread even out their ends; several panels per task are read in one go.
std::int64_t panels_per_task(std::int64_t panels) {
  return std::max<std::int64_t>(1, panels / (4 * at::get_num_threads()));
}

Weights kept(const Tensor& packed) {
  const auto type = packed.scalar_type();
  if (type == at::kChar) return Weights::kInt8;
  return type == at::kBFloat16 ? Weights::kBFloat16 : Weights::kFloat;
}

// One scale for each output of whole panels.
const float* scales_of(const std::optional<Tensor>& scales, const Tensor& packed) {
  return optional_data<float>(scales, at::kFloat, packed.size(0) * packed.size(2) / 2, "scales");
}

void float_linear(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& scales,
                  const std::optional<Tensor>& bias,
                  const std::optional<Tensor>& residual, Tensor& out) {
  PackedLinear call{};
  call.x = x.const_data_ptr<float>();
  call.rows = x.size(0);
  call.depth = x.size(1);
  call.panels = packed.const_data_ptr();
  call.kept = kept(packed);
  call.scales = scales_of(scales, packed);
  call.outputs = out.size(1);
  call.bias = optional_data<float>(bias, at::kFloat, call.outputs, "bias");
  call.residual = optional_data<float>(residual, at::kFloat, out.numel(), "residual");
  call.out = out.mutable_data_ptr<float>();
  const std::int64_t panels = packed.size(0), group = panels_per_task(panels);
  share_out((panels + group - 1) / group, [&](std::int64_t task) {
    kernels().linear(call, task * group, std::min(panels, (task + 1) * group));
  });
}

#if defined(__x86_64__)
// So many tiles of rows that they and a panel fit the second-level cache.
constexpr std::int64_t kTilesPerTask = 32;

void half_linear(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& scales,
                 const std::optional<Tensor>& bias,
                 const std::optional<Tensor>& residual, Tensor& out) {
  TORCH_CHECK(multiplies_bfloat16() && x.size(1) % kTileDepth == 0,
              "no kernel for bfloat16 of this size on this processor");
  TileLinear call{};
  call.rows = x.size(0);
  call.depth = x.size(1);
  call.panels = packed.const_data_ptr();
  call.scales = scales_of(scales, packed);
  call.outputs = out.size(1);
  call.bias = optional_data<BFloat16>(bias, at::kBFloat16, call.outputs, "bias");
  call.residual = optional_data<BFloat16>(residual, at::kBFloat16, out.numel(), "residual");
  call.out = static_cast<BFloat16*>(out.mutable_data_ptr());

  const std::int64_t tiles = (call.rows + kTileRows - 1) / kTileRows;
  Tensor laid = at::empty({tiles * kTileRows, call.depth}, x.options());
  auto* to = static_cast<BFloat16*>(laid.mutable_data_ptr());
  const auto* from = static_cast<const BFloat16*>(x.const_data_ptr());
  split_rows(tiles, kTileRows * call.depth, kLeastElements,
             [&](std::int64_t first, std::int64_t last) {
               amx::pack_rows(from, call.rows, call.depth, first, last, to);
             });
  call.x = to;
  const std::int64_t panels = packed.size(0), group = panels_per_task(panels);
  const std::int64_t groups = (panels + group - 1) / group;
  share_out((tiles + kTilesPerTask - 1) / kTilesPerTask * groups, [&](std::int64_t task) {
    const std::int64_t panel = task % groups * group, tile = task / groups * kTilesPerTask;
    amx::linear(call, panel, std::min(panels, panel + group), tile,
                std::min(tiles, tile + kTilesPerTask));
  });
}
#endif

Tensor linear(const Tensor& x, const Tensor& packed, std::int64_t outputs,
              const std::optional<Tensor>& bias, const std::optional<Tensor>& residual,
              const std::optional<Tensor>& scales) {
  const bool half = is_half(x, "x");
  const Weights weights = kept(packed);
  const std::int64_t width = kernels().panel_width;
  TORCH_CHECK(x.dim() == 2 && packed.dim() == 3 && packed.size(2) == 2 * width &&
                  packed.size(1) == (x.size(1) + 1) / 2 &&
                  packed.size(0) == (outputs + width - 1) / width &&
                  (!half || weights != Weights::kFloat) &&
                  scales.has_value() == (weights == Weights::kInt8),
              "x and the packed weights don't fit one another");
  Tensor out = at::empty({x.size(0), outputs}, x.options());
  if (out.numel() == 0) return out;
#if defined(__x86_64__)
  if (half) {
    half_linear(x, packed, scales, bias, residual, out);
    return out;
  }
#endif
  TORCH_CHECK(!half, "no kernel for bfloat16 on this processor");
  float_linear(x, packed, scales, bias, residual, out);
  return out;
}

// Joins the pieces of a row's context: each piece's softmax, weighted by its sum of exponentials.
template <class Convert>
void join(const PagedAttention& call, std::int64_t first, std::int64_t last, std::int64_t head,
          const Convert& put) {
  const std::int64_t dim = call.head_dim;
  float peak = -INFINITY;
  for (std::int64_t piece = first; piece < last; ++piece) {
    peak = std::max(peak, call.peaks[piece * call.share + head]);
  }
  float total = 0.0f;
  for (std::int64_t piece = first; piece < last; ++piece) {
    const std::int64_t at = piece * call.share + head;
    const float factor = std::exp(call.peaks[at] - peak);
    total += call.weights[at] * factor;
    float* mixed = call.mixed + at * dim;
    float* sum = call.mixed + (first * call.share + head) * dim;
    for (std::int64_t d = 0; d < dim; ++d) {
      sum[d] = mixed[d] * factor + (piece == first ? 0.0f : sum[d]);
    }
  }
  const float* sum = call.mixed + (first * call.share + head) * dim;
  for (std::int64_t d = 0; d < dim; ++d) put(d, sum[d] / total);
}

// Every number of an index must be one of `size`: what lies elsewhere is somebody else's memory.
void check_among(const Tensor& index, std::int64_t size, const char* name) {
  const auto* first = index.const_data_ptr<std::int64_t>();
  TORCH_CHECK(std::all_of(first, first + index.numel(),
                          [size](std::int64_t number) { return 0 <= number && number < size; }),
              name, " must be within 0..", size - 1);
}

std::uint16_t rounded(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}

void paged_attention(Tensor& out, const Tensor& query, const Tensor& cache, std::int64_t layer,
                     const Tensor& tokens, const Tensor& table, const Tensor& begins,
                     const Tensor& ends, double scale) {
  const auto type = cache.scalar_type();
  TORCH_CHECK(type == at::kFloat || type == at::kBFloat16, "KV must be float or bfloat16");
  check(cache, type, "cache");
  check(out, type, "out");
  check_all({&tokens, &table, &begins, &ends}, at::kLong, "each index");
  TORCH_CHECK(cache.dim() == 6 && query.dim() == 3 && query.scalar_type() == type &&
                  query.stride(2) == 1 && query.stride(1) == query.size(2) &&
                  query.size(2) == cache.size(5) && query.size(1) % cache.size(3) == 0,
              "query must be [T, H, D] of the cache's type");
  const std::int64_t rows = tokens.size(0);
  TORCH_CHECK(table.dim() == 2 && table.size(0) == rows && begins.size(0) == rows &&
                  ends.size(0) == rows && out.numel() == query.numel(),
              "rows don't fit one another");
  check_among(tokens, query.size(0), "tokens");
  check_among(table, cache.size(0), "table");
  TORCH_CHECK(0 <= layer && layer < cache.size(1), "layer must be within 0..", cache.size(1) - 1);

  PagedAttention call{};
  call.query = query.const_data_ptr();
  call.query_stride = query.stride(0);
  call.block_stride = cache.stride(0);
  call.cache = static_cast<const char*>(cache.const_data_ptr()) +
               layer * cache.stride(1) * cache.element_size();
  call.tokens = tokens.const_data_ptr<std::int64_t>();
  call.table = table.const_data_ptr<std::int64_t>();
  call.table_width = table.size(1);
  call.kv_heads = cache.size(3);
  call.share = query.size(1) / call.kv_heads;
  call.block_size = cache.size(4);
  call.head_dim = cache.size(5);
  call.scale = static_cast<float>(scale);
  call.half = type == at::kBFloat16;
  TORCH_CHECK(call.head_dim % kHeadDimStep == 0 && call.head_dim <= kMaxHeadDim,
              "no kernel for heads of ", call.head_dim);

  const auto* begin = begins.const_data_ptr<std::int64_t>();
  const auto* end = ends.const_data_ptr<std::int64_t>();
  std::vector<Piece> pieces;
  std::vector<std::int64_t> first;  // piece of each row and KV head, and one past the last
  for (std::int64_t row = 0; row < rows; ++row) {
    TORCH_CHECK(0 <= begin[row] && begin[row] < end[row] &&
                    end[row] <= call.table_width * call.block_size,
                "a row's tokens must be in its blocks");
    for (std::int64_t head = 0; head < call.kv_heads; ++head) {
      first.push_back(static_cast<std::int64_t>(pieces.size()));
      for (std::int64_t at = begin[row]; at < end[row]; at += kPieceTokens) {
        pieces.push_back({row, head, at, std::min(at + kPieceTokens, end[row])});
      }
    }
  }
  const auto count = static_cast<std::int64_t>(pieces.size());
  first.push_back(count);
  std::vector<float> scratch(count * call.share * (call.head_dim + 2));
  call.mixed = scratch.data();
  call.peaks = call.mixed + count * call.share * call.head_dim;
  call.weights = call.peaks + count * call.share;
  share_out(count, [&](std::int64_t index) { kernels().attend(call, pieces[index], index); });

  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t head = 0; head < query.size(1); ++head) {
      const std::int64_t group = row * call.kv_heads + head / call.share;
      const std::int64_t to = (call.tokens[row] * query.size(1) + head) * call.head_dim;
      const auto run = [&](const auto& put) {
        join(call, first[group], first[group + 1], head % call.share, put);
      };
      if (call.half) {
        auto* half = static_cast<std::uint16_t*>(out.mutable_data_ptr()) + to;
        run([half](std::int64_t d, float value) { half[d] = rounded(value); });
      } else {
        auto* full = out.mutable_data_ptr<float>() + to;
        run([full](std::int64_t d, float value) { full[d] = value; });
      }
    }
  }
}

// Some rows of a call.
Rowwise part_of(const Rowwise& call, std::int64_t row_width, std::int64_t first,
                std::int64_t last) {
  const std::int64_t size = call.half ? sizeof(BFloat16) : sizeof(float);
  Rowwise part = call;
  part.x = static_cast<const char*>(call.x) + first * row_width * size;
  part.out = static_cast<char*>(call.out) + first * call.width * size;
  part.rows = last - first;
  return part;
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  const bool half = is_half(x, "x");
  check(weight, at::kFloat, "weight");
  TORCH_CHECK(x.dim() == 2 && weight.numel() == x.size(1), "weight must be one per column");
  Tensor out = at::empty(x.sizes(), x.options());
  const Rowwise call{x.const_data_ptr(), out.mutable_data_ptr(), x.size(0), x.size(1), half};
  const float* scale = weight.const_data_ptr<float>();
  split_rows(call.rows, call.width, kLeastElements, [&](std::int64_t first, std::int64_t last) {
    kernels().rms_norm(part_of(call, call.width, first, last), scale, static_cast<float>(eps));
  });
  return out;
}

Tensor silu_gate(const Tensor& gate_up) {
  const bool half = is_half(gate_up, "gate_up");
  TORCH_CHECK(gate_up.dim() == 2 && gate_up.size(1) % 2 == 0, "gate_up must be [T, 2 * width]");
  const std::int64_t width = gate_up.size(1) / 2;
  Tensor out = at::empty({gate_up.size(0), width}, gate_up.options());
  const Rowwise call{gate_up.const_data_ptr(), out.mutable_data_ptr(), gate_up.size(0), width, half};
  split_rows(call.rows, width, kLeastElements / 4, [&](std::int64_t first, std::int64_t last) {
    kernels().silu_gate(part_of(call, 2 * width, first, last));
  });
  return out;
}

constexpr std::int64_t kMostLanes = 16;

Tensor weight_sums(const Tensor& logits, const Tensor& rows, const Tensor& shifts,
                   const Tensor& scales, std::int64_t stretch) {
  check_all({&logits, &shifts, &scales}, at::kFloat, "each tensor");
  check(rows, at::kLong, "rows");
  const std::int64_t count = rows.numel();
  TORCH_CHECK(logits.dim() == 2 && shifts.numel() == count && scales.numel() == count,
              "shifts and scales must be one per row");
  TORCH_CHECK(stretch > 0 && stretch % kMostLanes == 0, "stretch must be a multiple of ",
              kMostLanes);
  check_among(rows, logits.size(0), "rows");
  const std::int64_t width = logits.size(1);
  Tensor sums = at::empty({count, (width + stretch - 1) / stretch}, logits.options());
  const WeightSums call{logits.const_data_ptr<float>(), rows.const_data_ptr<std::int64_t>(),
                        shifts.const_data_ptr<float>(), scales.const_data_ptr<float>(),
                        sums.mutable_data_ptr<float>(), width,
                        stretch};
  split_rows(count, width, kLeastElements, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t index = first; index < last; ++index) kernels().weight_sums(call, index);
  });
  return sums;
}

void rotate_and_store(Tensor& heads, const Tensor& cos, const Tensor& sin, Tensor& cache,
                      std::int64_t layer, const Tensor& block_of, const Tensor& offset_of) {
  const bool half = is_half(heads, "heads");
  check_all({&cos, &sin, &cache}, heads.scalar_type(), "each tensor");
  check_all({&block_of, &offset_of}, at::kLong, "each index");
  TORCH_CHECK(heads.dim() == 3 && cache.dim() == 6 && heads.size(2) == cache.size(5) &&
                  heads.size(1) > 2 * cache.size(3),
              "heads must be [T, H + 2K, D]");
  const std::int64_t tokens = heads.size(0), dim = heads.size(2);
  TORCH_CHECK(cos.numel() == tokens * dim && sin.numel() == tokens * dim &&
                  block_of.numel() == tokens && offset_of.numel() == tokens,
              "one position per token");
  check_among(block_of, cache.size(0), "block_of");
  check_among(offset_of, cache.size(4), "offset_of");
  TORCH_CHECK(0 <= layer && layer < cache.size(1), "layer must be within 0..", cache.size(1) - 1);
  RotateAndStore call{};
  call.heads = heads.mutable_data_ptr();
  call.cos = cos.const_data_ptr();
  call.sin = sin.const_data_ptr();
  call.cache = static_cast<char*>(cache.mutable_data_ptr()) +
               layer * cache.stride(1) * cache.element_size();
  call.half = half;
  call.block_stride = cache.stride(0);
  call.block_of = block_of.const_data_ptr<std::int64_t>();
  call.offset_of = offset_of.const_data_ptr<std::int64_t>();
  call.kv_heads = cache.size(3);
  call.query_heads = heads.size(1) - 2 * call.kv_heads;
  call.block_size = cache.size(4);
  call.head_dim = dim;
  split_rows(tokens, heads.size(1) * dim, kLeastElements,
             [&](std::int64_t first, std::int64_t last) {
               kernels().rotate_and_store(call, first, last);
             });
}

CacheShape shape_of(const Tensor& cache, const char* name) {
  TORCH_CHECK(cache.dim() == 6 && cache.size(2) == 2 && cache.is_contiguous(), name,
              " must be contiguous [N, layers, 2, heads, S, D]");
  return {cache.size(1), cache.size(3), cache.size(4)};
}

// Whether `count` from `first` on are among `size`.
bool within(std::int64_t first, std::int64_t count, std::int64_t size) {
  return 0 <= first && 0 <= count && count <= size && first <= size - count;
}

void copy_runs(Tensor& target, const Tensor& source, at::IntArrayRef part, const Tensor& runs) {
  CopyRegion region{};
  region.source_shape = shape_of(source, "source");
  region.target_shape = shape_of(target, "target");
  TORCH_CHECK(source.element_size() == target.element_size() && source.size(5) == target.size(5),
              "both caches must have one head size and data type");
  check(runs, at::kLong, "runs");
  TORCH_CHECK(runs.dim() == 2 && runs.size(1) == sizeof(CopyRun) / sizeof(std::int64_t),
              "runs must be [R, 6]");
  TORCH_CHECK(part.size() == 6, "part must be six numbers");
  region.source = static_cast<const char*>(source.const_data_ptr());
  region.target = static_cast<char*>(target.mutable_data_ptr());
  region.vector_bytes = source.size(5) * source.element_size();
  region.source_layer = part[0];
  region.source_head = part[1];
  region.target_layer = part[2];
  region.target_head = part[3];
  region.layers = part[4];
  region.heads = part[5];
  TORCH_CHECK(within(part[0], part[4], source.size(1)) && within(part[1], part[5], source.size(3)) &&
                  within(part[2], part[4], target.size(1)) &&
                  within(part[3], part[5], target.size(3)),
              "part must lie within both caches");
  const auto* run = static_cast<const CopyRun*>(runs.const_data_ptr());
  for (const CopyRun* end = run + runs.size(0); run != end; ++run) {
    TORCH_CHECK(within(run->source_block, run->blocks, source.size(0)) &&
                    within(run->source_offset, run->tokens, source.size(4)) &&
                    within(run->target_block, run->blocks, target.size(0)) &&
                    within(run->target_offset, run->tokens, target.size(4)),
                "each run must lie within both caches");
    kernels().copy_run(region, *run);
  }
}

std::string instruction_set() { return kernels().name; }

}  // namespace
}  // namespace splitserve

TORCH_LIBRARY(splitserve, library) {
  library.def("instruction_set() -> str", &splitserve::instruction_set);
  library.def("multiplies_bfloat16() -> bool", &splitserve::multiplies_bfloat16);
  library.def("pack_linear(Tensor weight) -> Tensor");
  library.def(
      "linear(Tensor x, Tensor packed, int outputs, Tensor? bias, Tensor? residual, "
      "Tensor? scales=None) -> Tensor");
  library.def(
      "paged_attention(Tensor(a!) out, Tensor query, Tensor cache, int layer, Tensor tokens, "
      "Tensor table, Tensor begins, Tensor ends, float scale) -> ()");
  library.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  library.def("silu_gate(Tensor gate_up) -> Tensor");
  library.def(
      "weight_sums(Tensor logits, Tensor rows, Tensor shifts, Tensor scales, int stretch) "
      "-> Tensor");
  library.def(
      "rotate_and_store(Tensor(a!) heads, Tensor cos, Tensor sin, Tensor(b!) cache, int layer, "
      "Tensor block_of, Tensor offset_of) -> ()");
  library.def("copy_runs(Tensor(a!) target, Tensor source, int[] part, Tensor runs) -> ()");
}

TORCH_LIBRARY_IMPL(splitserve, CPU, library) {
  library.impl("pack_linear", &splitserve::pack_linear);
  library.impl("linear", &splitserve::linear);
  library.impl("paged_attention", &splitserve::paged_attention);
  library.impl("rms_norm", &splitserve::rms_norm);
  library.impl("silu_gate", &splitserve::silu_gate);
  library.impl("weight_sums", &splitserve::weight_sums);
  library.impl("rotate_and_store", &splitserve::rotate_and_store);
  library.impl("copy_runs", &splitserve::copy_runs);
}
