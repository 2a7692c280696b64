// Activations as integers, in the order that quantised.h multiplies them in.
#pragma once

#include <algorithm>

#include "simd.h"

// What is added to weights of 8 bits with a sign.
constexpr int ZERO = 128;

#if defined(__AVX512VNNI__)
constexpr bool HAS_PLANES = true;
#else
constexpr bool HAS_PLANES = false;
#endif

inline void store_bytes(Simd<WIDTH>::I v, int8_t* to) {
#if defined(__AVX512F__)
  _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)v));
#else
  for (int i = 0; i < WIDTH; i++) to[i] = (int8_t)v[i];
#endif
}

inline int32_t largest_lane(Simd<WIDTH>::I v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epi32((__m512i)v);
#else
  int32_t most = v[0];
  for (int i = 1; i < WIDTH; i++) most = std::max(most, (int32_t)v[i]);
  return most;
#endif
}

inline int32_t sum_lanes(Simd<WIDTH>::I v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)v);
#else
  int32_t sum = 0;
  for (int i = 0; i < WIDTH; i++) sum += v[i];
  return sum;
#endif
}

// ACTIVATION_BITS of each number of a group, as they lie in memory: a row's groups one after the other.
template <int GROUP, int ACTIVATION_BITS>
struct GroupOf {
  static constexpr int group = GROUP, bits = ACTIVATION_BITS, bytes = GROUP * ACTIVATION_BITS / 8;
  static constexpr int numbers_stride = 1;
  static constexpr float largest = ACTIVATION_BITS == 8 ? 127 : 127 * 256;

  // The place of input i among words: of four inputs the even ones come first.
  static int word(int i) { return i / 4 * 4 + i % 2 * 2 + i / 2 % 2; }

  // The integers of inputs i to i + WIDTH.
  static void store(int i, Simd<WIDTH>::I q, int8_t* to) {
    if constexpr (bits == 8) {
      store_bytes(q, to + i);
    } else if constexpr (HAS_PLANES) {
      const Simd<WIDTH>::I high = (q + 128) >> 8;
      store_bytes(high, to + i);
      store_bytes(q - (high << 8), to + GROUP + i);
    } else {
      for (int lane = 0; lane < WIDTH; lane++) {
        const int16_t integer = (int16_t)q[lane];
        memcpy(to + 2 * word(i + lane), &integer, sizeof integer);
      }
    }
  }
};

// What belongs to a group of a row.
struct GroupNumbers {
  float scale;
  float sum;        // of the integers, times the scale
  int32_t offset;   // what takes ZERO back: -ZERO times the sum of the integers
};

// Groups [begin, end) of a row x as integers: x is about q * scale. Where a group has a number that is none, or an
// infinite one, scale and sum are NaN.
template <class Group>
void quantise_row(const float* x, int64_t begin, int64_t end, int8_t* q, GroupNumbers* numbers) {
  using S = Simd<WIDTH>;
  constexpr int GROUP = Group::group;
  const float magic = 0x1.8p23f;  // what is added to it is rounded to an integer
  for (int64_t g = begin; g < end; g++) {
    const float* from = x + g * GROUP;
    S::I most = {}, total = {};
    for (int i = 0; i < GROUP; i += WIDTH) {
      // Without their signs, floats are in the order of their bits, with infinity and what is no number at the end.
      const S::I bits = (S::I)S::load(from + i) & 0x7fffffff;
      most = bits > most ? bits : most;
    }
    const int32_t largest_bits = largest_lane(most);
    const bool finite = largest_bits < 0x7f800000;
    float largest;
    memcpy(&largest, &largest_bits, sizeof largest);
    const float inverse = finite && largest > 1e-30f ? Group::largest / largest : 0.0f;
    for (int i = 0; i < GROUP; i += WIDTH) {
      const S::I n = to_int(((finite ? S::load(from + i) : S::F{}) * inverse + magic) - magic);
      Group::store(i, n, q + g * Group::bytes);
      total += n;
    }
    const int32_t sum = sum_lanes(total);
    const float scale = finite ? largest / Group::largest : NAN;
    numbers[g * Group::numbers_stride] = {scale, (float)sum * scale, -ZERO * sum};
  }
}
