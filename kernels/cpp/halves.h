// Linear layers on weights of 16 bits: y[r, o] = sum over k of w[o, k] * x[r, k], all arithmetic in float.
//
// A weight becomes a float exactly. The products of a row and an output are added one by one in the order of k, whatever
// the rows beside it, the threads and the vector width; where rows are many, tiles are made floats once for all of them.
#pragma once

#include <algorithm>

#include "products.h"
#include "quantised_layout.h"
#include "simd.h"
#include "team.h"

// Tiles and rows whose sums are in registers together.
#if defined(__AVX512F__)
constexpr int TILES = 2, ROW_BLOCK = 12;
#elif defined(__AVX2__)
constexpr int TILES = 1, ROW_BLOCK = 6;
#else
constexpr int TILES = 1, ROW_BLOCK = 2;
#endif
// The same of one row by itself: more, so that sums do not wait for each other.
constexpr int TILES_ALONE = 4;
// Inputs whose weights are floats at a time: with a block of rows they fit the innermost cache.
constexpr int64_t DEPTH = 256;
// Rows that are multiplied with them.
constexpr int64_t CHUNK_ROWS = 240;

// kernels/cpu_library.py declares the same.
struct HalvesArgs {
  const void* tiles;  // [ceil(outputs / TILE), size, TILE]
  const float* x;     // [rows, size]
  float* out;         // [rows, outputs], rows `stride` apart
  int64_t rows, size, outputs, stride;
  int dtype;
};

inline int64_t halves_scratch(const HalvesArgs& a, int threads) {
  return a.rows > 1 ? a.rows * a.size * sizeof(float) + 64 + threads * TILES * TILE * DEPTH * sizeof(float) : 0;
}

// x of a block of rows, [rows, size], to [size, rows].
template <int ROWS>
void pack_rows(const float* x, int64_t size, float* to) {
  for (int64_t k = 0; k < size; k++)
    for (int r = 0; r < ROWS; r++) to[k * ROWS + r] = x[r * size + k];
}

// ROWS rows times NUM_TILES tiles of weights, tile_stride apart, for `depth` inputs; sums go on from what is in `out`
// unless it is the first time. x is [depth, ROWS]. The last tiles may not be there.
template <int ROWS, int NUM_TILES, class Weight>
void multiply(const Weight* weights, int64_t tile_stride, const float* x, int64_t depth, bool is_first, float* out,
              int64_t stride, int64_t num_outputs) {
  using S = Simd<WIDTH>;
  constexpr int VECTORS = NUM_TILES * TILE / WIDTH;
  typename S::F sums[ROWS][VECTORS] = {};
  const auto each = [&](auto f) __attribute__((always_inline)) {
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 16
      for (int v = 0; v < VECTORS; v++) {
        const int64_t count = std::min<int64_t>(WIDTH, num_outputs - v * WIDTH);
        if (count > 0) f(sums[r][v], out + r * stride + v * WIDTH, count);
      }
  };
  if (!is_first)
    each([](typename S::F& sum, const float* from, int64_t count) __attribute__((always_inline)) {
      if (count == WIDTH) {
        sum = S::load(from);
      } else {
        float lanes[WIDTH] = {};
        std::copy(from, from + count, lanes);
        sum = S::load(lanes);
      }
    });
  const Weight* tiles[NUM_TILES];
  for (int64_t t = 0; t < NUM_TILES; t++)  // in place of one that is not there, the last
    tiles[t] = weights + std::min(t, (num_outputs - 1) / TILE) * tile_stride;
  for (int64_t k = 0; k < depth; k++, x += ROWS) {
    typename S::F w[VECTORS];
#pragma GCC unroll 16
    for (int v = 0; v < VECTORS; v++) {
      const Weight* const at = tiles[v * WIDTH / TILE] + k * TILE + v * WIDTH % TILE;
      if constexpr (sizeof(Weight) == 2) fetch((const char*)at + AHEAD);
      w[v] = S::load(at);
    }
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 16
      for (int v = 0; v < VECTORS; v++) sums[r][v] += w[v] * x[r];
  }
  each([](typename S::F& sum, float* to, int64_t count) __attribute__((always_inline)) {
    if (count == WIDTH) {
      S::store(to, sum);
    } else {
      float lanes[WIDTH];
      S::store(lanes, sum);
      std::copy(lanes, lanes + count, to);
    }
  });
}

// Calls f(first, num_outputs, begin, end) for this member's share of the outputs from `first` on, as many as there are of
// NUM_TILES tiles, and rows [begin, end).
template <int NUM_TILES, class Function>
void for_panels(const HalvesArgs& a, Team& team, Function f) {
  constexpr int64_t PANEL = NUM_TILES * TILE;
  const int64_t num_panels = (a.outputs + PANEL - 1) / PANEL;
  const int64_t count = num_panels * ((a.rows + CHUNK_ROWS - 1) / CHUNK_ROWS);
  const int64_t grain = grain_of(a.rows, count, std::min(CHUNK_ROWS, a.rows) * a.size * PANEL, team.size());
  for (Range range; (range = team.take(count, grain)).begin < range.end;)
    for (int64_t i = range.begin; i < range.end; i++) {
      const int64_t first = i % num_panels * PANEL, begin = i / num_panels * CHUNK_ROWS;
      f(first, a.outputs - first, begin, std::min(a.rows, begin + CHUNK_ROWS));
    }
}

template <class Half>
void multiply_row(const HalvesArgs& a, Team& team) {
  for_panels<TILES_ALONE>(a, team, [&](int64_t first, int64_t num_outputs, int64_t, int64_t) {
    multiply<1, TILES_ALONE>((const Half*)a.tiles + first * a.size, a.size * TILE, a.x, a.size, true, a.out + first,
                             a.stride, num_outputs);
  });
}

template <class Half>
void multiply_rows(const HalvesArgs& a, Team& team) {
  float* const packed = (float*)team.memory();
  const Range ours = team.share((a.rows + ROW_BLOCK - 1) / ROW_BLOCK);
  for_blocks<ROW_BLOCK>(ours.begin * ROW_BLOCK, std::min(a.rows, ours.end * ROW_BLOCK), [&](auto count, int64_t r) {
    pack_rows<decltype(count)::value>(a.x + r * a.size, a.size, packed + r * a.size);
  });
  team.barrier();
  float* const floats = packed + (a.rows * a.size + 15) / 16 * 16 + team.member() * TILES * TILE * DEPTH;
  const int64_t tile_size = a.size * TILE;
  for_panels<TILES>(a, team, [&](int64_t first, int64_t num_outputs, int64_t begin, int64_t end) {
    const Half* const tiles = (const Half*)a.tiles + first * a.size;
    float* const out = a.out + first;
    if (end - begin <= 2 * ROW_BLOCK) {
      for_blocks<ROW_BLOCK>(begin, end, [&](auto count, int64_t r) {
        multiply<decltype(count)::value, TILES>(tiles, tile_size, packed + r * a.size, a.size, true,
                                                out + r * a.stride, a.stride, num_outputs);
      });
      return;
    }
    for (int64_t k = 0; k < a.size; k += DEPTH) {
      const int64_t depth = std::min(DEPTH, a.size - k);
      for (int64_t t = 0; t < TILES && t * TILE < num_outputs; t++)
        for (int64_t j = 0; j < depth * TILE; j += WIDTH)
          Simd<WIDTH>::store(floats + t * DEPTH * TILE + j, Simd<WIDTH>::load(tiles + t * tile_size + k * TILE + j));
      for_blocks<ROW_BLOCK>(begin, end, [&](auto count, int64_t r) {
        constexpr int ROWS = decltype(count)::value;
        multiply<ROWS, TILES>((const float*)floats, DEPTH * TILE, packed + r * a.size + k * ROWS, depth, k == 0,
                              out + r * a.stride, a.stride, num_outputs);
      });
    }
  });
}

template <class Half>
void halves_linear(const HalvesArgs& a, Team& team) {
  if constexpr (sizeof(Half) == 2) {
    if (a.rows == 1) multiply_row<Half>(a, team);
    else multiply_rows<Half>(a, team);
  }
}

// Rows of the weights as floats: those of the outputs `indices`.
struct HalvesRowsArgs {
  const void* tiles;
  const int64_t* indices;  // [count]
  float* out;              // [count, size]
  int64_t count, size;
  int dtype;

  int64_t cells() const { return count * size; }
};

template <class Half>
void halves_rows(const HalvesRowsArgs& a, Team& team) {
  const Range rows = team.share(a.count);
  for (int64_t r = rows.begin; r < rows.end; r++) {
    const Half* from = (const Half*)a.tiles + a.indices[r] / TILE * a.size * TILE + a.indices[r] % TILE;
    float* const out = a.out + r * a.size;
    for (int64_t k = 0; k < a.size; k += WIDTH) {
      Half some[WIDTH] = {};
      const int64_t count = std::min<int64_t>(WIDTH, a.size - k);
      for (int64_t i = 0; i < count; i++) some[i] = from[(k + i) * TILE];
      float lanes[WIDTH];
      Simd<WIDTH>::store(lanes, Simd<WIDTH>::load(some));
      std::copy(lanes, lanes + count, out + k);
    }
  }
}
