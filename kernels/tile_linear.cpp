// A matrix product in bfloat16 on the processor's matrix registers (AMX).
//
// Weights lie in the panels of packed_linear.cpp: 16 pairs of inputs by 16 outputs are a tile as the
// processor wants it. Two tiles of x times the two of a panel keep their sums in four registers. A
// panel stays in the second-level cache while all rows of a group pass it, so that memory is read
// once for a group, in order. Decode runs at memory's speed, prefill at the processor's.
//
// Every sum adds its products in the order of the inputs, for any number of rows: a row's result
// does not depend on what else is in the batch.
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "vector.h"

namespace splitserve::amx {
namespace {

constexpr int kPanel = 2 * kLanes;
constexpr int kTile = kTileRows * kTileDepth;

// What a panel holds for one tile's depth: two tiles, side by side.
constexpr int kPanelTile = kTileDepth * kPanel;
constexpr int kPanelRowBytes = 2 * kPanel * sizeof(BFloat16);

constexpr int kPanelTileLines = kPanelTile * sizeof(BFloat16) / kCacheLine;

// Eight tiles of 16 rows of 64 bytes.
struct alignas(64) TileConfig {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// A share of the next panel, asked for while the processor is busy with this one.
struct Ahead {
  const char* from;
  std::int64_t lines;  // for each tile's depth
};

// Registers: sums 0 to 3, x 4 and 5, weights 6 and 7.
template <int TILES>
inline void multiply(const BFloat16* x, const BFloat16* next_x, const BFloat16* panel,
                     std::int64_t tiles, Ahead ahead) {
  _tile_zero(0);
  _tile_zero(1);
  if (TILES == 2) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (std::int64_t k = 0; k < tiles; ++k) {
    const BFloat16* weights = panel + k * kPanelTile;
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

// Bias and residual to a tile row's sums, and the result to its place.
void finish(const TileLinear& call, const float* sums, std::int64_t first_row,
            std::int64_t column) {
  const std::int64_t rows =
      first_row + kTileRows < call.rows ? kTileRows : call.rows - first_row;
  for (std::int64_t row = 0; row < rows; ++row, sums += kPanel) {
    const std::int64_t at = (first_row + row) * call.outputs + column;
    if (column + kPanel <= call.outputs) {
      for (int v = 0; v < kPanel; v += kLanes) {
        Floats sum = load(sums + v);
        if (call.bias) sum += load(call.bias + column + v);
        if (call.residual) sum += load(call.residual + at + v);
        store(call.out + at + v, sum);
      }
    } else {
      for (std::int64_t c = 0; column + c < call.outputs; ++c) {
        put(call.out + at + c, sums[c] + (call.bias ? widened(call.bias[column + c]) : 0.0f) +
                                   (call.residual ? widened(call.residual[at + c]) : 0.0f));
      }
    }
  }
}

// One or two tiles of rows with a panel.
template <int TILES>
void tile_rows(const TileLinear& call, const BFloat16* panel, std::int64_t tile,
               std::int64_t column, Ahead ahead) {
  const std::int64_t tiles = call.depth / kTileDepth;
  const BFloat16* x = call.x + tile * tiles * kTile;
  multiply<TILES>(x, x + tiles * kTile, panel, tiles, ahead);
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
  const std::int64_t lines = passes == 1 ? 0 : (kPanelTileLines + passes - 1) / passes;
  const std::int64_t share = lines * kCacheLine * (call.depth / kTileDepth);
  for (std::int64_t index = first_panel; index < last_panel; ++index) {
    const BFloat16* panel = call.panels + index * call.depth * kPanel;
    const std::int64_t column = index * kPanel;
    Ahead ahead{reinterpret_cast<const char*>(panel + call.depth * kPanel), lines};
    for (std::int64_t tile = first_tile; tile < last_tile; tile += 2, ahead.from += share) {
      if (tile + 2 <= last_tile) {
        tile_rows<2>(call, panel, tile, column, ahead);
      } else {
        tile_rows<1>(call, panel, tile, column, ahead);
      }
    }
  }
  _tile_release();
}

}  // namespace splitserve::amx
