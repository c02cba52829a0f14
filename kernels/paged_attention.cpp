// Decode attention that reads KV where it lies.
//
// One call attends to a piece of one row's context, for one KV head: keys are read once for all
// query heads that share them (up to kHeads at a time, which is what registers hold), then scores
// become weights, then values are read once. Pieces of a context are joined by the caller, as in
// Flash-Decoding (Dao et al., 2023).
#include "vector.h"

namespace splitserve::SPLITSERVE_ISA {
namespace {

constexpr int kHeads = 3;

// One piece's blocks: where a token's key or value is.
template <class Element>
struct Blocks {
  const Element* first;  // the KV head's part of block 0
  const std::int64_t* ids;
  std::int64_t block_stride;
  std::int64_t block_size;
  std::int64_t head_dim;

  const Element* at(std::int64_t token) const {
    return first + ids[token / block_size] * block_stride + token % block_size * head_dim;
  }

  // Calls visit(first token, how many, where they lie, what will be read next) block by block.
  // `after` is what is read after the last block.
  template <class Visit>
  void each(std::int64_t begin, std::int64_t end, const Element* after, Visit visit) const {
    while (begin < end) {
      const std::int64_t left = block_size - begin % block_size;
      const std::int64_t count = left < end - begin ? left : end - begin;
      const std::int64_t next = begin + count;
      visit(begin, count, at(begin), next < end ? at(next) : after);
      begin = next;
    }
  }
};

// Blocks lie anywhere in memory, where the processor's own prefetching doesn't follow.
template <class Element>
inline void prefetch(const Element* from, std::int64_t count) {
  const char* bytes = reinterpret_cast<const char*>(from);
  const std::int64_t size = count * static_cast<std::int64_t>(sizeof(Element));
  for (std::int64_t offset = 0; offset < size; offset += kCacheLine) {
    __builtin_prefetch(bytes + offset);
  }
}

// scores[head][token] of TOKENS tokens: 4, or 1 for what is left of a block.
template <int HEADS, int TOKENS, class Element>
inline void score(const float* query, const Element* keys, std::int64_t head_dim, float* scores) {
  Floats totals[HEADS][4] = {};
  for (std::int64_t d = 0; d < head_dim; d += kLanes) {
    Floats q[HEADS];
    for (int head = 0; head < HEADS; ++head) q[head] = load(query + head * head_dim + d);
    for (int token = 0; token < TOKENS; ++token) {
      const Floats key = load(keys + token * head_dim + d);
      for (int head = 0; head < HEADS; ++head) totals[head][token] += q[head] * key;
    }
  }
  for (int head = 0; head < HEADS; ++head) {
    const Floats* t = totals[head];
    const Quad four = sums(t[0], t[1], t[2], t[3]);
    std::memcpy(scores + head * kPieceTokens, &four, TOKENS * sizeof(float));
  }
}

// Adds weighted values of one block to VECTORS vectors' width of the result.
template <int HEADS, int VECTORS, class Element>
inline void mix(const float* weights, const Element* values, const Element* next,
                std::int64_t count, std::int64_t head_dim, float* mixed) {
  Floats totals[HEADS][VECTORS];
  for (int head = 0; head < HEADS; ++head) {
    for (int v = 0; v < VECTORS; ++v) {
      totals[head][v] = load(mixed + head * head_dim + v * kLanes);
    }
  }
  for (std::int64_t token = 0; token < count; ++token) {
    Floats weight[HEADS];
    for (int head = 0; head < HEADS; ++head) {
      weight[head] = splat(weights[head * kPieceTokens + token]);
    }
    // A few at a time: the processor waits for no more than two dozen lines at once.
    prefetch(next + token * head_dim, VECTORS * kLanes);
    for (int v = 0; v < VECTORS; ++v) {
      const Floats value = load(values + token * head_dim + v * kLanes);
      for (int head = 0; head < HEADS; ++head) totals[head][v] += weight[head] * value;
    }
  }
  for (int head = 0; head < HEADS; ++head) {
    for (int v = 0; v < VECTORS; ++v) {
      store(mixed + head * head_dim + v * kLanes, totals[head][v]);
    }
  }
}

// Turns scores into exp(score - peak) in place.
inline void weigh(float* scores, std::int64_t count, float* peak, float* weight) {
  // Lanes past the end must not win and must not weigh.
  const std::int64_t padded = (count + kLanes - 1) / kLanes * kLanes;
  for (std::int64_t token = count; token < padded; ++token) scores[token] = -__builtin_inff();
  Floats highest = load(scores);
  for (std::int64_t token = kLanes; token < padded; token += kLanes) {
    highest = greater(highest, load(scores + token));
  }
  *peak = largest(highest);
  for (std::int64_t token = count; token < padded; ++token) scores[token] = *peak;
  Floats total = {};
  for (std::int64_t token = 0; token < padded; token += kLanes) {
    const Floats e = exponential(load(scores + token) - *peak);
    store(scores + token, e);
    total += e;
  }
  // exponential(0) is exactly 1.
  *weight = sum(total) - static_cast<float>(padded - count);
}

template <int HEADS, class Element>
void attend_heads(const PagedAttention& call, const Piece& piece, const Element* query,
                  float* mixed, float* peaks, float* weights) {
  // The caller makes no empty pieces; the compiler should know.
  if (piece.begin >= piece.end) __builtin_unreachable();
  const std::int64_t dim = call.head_dim;
  const std::int64_t head_size = call.block_size * dim;
  const std::int64_t* ids = call.table + piece.row * call.table_width;
  const Element* cache = static_cast<const Element*>(call.cache) + piece.kv_head * head_size;
  const Blocks<Element> keys{cache, ids, call.block_stride, call.block_size, dim};
  Blocks<Element> values = keys;
  values.first += call.kv_heads * head_size;

  float scaled[HEADS * kMaxHeadDim];
  for (std::int64_t d = 0; d < HEADS * dim; d += kLanes) {
    store(scaled + d, load(query + d) * call.scale);
  }
  float scores[HEADS][kPieceTokens];
  keys.each(piece.begin, piece.end, values.at(piece.begin),
            [&](std::int64_t first, std::int64_t count, const Element* at, const Element* next) {
              float* to = scores[0] + (first - piece.begin);
              std::int64_t token = 0;
              for (; token + 4 <= count; token += 4) {
                prefetch(next + token * dim, 4 * dim);
                score<HEADS, 4>(scaled, at + token * dim, dim, to + token);
              }
              for (; token < count; ++token) {
                prefetch(next + token * dim, dim);
                score<HEADS, 1>(scaled, at + token * dim, dim, to + token);
              }
            });
  for (int head = 0; head < HEADS; ++head) {
    weigh(scores[head], piece.end - piece.begin, peaks + head, weights + head);
  }
  std::memset(mixed, 0, HEADS * dim * sizeof(float));
  // What this thread reads next is not known here; the last block is there already.
  const Element* after = values.at(piece.end - 1);
  values.each(piece.begin, piece.end, after,
              [&](std::int64_t first, std::int64_t count, const Element* at, const Element* next) {
                const float* from = scores[0] + (first - piece.begin);
                std::int64_t d = 0;
                for (; d + 4 * kLanes <= dim; d += 4 * kLanes) {
                  mix<HEADS, 4>(from, at + d, next + d, count, dim, mixed + d);
                }
                for (; d < dim; d += kLanes) {
                  mix<HEADS, 1>(from, at + d, next + d, count, dim, mixed + d);
                }
              });
}

template <class Element>
void attend_elements(const PagedAttention& call, const Piece& piece, std::int64_t index) {
  const std::int64_t dim = call.head_dim;
  const Element* query = static_cast<const Element*>(call.query) +
                         call.tokens[piece.row] * call.query_stride +
                         piece.kv_head * call.share * dim;
  // As few groups as hold all heads, alike in size: four heads are two and two.
  const std::int64_t groups = (call.share + kHeads - 1) / kHeads;
  for (std::int64_t group = 0; group < groups; ++group) {
    const std::int64_t begin = group * call.share / groups;
    const std::int64_t count = (group + 1) * call.share / groups - begin;
    const std::int64_t at = index * call.share + begin;
    const auto run = count == 1   ? attend_heads<1, Element>
                     : count == 2 ? attend_heads<2, Element>
                                  : attend_heads<3, Element>;
    run(call, piece, query + begin * dim, call.mixed + at * dim, call.peaks + at,
        call.weights + at);
  }
}

}  // namespace

void attend(const PagedAttention& call, const Piece& piece, std::int64_t index) {
  if (call.half) {
    attend_elements<BFloat16>(call, piece, index);
  } else {
    attend_elements<float>(call, piece, index);
  }
}

}  // namespace splitserve::SPLITSERVE_ISA
