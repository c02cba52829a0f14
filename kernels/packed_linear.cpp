// A matrix product whose weights are packed once and read once.
//
// Weights lie in panels of kPanel outputs: all of an input's weights for these outputs side by
// side, input after input. A tile of kRows rows of x times one panel keeps its sums in registers;
// the rows take turns at a stretch of the panel that fits the first-level cache, so that memory is
// read once, in order, however many rows there are. One row runs at memory's speed, from a dozen
// rows on at the processor's.
//
// Checkpoints mostly hold bfloat16. Weights that are all exactly bfloat16 stay so and are widened
// in registers: half the memory to read and to keep, and the same bits as a result. Weights of 8 bits
// are widened too; their sums are multiplied by each output's scale at the end.
//
// Every sum adds its products in the order of the inputs, for any number of rows: a row's result
// does not depend on what else is in the batch.
#include "vector.h"

namespace splitserve::SPLITSERVE_ISA {
namespace {

constexpr int kVectors = 2;
constexpr int kPanel = kVectors * kLanes;

// 6 rows of 2 vectors: twelve sums hide the latency of multiply-adds, and with two vectors of
// weights and one of x they fit 16 registers with one to spare.
constexpr int kRows = 6;

// Inputs in a stretch: as floats, a panel of 16 takes 24 KB of the usual 32 of a first-level cache.
constexpr std::int64_t kStretch = 384;

// From this many rows on, narrow weights are widened once for all rows instead of once for each
// tile.
constexpr std::int64_t kWidenRows = 13;

// How far ahead of its use memory is asked for.
constexpr std::int64_t kAheadBytes = 1024;

// One input's weights for all outputs of a panel.
struct Input {
  Floats v[kVectors];
};

// The first (ODD = 0) or second input of a pair.
//
// Left alone, the compiler reads weights anew from memory for every row, and then the sums wait for
// loads.
template <int ODD, class Weight>
inline Input read(const Weight* pair) {
  Input out;
  for (int v = 0; v < kVectors; ++v) {
    out.v[v] = load(pair + ODD * kPanel + v * kLanes);
    in_register(out.v[v]);
  }
  return out;
}

// The two inputs' weights alternate, so that a shift or a mask widens them.
template <int ODD>
inline Input read(const BFloat16* pair) {
  Input out;
  for (int v = 0; v < kVectors; ++v) {
    Words words;
    std::memcpy(&words, pair + v * 2 * kLanes, sizeof words);
    out.v[v] = (Floats)(ODD ? words & 0xffff0000u : words << 16);
    in_register(out.v[v]);
  }
  return out;
}

// Adds the products of one input, x[0] of each row.
template <int ROWS>
inline void multiply(const float* x, std::int64_t stride, const Input& weights,
                     Floats (&sums)[ROWS][kVectors]) {
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r) {
    const Floats value = splat(x[r * stride]);
#pragma GCC unroll 3
    for (int v = 0; v < kVectors; ++v) sums[r][v] += value * weights.v[v];
  }
}

// `rows` rows' sums with one panel, over inputs begin..end.
//
// Between stretches the sums wait in `out`.
template <int ROWS, bool STREAM, class Weight>
inline void tile(const PackedLinear& call, const Weight* panel, std::int64_t row,
                 std::int64_t column, std::int64_t begin, std::int64_t end) {
  const std::int64_t depth = call.depth;
  const float* x = call.x + row * depth;
  float* out = call.out + row * call.outputs + column;
  const bool whole = column + kPanel <= call.outputs;

  Floats sums[ROWS][kVectors] = {};
  if (begin > 0) {
    for (int r = 0; r < ROWS; ++r) {
      for (int v = 0; v < kVectors; ++v) sums[r][v] = load(out + r * call.outputs + v * kLanes);
    }
  }
  std::int64_t k = begin;
  for (; k + 2 <= end; k += 2) {
    const Weight* from = panel + k * kPanel;
    if (STREAM) {
      // One cache line for each line that a pair takes.
      constexpr int kBytes = 2 * kPanel * sizeof(Weight);
      const char* ahead = reinterpret_cast<const char*>(from) + kAheadBytes;
      for (int byte = 0; byte < kBytes; byte += kCacheLine) __builtin_prefetch(ahead + byte);
    }
    multiply<ROWS>(x + k, depth, read<0>(from), sums);
    // Registers hold one input's weights beside the sums, not two: what the compiler cannot see to
    // be the same memory it does not keep.
    asm("" : "+r"(from));
    multiply<ROWS>(x + k + 1, depth, read<1>(from), sums);
  }
  if (k < end) {
    // The packed weights end with an input of zeros then.
    multiply<ROWS>(x + k, depth, read<0>(panel + k * kPanel), sums);
  }

  if (end == depth && call.scales) {
    for (int v = 0; v < kVectors; ++v) {
      const Floats scale = load(call.scales + column + v * kLanes);
      for (int r = 0; r < ROWS; ++r) {
        sums[r][v] *= scale;
        // Rounded here for any number of rows, and not with what is added below for some.
        in_register(sums[r][v]);
      }
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    float* to = out + r * call.outputs;
    const float* bias = call.bias ? call.bias + column : nullptr;
    const float* residual =
        call.residual ? call.residual + (row + r) * call.outputs + column : nullptr;
    if (whole) {
      for (int v = 0; v < kVectors; ++v) {
        Floats sum = sums[r][v];
        if (end == depth && bias) sum += load(bias + v * kLanes);
        if (end == depth && residual) sum += load(residual + v * kLanes);
        store(to + v * kLanes, sum);
      }
    } else {
      float values[kPanel];
      for (int v = 0; v < kVectors; ++v) store(values + v * kLanes, sums[r][v]);
      for (std::int64_t c = 0; column + c < call.outputs; ++c) {
        to[c] = values[c] + (bias ? bias[c] : 0.0f) + (residual ? residual[c] : 0.0f);
      }
    }
  }
}

template <bool STREAM, class Weight>
inline void tiles(const PackedLinear& call, const Weight* panel, std::int64_t row,
                  std::int64_t rows, std::int64_t column, std::int64_t begin, std::int64_t end) {
  switch (rows) {
    case 1: return tile<1, STREAM>(call, panel, row, column, begin, end);
    case 2: return tile<2, STREAM>(call, panel, row, column, begin, end);
    case 3: return tile<3, STREAM>(call, panel, row, column, begin, end);
    case 4: return tile<4, STREAM>(call, panel, row, column, begin, end);
    case 5: return tile<5, STREAM>(call, panel, row, column, begin, end);
    case 6: return tile<6, STREAM>(call, panel, row, column, begin, end);
  }
}

// All rows' sums with one stretch of a panel, in tiles that differ by a row at most.
template <class Weight>
void stretch(const PackedLinear& call, const Weight* panel, std::int64_t column,
             std::int64_t begin, std::int64_t end) {
  const std::int64_t count = (call.rows + kRows - 1) / kRows;
  for (std::int64_t index = 0; index < count; ++index) {
    const std::int64_t row = index * call.rows / count;
    const std::int64_t rows = (index + 1) * call.rows / count - row;
    // Only the first rows meet weights that are still in memory.
    if (index == 0) {
      tiles<true>(call, panel, row, rows, column, begin, end);
    } else {
      tiles<false>(call, panel, row, rows, column, begin, end);
    }
  }
}

// The same with weights widened first; `begin` is even.
template <class Weight>
void widened_stretch(const PackedLinear& call, const Weight* panel, std::int64_t column,
                     std::int64_t begin, std::int64_t end) {
  alignas(kCacheLine) float wide[kStretch * kPanel];
  for (std::int64_t k = begin; k < end; k += 2) {
    const Weight* from = panel + k * kPanel;
    constexpr int kBytes = 2 * kPanel * sizeof(Weight);
    for (int byte = 0; byte < kBytes; byte += kCacheLine) {
      __builtin_prefetch(reinterpret_cast<const char*>(from) + kAheadBytes + byte);
    }
    const Input even = read<0>(from), odd = read<1>(from);
    float* to = wide + (k - begin) * kPanel;
    for (int v = 0; v < kVectors; ++v) {
      store(to + v * kLanes, even.v[v]);
      store(to + kPanel + v * kLanes, odd.v[v]);
    }
  }
  stretch(call, wide - begin * kPanel, column, begin, end);
}

template <class Weight>
void panels(const PackedLinear& call, std::int64_t first_panel, std::int64_t last_panel) {
  const std::int64_t padded = (call.depth + 1) / 2 * 2;
  for (std::int64_t index = first_panel; index < last_panel; ++index) {
    const Weight* panel = static_cast<const Weight*>(call.panels) + index * padded * kPanel;
    const std::int64_t column = index * kPanel;
    // Sums of a panel that sticks out of the result cannot wait there.
    const bool whole = column + kPanel <= call.outputs;
    const std::int64_t length = whole ? kStretch : call.depth;
    for (std::int64_t begin = 0; begin < call.depth; begin += length) {
      const std::int64_t end = begin + length < call.depth ? begin + length : call.depth;
      if constexpr (sizeof(Weight) < sizeof(float)) {
        if (whole && call.rows >= kWidenRows) {
          widened_stretch(call, panel, column, begin, end);
          continue;
        }
      }
      stretch(call, panel, column, begin, end);
    }
  }
}

}  // namespace

extern const std::int64_t panel_width = kPanel;

void linear(const PackedLinear& call, std::int64_t first_panel, std::int64_t last_panel) {
  switch (call.kept) {
    case Weights::kFloat: return panels<float>(call, first_panel, last_panel);
    case Weights::kBFloat16: return panels<BFloat16>(call, first_panel, last_panel);
    case Weights::kInt8: return panels<std::int8_t>(call, first_panel, last_panel);
  }
}

}  // namespace splitserve::SPLITSERVE_ISA
