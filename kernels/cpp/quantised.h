// Linear layers on weights as they are quantised: small integers in groups along the input, each with its scale.
//
// y[r, o] = sum over groups g of scale[o, g] * (sum over k in g of q[o, k] * x[r, k]) + minimum[o, g] * (sum of x in g).
// A row's activations become integers of 8 or 16 bits, with a scale for each group; the inner sums are exact in 32
// bits; the outer ones are added in the order of the groups, whatever the rows beside it, the threads and the vector
// width.
//
// Weights are bytes without sign (those that have one are kept with ZERO added), four of a row in each lane, as the
// instructions want them that add up four products of a byte without and one with a sign. Activations of 16 bits are
// two planes of bytes for these: x = 256 * high + low, both with a sign. Without such instructions they are words.
#pragma once

#include <algorithm>
#include <utility>

#include "activations.h"
#include "products.h"
#include "quantised_amx.h"
#include "quantised_layout.h"
#include "simd.h"
#include "team.h"

// Bytes of activations that the tiles pass over while they are in the cache.
constexpr int64_t CHUNK_BYTES = 1 << 16;

// Vectors of W lanes of four bytes, and the sums of their products.
template <int W>
struct Quads {
  using V = typename VectorTypes<W>::B;
  using P = typename VectorTypes<W>::P;
  using Q = typename VectorTypes<W>::Q;
  using I = typename Simd<W>::I;

  static V load(const uint8_t* p) {
    V v;
    memcpy(&v, p, sizeof v);
    return v;
  }

  // Four bytes, or two words, in every lane.
  static I fill(const void* p) {
    int32_t lane;
    memcpy(&lane, p, sizeof lane);
    return I{} + lane;
  }

  // Words times words, both with a sign, by twos.
  static I add_words(I sum, P a, P b) {
#if defined(__AVX2__)
    if constexpr (W == 8) return sum + (I)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#endif
#if defined(__SSE2__)
    if constexpr (W == 4) return sum + (I)_mm_madd_epi16((__m128i)a, (__m128i)b);
#endif
    for (int i = 0; i < W; i++) sum[i] += a[2 * i] * b[2 * i] + a[2 * i + 1] * b[2 * i + 1];
    return sum;
  }

  static P even(V weights) { return (P)((Q)weights & 255); }
  static P odd(V weights) { return (P)((Q)weights >> 8); }

  // Weights of BITS bits times activations of 8, by fours.
  template <int BITS>
  static I add_bytes(I sum, V weights, const int8_t* x) {
#if defined(__AVX512VNNI__)
    if constexpr (W == 16) return (I)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, (__m512i)fill(x));
#endif
#if defined(__AVX2__)
    // Two products of four and eight bits fit into 16, those of eight bits do not.
    if constexpr (W == 8 && BITS == 4)
      return add_words(sum, (P)_mm256_maddubs_epi16((__m256i)weights, (__m256i)fill(x)), P{} + 1);
#endif
    const P bytes = (P)fill(x);
    return add_words(add_words(sum, even(weights), (P)((Q)bytes << 8) >> 8), odd(weights), bytes >> 8);
  }
};

// The W outputs of a tile's group that start at `first`, as bytes: GROUP / 4 vectors.
template <int W, class Layout>
__attribute__((always_inline)) inline void unpack(const uint8_t* tile, int first, typename Quads<W>::V* weights) {
  constexpr int QUADS = Layout::group / 4;
  if constexpr (Layout::bits == 4) {
    // A byte has two inputs that are four apart.
#pragma GCC unroll 8
    for (int i = 0; i < QUADS / 2; i++) {
      const auto bytes = Quads<W>::load(tile + (i * TILE + first) * 4);
      weights[2 * i] = bytes & 15;
      weights[2 * i + 1] = (typename Quads<W>::V)((typename Quads<W>::Q)bytes >> 4) & 15;
    }
  } else {
#pragma GCC unroll 8
    for (int i = 0; i < QUADS; i++) weights[i] = Quads<W>::load(tile + (i * TILE + first) * 4);
  }
}

// ROWS rows times the W outputs of a tile that start at `first`. x and numbers are of the first row, and those of the
// next lie x_stride and groups behind; out is [rows, stride].
template <int ROWS, int W, class Layout, class Group>
void tile_rows(const uint8_t* tile, int first, const int8_t* x, int64_t x_stride, const GroupNumbers* numbers,
               int64_t groups, float* out, int64_t stride, int num_outputs) {
  using S = Simd<W>;
  using Q = Quads<W>;
  using Scale = typename Layout::Scale;
  constexpr int QUADS = Layout::group / 4;
  typename S::F total[ROWS] = {};
  for (int64_t g = 0; g < groups; g++, tile += Layout::group_bytes) {
    typename Q::V weights[QUADS];
#pragma GCC unroll 16
    for (int i = 0; i < Layout::group_bytes; i += 64) fetch(tile + AHEAD + i);
    unpack<W, Layout>(tile, first, weights);
    const Scale* scales = (const Scale*)(tile + Layout::integer_bytes) + first;
    const auto scale = S::load(scales);
    typename S::F minimum = {};
    if constexpr (Layout::has_minimums) minimum = S::load(scales + TILE);
    const auto finish = [&](int r, typename S::I sum) __attribute__((always_inline)) {
      const GroupNumbers& n = numbers[r * groups + g];
      total[r] += to_float(sum) * (scale * n.scale);
      if constexpr (Layout::has_minimums) total[r] += minimum * n.sum;
    };
    const int8_t* const group = x + g * Group::bytes;
    if constexpr (HAS_PLANES && W == 16) {
      // The group's weights stay in registers, and a few rows' sums at a time run beside each other.
      constexpr int SUMS = std::min(ROWS, 4);
#pragma GCC unroll 8
      for (int first_row = 0; first_row < ROWS; first_row += SUMS) {
        const int8_t* const at = group + first_row * x_stride;
        typename S::I sums[SUMS] = {}, high[SUMS] = {};
#pragma GCC unroll 4
        for (int r = 0; r < SUMS; r++)
          if constexpr (Layout::has_zero) sums[r] += numbers[(first_row + r) * groups + g].offset;
#pragma GCC unroll 8
        for (int i = 0; i < QUADS; i++)
#pragma GCC unroll 4
          for (int r = 0; r < SUMS; r++) {
            const int8_t* const quad = at + r * x_stride + 4 * i;
            if constexpr (Group::bits == 16) high[r] = Q::template add_bytes<Layout::bits>(high[r], weights[i], quad);
            constexpr int low = Group::bits == 16 ? Layout::group : 0;
            sums[r] = Q::template add_bytes<Layout::bits>(sums[r], weights[i], quad + low);
          }
#pragma GCC unroll 4
        for (int r = 0; r < SUMS; r++) finish(first_row + r, Group::bits == 16 ? sums[r] + (high[r] << 8) : sums[r]);
      }
    } else {
      typename S::I sums[ROWS] = {};
#pragma GCC unroll 8
      for (int i = 0; i < QUADS; i++)
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
          const int8_t* const at = group + r * x_stride + i * Group::bytes / QUADS;
          if constexpr (Group::bits == 8) {
            sums[r] = Q::template add_bytes<Layout::bits>(sums[r], weights[i], at);
          } else {
            sums[r] = Q::add_words(sums[r], Q::even(weights[i]), (typename Q::P)Q::fill(at));
            sums[r] = Q::add_words(sums[r], Q::odd(weights[i]), (typename Q::P)Q::fill(at + 4));
          }
        }
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) {
        if constexpr (Layout::has_zero) sums[r] += numbers[r * groups + g].offset;
        finish(r, sums[r]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++) {
    if (num_outputs >= W) {
      S::store(out + r * stride, total[r]);
    } else {
      float lanes[W];
      S::store(lanes, total[r]);
      for (int i = 0; i < num_outputs; i++) out[r * stride + i] = lanes[i];
    }
  }
}

inline int64_t quantised_scratch(const QuantisedArgs& a) {
#if HAS_TILES
  if (by_amx(a)) return amx_scratch(a);
#endif
  return a.rows * a.size * (a.activation_bits / 8) + a.rows * (a.size / a.group) * sizeof(GroupNumbers) + 64;
}

template <class Layout, class Group>
void quantised_linear(const QuantisedArgs& a, Team& team) {
  constexpr int BLOCK = NUM_REGISTERS == 32 ? 8 : 4;
  const int64_t groups = a.size / Layout::group, num_tiles = (a.outputs + TILE - 1) / TILE;
  const int64_t tile_bytes = groups * Layout::group_bytes, x_stride = groups * Group::bytes;
  int8_t* const integers = (int8_t*)team.memory();
  auto* const numbers = (GroupNumbers*)(integers + (a.rows * x_stride + 63) / 64 * 64);
  quantise_rows<Group>(a, team, [&](int64_t r) { return std::pair(integers + r * x_stride, numbers + r * groups); });
  const int64_t chunk = std::max<int64_t>(1, CHUNK_BYTES / x_stride / BLOCK) * BLOCK;
  const int64_t count = num_tiles * ((a.rows + chunk - 1) / chunk);
  const int64_t grain = grain_of(a.rows, count, std::min(chunk, a.rows) * a.size * TILE, team.size());
  for (Range range; (range = team.take(count, grain)).begin < range.end;)
    for (int64_t i = range.begin; i < range.end; i++) {
      const int64_t c = i / num_tiles, t = i % num_tiles;
      const uint8_t* tile = a.tiles + t * tile_bytes;
      const int64_t end = std::min(a.rows, (c + 1) * chunk);
      for (int first = 0; first < TILE; first += WIDTH) {
        const int num_outputs = (int)std::min<int64_t>(WIDTH, a.outputs - t * TILE - first);
        if (num_outputs <= 0) break;
        for_blocks<BLOCK>(c * chunk, end, [&](auto rows, int64_t r) {
          tile_rows<decltype(rows)::value, WIDTH, Layout, Group>(
              tile, first, integers + r * x_stride, x_stride, numbers + r * groups, groups,
              a.out + r * a.stride + t * TILE + first, a.stride, num_outputs);
        });
      }
    }
}

inline void quantised_linear(const QuantisedArgs& a, Team& team) {
  with_layout(a, [&](auto layout) {
    using Layout = decltype(layout);
#if HAS_TILES
    if (by_amx(a)) {
      if (a.activation_bits == 8) linear_by_amx<Layout, 8>(a, team);
      else linear_by_amx<Layout, 16>(a, team);
      return;
    }
#endif
    if (a.activation_bits == 8) quantised_linear<Layout, GroupOf<Layout::group, 8>>(a, team);
    else quantised_linear<Layout, GroupOf<Layout::group, 16>>(a, team);
  });
}

// Rows of the weights as floats: those of the outputs `indices`.
struct QuantisedRowsArgs {
  const uint8_t* tiles;
  const int64_t* indices;  // [count]
  float* out;              // [count, size]
  int64_t count, size;
  int bits, group, has_minimums, wide_scales;

  int64_t cells() const { return count * size; }
};

inline void quantised_rows(const QuantisedRowsArgs& a, Team& team) {
  const Range rows = team.share(a.count);
  with_layout(a, [&](auto layout) {
    using Layout = decltype(layout);
    using Scale = typename Layout::Scale;
    const int64_t groups = a.size / Layout::group;
    for (int64_t r = rows.begin; r < rows.end; r++) {
      const int lane = (int)(a.indices[r] % TILE);
      const uint8_t* tile = a.tiles + a.indices[r] / TILE * groups * Layout::group_bytes;
      float* out = a.out + r * a.size;
      for (int64_t g = 0; g < groups; g++, tile += Layout::group_bytes, out += Layout::group) {
        const Scale* scales = (const Scale*)(tile + Layout::integer_bytes) + lane / 4 * 4;
        const float scale = Simd<4>::load(scales)[lane % 4];
        const float minimum = Layout::has_minimums ? Simd<4>::load(scales + TILE)[lane % 4] : 0.0f;
        for (int i = 0; i < Layout::group; i++) {
          const uint8_t* bytes = tile + (i / 4 * TILE + lane) * 4;
          int32_t weight;
          if constexpr (Layout::bits == 4) weight = tile[(i / 8 * TILE + lane) * 4 + i % 4] >> (i / 4 % 2 * 4) & 15;
          else weight = bytes[i % 4] - (Layout::has_zero ? ZERO : 0);
          out[i] = (float)weight * scale + minimum;
        }
      }
    }
  });
}
