// One instruction set's vectors of floats, in the notation of GCC and Clang instead of intrinsics:
// the same source is compiled once for each instruction set, and only the width differs.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define SPLITSERVE_VECTOR_BYTES 64
#elif defined(__AVX2__)
#define SPLITSERVE_VECTOR_BYTES 32
#else
#define SPLITSERVE_VECTOR_BYTES 16
#endif

namespace splitserve::SPLITSERVE_ISA {

constexpr int kLanes = SPLITSERVE_VECTOR_BYTES / 4;
constexpr int kCacheLine = 64;

typedef float Floats __attribute__((vector_size(SPLITSERVE_VECTOR_BYTES)));
typedef std::int32_t Ints __attribute__((vector_size(SPLITSERVE_VECTOR_BYTES)));
typedef std::uint32_t Words __attribute__((vector_size(SPLITSERVE_VECTOR_BYTES)));
typedef std::uint16_t Halves __attribute__((vector_size(SPLITSERVE_VECTOR_BYTES / 2)));
typedef std::int8_t Bytes __attribute__((vector_size(SPLITSERVE_VECTOR_BYTES / 4)));
typedef float Quad __attribute__((vector_size(16)));

inline Floats load(const float* from) {
  Floats out;
  std::memcpy(&out, from, sizeof out);
  return out;
}

// A bfloat16 is the upper half of a float.
inline Floats load(const BFloat16* from) {
  Halves halves;
  std::memcpy(&halves, from, sizeof halves);
  // One instruction, for which GCC 12 makes three of the notation at the end.
#if defined(__AVX512F__)
  return (Floats)((Words)_mm512_cvtepu16_epi32((__m256i)halves) << 16);
#elif defined(__AVX2__)
  return (Floats)((Words)_mm256_cvtepu16_epi32((__m128i)halves) << 16);
#else
  return (Floats)(__builtin_convertvector(halves, Words) << 16);
#endif
}

// Small integers, which floats hold exactly.
inline Floats load(const std::int8_t* from) {
  Bytes bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  // Two instructions, as above.
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)bytes));
#elif defined(__AVX2__)
  return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((__m128i*)&bytes)));
#else
  return __builtin_convertvector(bytes, Floats);
#endif
}

inline void store(float* to, Floats value) { std::memcpy(to, &value, sizeof value); }

// Rounds to the nearest, to the even one of two.
inline void store(BFloat16* to, Floats value) {
  const Words bits = (Words)value;
  const Words rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
#if defined(__AVX512F__)
  const Halves halves = (Halves)_mm512_cvtepi32_epi16((__m512i)rounded);
#else
  const Halves halves = __builtin_convertvector(rounded, Halves);
#endif
  std::memcpy(to, &halves, sizeof halves);
}

// To an aligned place, past the caches: nobody reads it soon, and memory need not be read first.
inline void store_past_caches(char* to, Floats value) {
#if defined(__AVX512F__)
  _mm512_stream_ps(reinterpret_cast<float*>(to), (__m512)value);
#elif defined(__AVX2__)
  _mm256_stream_ps(reinterpret_cast<float*>(to), (__m256)value);
#elif defined(__x86_64__)
  _mm_stream_ps(reinterpret_cast<float*>(to), (__m128)value);
#else
  std::memcpy(to, &value, sizeof value);
#endif
}

// Lets no later store overtake those past the caches.
inline void finish_stores() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// One element at a time, for what is left of a row.
inline float widened(float value) { return value; }

inline float widened(BFloat16 value) {
  const std::uint32_t bits = static_cast<std::uint32_t>(value.bits) << 16;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

inline void put(float* to, float value) { *to = value; }

inline void put(BFloat16* to, float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  to->bits = static_cast<std::uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

// Says that a value is in a register: it is not computed anew, read anew from memory, or contracted
// with what follows.
inline void in_register(Floats& value) {
#if defined(__x86_64__)
  asm("" : "+v"(value));
#elif defined(__aarch64__)
  asm("" : "+w"(value));
#endif
}

inline Floats splat(float value) { return value - Floats{}; }

inline Floats greater(Floats a, Floats b) { return a > b ? a : b; }

// Adds the quarters of a vector to one another; what is left are four sums.
inline Quad fold(Floats value) {
  Quad parts[kLanes / 4];
  std::memcpy(parts, &value, sizeof value);
  Quad out = parts[0];
  for (int part = 1; part < kLanes / 4; ++part) out += parts[part];
  return out;
}

inline float sum(Floats value) {
  const Quad four = fold(value);
  return (four[0] + four[1]) + (four[2] + four[3]);
}

inline float largest(Floats value) {
  float out = value[0];
  for (int lane = 1; lane < kLanes; ++lane) out = value[lane] > out ? value[lane] : out;
  return out;
}

// The sums of four vectors as one.
inline Quad sums(Floats a, Floats b, Floats c, Floats d) {
  const Quad p = fold(a), q = fold(b), r = fold(c), s = fold(d);
  const Quad even = __builtin_shufflevector(p, r, 0, 4, 1, 5) +
                    __builtin_shufflevector(p, r, 2, 6, 3, 7);
  const Quad odd = __builtin_shufflevector(q, s, 0, 4, 1, 5) +
                   __builtin_shufflevector(q, s, 2, 6, 3, 7);
  return __builtin_shufflevector(even, odd, 0, 4, 1, 5) +
         __builtin_shufflevector(even, odd, 2, 6, 3, 7);
}

// e to the x, to about one unit in the last place: x = n ln 2 + r, and a polynomial for e to the r.
inline Floats exponential(Floats x) {
  // Beyond these, 2 to the n is no normal float.
  x = x < splat(-87.0f) ? splat(-87.0f) : x;
  x = x > splat(88.0f) ? splat(88.0f) : x;
  // Added to a small float, 1.5 * 2 to the 23 leaves no bits for a fraction: it rounds.
  constexpr float kRound = 12582912.0f;
  const Floats shifted = x * 1.44269504f + kRound;
  const Floats n = shifted - kRound;
  // ln 2 in two parts, the first with so few bits that n times it is exact.
  const Floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Floats p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const Ints exponent = ((Ints)shifted - (Ints)splat(kRound) + 127) << 23;
  return p * (Floats)exponent;
}

}  // namespace splitserve::SPLITSERVE_ISA
