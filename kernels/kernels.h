// What a kernel is told, and which kernels there are.
//
// Nothing here knows torch or threads: a kernel computes a part that it is given, in the caller's
// thread. `bind.cpp` takes tensors apart and hands parts to torch's threads.
//
// Shapes are as in splitserve/model/__init__.py: T tokens, H query heads, K KV heads, D head size,
// S block size, N blocks.
#pragma once

#include <cstdint>

namespace splitserve {

struct BFloat16 {
  std::uint16_t bits;
};

// Longest part of a context that one call attends to. A constant, and not a share of the context
// by the number of threads, so that a row's result depends on nothing but the row.
constexpr std::int64_t kPieceTokens = 256;

// Attention of single tokens (decode) to KV in blocks.
struct PagedAttention {
  const void* query;              // [T, H, D]
  std::int64_t query_stride;      // elements between tokens
  const void* cache;              // one layer's part of block 0: [2, K, S, D]
  std::int64_t block_stride;      // elements between blocks
  const std::int64_t* tokens;     // [rows]: which token is a row's
  const std::int64_t* table;      // [rows, table_width]: block ids in token order
  std::int64_t table_width;
  std::int64_t kv_heads;
  std::int64_t share;             // H / K: query heads per KV head
  std::int64_t block_size;
  std::int64_t head_dim;          // a multiple of kHeadDimStep
  float scale;
  bool half;                      // query and cache are bfloat16, not float
  float* mixed;                   // [pieces, share, D]: values, weighted, not yet divided
  float* peaks;                   // [pieces, share]: largest score
  float* weights;                 // [pieces, share]: sum of exp(score - peak)
};

constexpr std::int64_t kHeadDimStep = 16;
constexpr std::int64_t kMaxHeadDim = 256;

// Tokens begin..end of one row's context, for one KV head and all query heads that share it.
struct Piece {
  std::int64_t row;
  std::int64_t kv_head;
  std::int64_t begin;
  std::int64_t end;
};

// How panels of weights are kept.
enum class Weights {
  kFloat,
  kBFloat16,  // pairs of depths interleaved
  kInt8,      // numbers of -127..127, of which each output has a scale
};

// y = x W' + bias + residual, with W in panels; see packed_linear.cpp.
struct PackedLinear {
  const float* x;         // [rows, depth]
  std::int64_t rows;
  std::int64_t depth;
  const void* panels;
  Weights kept;
  const float* scales;    // [panels * panel width], of kInt8 only
  const float* bias;      // [outputs], or null
  const float* residual;  // [rows, outputs], or null
  float* out;             // [rows, outputs]
  std::int64_t outputs;
};

// A tile of the processor's matrix registers: rows of x, and inputs.
constexpr std::int64_t kTileRows = 16;
constexpr std::int64_t kTileDepth = 32;

// The same in bfloat16 throughout, sums apart; see tile_linear.cpp.
struct TileLinear {
  const BFloat16* x;         // tiles: [rows / kTileRows, depth / kTileDepth, kTileRows, kTileDepth]
  std::int64_t rows;
  std::int64_t depth;        // a multiple of kTileDepth
  const void* panels;        // bfloat16, or int8 if there are scales
  const float* scales;       // [panels * panel width], or null
  const BFloat16* bias;      // [outputs], or null
  const BFloat16* residual;  // [rows, outputs], or null
  BFloat16* out;             // [rows, outputs]
  std::int64_t outputs;
};

// Rows of floats or bfloat16 to rows of the same.
struct Rowwise {
  const void* x;
  void* out;
  std::int64_t rows;
  std::int64_t width;  // of a row of `out`
  bool half;           // bfloat16, not float
};

// How likely tokens are, summed up in stretches for a draw to walk along.
struct WeightSums {
  const float* logits;        // [all rows, width]
  const std::int64_t* rows;   // [rows]
  const float* shifts;        // [rows]
  const float* scales;        // [rows]
  float* sums;                // [rows, stretches]
  std::int64_t width;
  std::int64_t stretch;       // a multiple of the widest vector's lanes
};

// Rotary positions for queries and keys, in place, and keys and values into the cache.
struct RotateAndStore {
  void* heads;                      // [T, H + 2K, D]: queries, keys, values
  const void* cos;                  // [T, D]
  const void* sin;                  // [T, D], the first half negated
  void* cache;                      // one layer's part of block 0: [2, K, S, D]
  bool half;                        // all four are bfloat16, not float
  std::int64_t block_stride;        // elements between blocks
  const std::int64_t* block_of;     // [T]
  const std::int64_t* offset_of;    // [T]
  std::int64_t query_heads;
  std::int64_t kv_heads;
  std::int64_t block_size;
  std::int64_t head_dim;
};

// How a cache [N, layers, 2, heads, S, D] is laid out.
struct CacheShape {
  std::int64_t layers;
  std::int64_t heads;
  std::int64_t block_size;
};

// Layers and heads that one cache gives to another; see splitserve/transfer/plan.py.
struct CopyRegion {
  const char* source;
  CacheShape source_shape;
  char* target;
  CacheShape target_shape;
  std::int64_t vector_bytes;  // of one token's key or value of one head
  std::int64_t source_layer;
  std::int64_t source_head;
  std::int64_t target_layer;
  std::int64_t target_head;
  std::int64_t layers;
  std::int64_t heads;
};

// Tokens of a block, or whole blocks in a row.
struct CopyRun {
  std::int64_t source_block;
  std::int64_t source_offset;
  std::int64_t target_block;
  std::int64_t target_offset;
  std::int64_t tokens;
  std::int64_t blocks;
};

// Every instruction set has the same kernels.
#define SPLITSERVE_DECLARE(isa)                                                              \
  namespace isa {                                                                            \
  extern const std::int64_t panel_width;                                                     \
  void attend(const PagedAttention& call, const Piece& piece, std::int64_t index);           \
  void linear(const PackedLinear& call, std::int64_t first_panel, std::int64_t last_panel);  \
  void rms_norm(const Rowwise& call, const float* weight, float eps);                        \
  void silu_gate(const Rowwise& call);                                                       \
  void weight_sums(const WeightSums& call, std::int64_t index);                              \
  void rotate_and_store(const RotateAndStore& call, std::int64_t first, std::int64_t last);  \
  void copy_run(const CopyRegion& region, const CopyRun& run);                               \
  }

SPLITSERVE_DECLARE(plain)
#if defined(__x86_64__)
SPLITSERVE_DECLARE(avx2)
SPLITSERVE_DECLARE(avx512)

// Beside avx512, where there are tiles.
namespace amx {
// Whether this processor has them and the kernel lets us use them.
bool available();
// Lays rows out in tiles, padded with zeros.
void pack_rows(const BFloat16* x, std::int64_t rows, std::int64_t depth, std::int64_t first_tile,
               std::int64_t last_tile, BFloat16* out);
// Panels first..last for rows of tiles first..last.
void linear(const TileLinear& call, std::int64_t first_panel, std::int64_t last_panel,
            std::int64_t first_tile, std::int64_t last_tile);
}  // namespace amx
#endif

}  // namespace splitserve
