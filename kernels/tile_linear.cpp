// A matrix product in bfloat16 on the processor's matrix registers (AMX).
//
// Weights lie in the panels of packed_linear.cpp: 16 pairs of inputs by 16 outputs are a tile as the
// processor wants it. Two tiles of x times the two of a panel keep their sums in four registers. A
// panel stays in the second-level cache while all rows of a group pass it, so that memory is read
// once for a group, in order. Decode runs at memory's speed, prefill at the processor's.
//
// Weights of 8 bits, which bfloat16 holds exactly, are widened on the way of a group's first rows,
// one tile ahead of the matrix registers, and the others find them in the cache.
//
// Every sum adds its products in the order of the inputs, for any number of rows: a row's result
// does not depend on what else is in the batch.
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <vector>

#include "vector.h"

namespace splitserve::amx {
namespace {

constexpr int kPanel = 2 * kLanes;
constexpr int kTile = kTileRows * kTileDepth;

// What a panel holds for one tile's depth: two tiles, side by side.
constexpr int kPanelTile = kTileDepth * kPanel;
constexpr int kPanelRowBytes = 2 * kPanel * sizeof(BFloat16);

// Eight tiles of 16 rows of 64 bytes.
struct alignas(64) TileConfig {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// How far ahead of its widening memory is asked for: the processor's own prefetching, which follows
// the loads, leaves it waiting.
constexpr std::int64_t kAheadBytes = 8192;

struct alignas(kCacheLine) Line {
  char bytes[kCacheLine];
};

// A share of the next panel, asked for while the processor is busy with this one.
struct Ahead {
  const char* from;
  std::int64_t lines;  // for each tile's depth
};

// A panel: bfloat16, or where it is to be once `narrow` is widened.
struct Panel {
  const BFloat16* wide;
  BFloat16* to;
  const std::int8_t* narrow;
};

// Widens what a panel holds for one tile's depth, from rows of one input to pairs interleaved.
inline void widen(const std::int8_t* from, BFloat16* to) {
  for (int k = 0; k < kTileDepth; k += 2, from += 2 * kPanel, to += 2 * kPanel) {
    __builtin_prefetch(from + kAheadBytes, 0, 2);
#pragma GCC unroll 2
    for (int v = 0; v < kPanel; v += kLanes) {
      // The lower half of either float is zero.
      const Words pairs = (Words)load(from + v) >> 16 | (Words)load(from + kPanel + v);
      std::memcpy(to + 2 * v, &pairs, sizeof pairs);
    }
  }
}

// Registers: sums 0 to 3, x 4 and 5, weights 6 and 7.
template <int TILES, bool WIDEN>
inline void multiply(const BFloat16* x, const BFloat16* next_x, const Panel& panel,
                     std::int64_t tiles, Ahead ahead) {
  _tile_zero(0);
  _tile_zero(1);
  if (TILES == 2) {
    _tile_zero(2);
    _tile_zero(3);
  }
  if (WIDEN) widen(panel.narrow, panel.to);
  for (std::int64_t k = 0; k < tiles; ++k) {
    if (WIDEN && k + 1 < tiles) {
      widen(panel.narrow + (k + 1) * kPanelTile, panel.to + (k + 1) * kPanelTile);
    }
    const BFloat16* weights = panel.wide + k * kPanelTile;
    for (std::int64_t line = 0; line < ahead.lines; ++line, ahead.from += kCacheLine) {
      __builtin_prefetch(ahead.from, 0, 2);
    }
    _tile_loadd(6, weights, kPanelRowBytes);
    _tile_loadd(7, weights + kPanel, kPanelRowBytes);
    _tile_loadd(4, x + k * kTile, kTileDepth * sizeof(BFloat16));
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (TILES == 2) {
      _tile_loadd(5, next_x + k * kTile, kTileDepth * sizeof(BFloat16));
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
}

// Sums of one row, times their outputs' scales.
inline Floats scaled(const TileLinear& call, const float* sums, std::int64_t column) {
  Floats out = load(sums);
  if (call.scales) out *= load(call.scales + column);
  // Rounded here wherever this is inlined, and not with what is added next.
  in_register(out);
  return out;
}

// Scales, bias and residual to a tile row's sums, and the result to its place.
void finish(const TileLinear& call, float* sums, std::int64_t first_row, std::int64_t column) {
  const std::int64_t rows =
      first_row + kTileRows < call.rows ? kTileRows : call.rows - first_row;
  for (std::int64_t row = 0; row < rows; ++row, sums += kPanel) {
    const std::int64_t at = (first_row + row) * call.outputs + column;
    if (column + kPanel <= call.outputs) {
      for (int v = 0; v < kPanel; v += kLanes) {
        Floats sum = scaled(call, sums + v, column + v);
        if (call.bias) sum += load(call.bias + column + v);
        if (call.residual) sum += load(call.residual + at + v);
        store(call.out + at + v, sum);
      }
    } else {
      for (int v = 0; v < kPanel; v += kLanes) store(sums + v, scaled(call, sums + v, column + v));
      for (std::int64_t c = 0; column + c < call.outputs; ++c) {
        put(call.out + at + c, sums[c] + (call.bias ? widened(call.bias[column + c]) : 0.0f) +
                                   (call.residual ? widened(call.residual[at + c]) : 0.0f));
      }
    }
  }
}

// One or two tiles of rows with a panel.
template <int TILES>
void tile_rows(const TileLinear& call, const Panel& panel, std::int64_t tile,
               std::int64_t column, Ahead ahead) {
  const std::int64_t tiles = call.depth / kTileDepth;
  const BFloat16* x = call.x + tile * tiles * kTile;
  if (panel.narrow) {
    multiply<TILES, true>(x, x + tiles * kTile, panel, tiles, ahead);
  } else {
    multiply<TILES, false>(x, x + tiles * kTile, panel, tiles, ahead);
  }
  alignas(64) float sums[TILES * kTileRows][kPanel];
  constexpr int kRowBytes = kPanel * sizeof(float);
  _tile_stored(0, sums[0], kRowBytes);
  _tile_stored(1, sums[0] + kLanes, kRowBytes);
  if (TILES == 2) {
    _tile_stored(2, sums[kTileRows], kRowBytes);
    _tile_stored(3, sums[kTileRows] + kLanes, kRowBytes);
  }
  for (int index = 0; index < TILES; ++index) {
    finish(call, sums[index * kTileRows], (tile + index) * kTileRows, column);
  }
}

}  // namespace

bool available() {
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  constexpr unsigned kBFloat16 = 1u << 22, kTiles = 1u << 24;
  if ((edx & kBFloat16) == 0 || (edx & kTiles) == 0) return false;
  // Linux makes room for the tiles' state only for who asks.
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

void pack_rows(const BFloat16* x, std::int64_t rows, std::int64_t depth, std::int64_t first_tile,
               std::int64_t last_tile, BFloat16* out) {
  constexpr std::int64_t kRowBytes = kTileDepth * sizeof(BFloat16);
  out += first_tile * depth * kTileRows;
  for (std::int64_t tile = first_tile; tile < last_tile; ++tile) {
    for (std::int64_t k = 0; k < depth; k += kTileDepth) {
      for (std::int64_t row = tile * kTileRows; row < (tile + 1) * kTileRows; ++row) {
        if (row < rows) {
          std::memcpy(out, x + row * depth + k, kRowBytes);
        } else {
          std::memset(out, 0, kRowBytes);
        }
        out += kTileDepth;
      }
    }
  }
}

void linear(const TileLinear& call, std::int64_t first_panel, std::int64_t last_panel,
            std::int64_t first_tile, std::int64_t last_tile) {
  const TileConfig config;
  _tile_loadconfig(&config);
  const std::int64_t passes = (last_tile - first_tile + 1) / 2;
  // A single pass reads as fast as the processor's own prefetching, which follows it.
  const std::int64_t tile_lines = kPanelTile * (call.scales ? 1 : 2) / kCacheLine;
  const std::int64_t lines = passes == 1 ? 0 : (tile_lines + passes - 1) / passes;
  const std::int64_t share = lines * kCacheLine * (call.depth / kTileDepth);
  const std::int64_t panel_size = call.depth * kPanel;
  thread_local std::vector<Line> widened;
  if (call.scales) widened.resize(panel_size * sizeof(BFloat16) / sizeof(Line));
  for (std::int64_t index = first_panel; index < last_panel; ++index) {
    Panel panel{};
    Ahead ahead{nullptr, lines};
    if (call.scales) {
      panel.narrow = static_cast<const std::int8_t*>(call.panels) + index * panel_size;
      panel.to = reinterpret_cast<BFloat16*>(widened.data());
      panel.wide = panel.to;
      ahead.from = reinterpret_cast<const char*>(panel.narrow + panel_size);
    } else {
      panel.wide = static_cast<const BFloat16*>(call.panels) + index * panel_size;
      ahead.from = reinterpret_cast<const char*>(panel.wide + panel_size);
    }
    const std::int64_t column = index * kPanel;
    for (std::int64_t tile = first_tile; tile < last_tile; tile += 2, ahead.from += share) {
      if (tile + 2 <= last_tile) {
        tile_rows<2>(call, panel, tile, column, ahead);
      } else {
        tile_rows<1>(call, panel, tile, column, ahead);
      }
      panel.narrow = nullptr;  // Widened now.
    }
  }
  _tile_release();
}

}  // namespace splitserve::amx
