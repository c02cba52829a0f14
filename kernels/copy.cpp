// Copies KV from cache to cache, past the processor's caches.
//
// memcpy goes past them only for copies of many megabytes. A pull is made of blocks: through the
// caches, each line of the target would first be read, and what the step loop needs would be
// pushed out.
#include "vector.h"

namespace splitserve::SPLITSERVE_ISA {
namespace {

// Where layer, keys (0) or values (1), head and token of a block begin.
std::int64_t place(const CacheShape& shape, std::int64_t vector_bytes, std::int64_t block,
                   std::int64_t layer, std::int64_t kind, std::int64_t head, std::int64_t token) {
  const std::int64_t row = ((block * shape.layers + layer) * 2 + kind) * shape.heads + head;
  return (row * shape.block_size + token) * vector_bytes;
}

constexpr std::int64_t kPages = 4, kPageBytes = 4096, kLineBytes = 64;

void copy_line(char* to, const char* from) {
  for (std::int64_t at = 0; at < kLineBytes; at += sizeof(Floats)) {
    store_past_caches(to + at, load(reinterpret_cast<const float*>(from + at)));
  }
}

void stream(char* to, const char* from, std::int64_t bytes) {
  const std::int64_t unaligned = -reinterpret_cast<std::intptr_t>(to) & (sizeof(Floats) - 1);
  if (bytes < unaligned + kLineBytes) {
    std::memcpy(to, from, bytes);
    return;
  }
  std::memcpy(to, from, unaligned);
  std::int64_t at = unaligned;
  // Several pages at once keep more reads of memory under way than one stream does.
  for (; at + kPages * kPageBytes <= bytes; at += kPages * kPageBytes) {
    for (std::int64_t line = 0; line < kPageBytes; line += kLineBytes) {
      for (std::int64_t page = 0; page < kPages; ++page) {
        copy_line(to + at + page * kPageBytes + line, from + at + page * kPageBytes + line);
      }
    }
  }
  for (; at + kLineBytes <= bytes; at += kLineBytes) copy_line(to + at, from + at);
  std::memcpy(to + at, from + at, bytes - at);
}

}  // namespace

void copy_run(const CopyRegion& region, const CopyRun& run) {
  const CacheShape &given = region.source_shape, &taken = region.target_shape;
  const bool whole = run.tokens == given.block_size && run.tokens == taken.block_size;
  if (whole && region.heads == given.heads && region.heads == taken.heads &&
      region.layers == given.layers && region.layers == taken.layers) {
    // All of both caches' blocks: they lie in a row.
    stream(region.target + place(taken, region.vector_bytes, run.target_block, 0, 0, 0, 0),
           region.source + place(given, region.vector_bytes, run.source_block, 0, 0, 0, 0),
           place(given, region.vector_bytes, run.blocks, 0, 0, 0, 0));
    finish_stores();
    return;
  }
  // Heads of whole blocks lie in a row.
  const std::int64_t pieces = whole ? 1 : region.heads;
  const std::int64_t bytes = run.tokens * region.vector_bytes * (whole ? region.heads : 1);
  for (std::int64_t block = 0; block < run.blocks; ++block) {
    for (std::int64_t layer = 0; layer < region.layers; ++layer) {
      for (std::int64_t kind = 0; kind < 2; ++kind) {
        for (std::int64_t head = 0; head < pieces; ++head) {
          const std::int64_t from =
              place(given, region.vector_bytes, run.source_block + block,
                    region.source_layer + layer, kind, region.source_head + head,
                    run.source_offset);
          const std::int64_t to =
              place(taken, region.vector_bytes, run.target_block + block,
                    region.target_layer + layer, kind, region.target_head + head,
                    run.target_offset);
          stream(region.target + to, region.source + from, bytes);
        }
      }
    }
  }
  finish_stores();
}

}  // namespace splitserve::SPLITSERVE_ISA
