// Linear layers on weights as they are quantised: small integers in groups along the input, each with its scale.
//
// y[r, o] = sum over groups g of scale[o, g] * (sum over k in g of q[o, k] * x[r, k]) + minimum[o, g] * (sum of x in g).
// A row's activations become 16-bit integers, with a scale for each group; the inner sums are exact in 32 bits; the
// outer ones are added in the order of the groups, whatever the rows beside it, the threads and the vector width.
#pragma once

#include <algorithm>
#include <memory>
#include <type_traits>

#include "simd.h"

// Outputs that lie together. The weights of a tile are, group by group: the integers, TILE scales, TILE minimums.
constexpr int TILE = 16;
// Bytes of activations that the tiles pass over while they are in the cache.
constexpr int64_t CHUNK_BYTES = 1 << 18;
// Below so many products, waking threads that sleep costs more than it saves.
constexpr int64_t PARALLEL_PRODUCTS = 1 << 23;

// Vectors of 2 W signed 16-bit integers, and the sums of their neighbours' products.
template <int W>
struct Pairs {
  using V = typename VectorTypes<W>::P;
  using U = typename VectorTypes<W>::Q;
  using I = typename Simd<W>::I;

  static V load(const void* p) {
    V v;
    memcpy(&v, p, sizeof v);
    return v;
  }

  // 2 W bytes, widened.
  static V load_bytes(const int8_t* p) {
#if defined(__AVX512BW__)
    if constexpr (W == 16) return (V)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p));
#endif
#if defined(__AVX2__)
    if constexpr (W == 8) return (V)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
#endif
    V v;
    for (int i = 0; i < 2 * W; i++) v[i] = p[i];
    return v;
  }

  // Two neighbours of a row, in every lane.
  static V fill(const int16_t* p) {
    int32_t pair;
    memcpy(&pair, p, sizeof pair);
    return (V)(I{} + pair);
  }

  static I add_products(I sum, V a, V b) {
#if defined(__AVX512VNNI__)
    if constexpr (W == 16) return (I)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#endif
#if defined(__AVX2__)
    if constexpr (W == 8) return sum + (I)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#endif
#if defined(__SSE2__)
    if constexpr (W == 4) return sum + (I)_mm_madd_epi16((__m128i)a, (__m128i)b);
#endif
    for (int i = 0; i < W; i++) sum[i] += a[2 * i] * b[2 * i] + a[2 * i + 1] * b[2 * i + 1];
    return sum;
  }
};

// A row x [size] as 16-bit integers: x is about q * scale. scales, and sums of q * scale, are [groups]. Where a group
// has a number that is none, or an infinite one, both are NaN.
template <int GROUP>
void quantise_row(const float* x, int64_t size, int16_t* q, float* scales, float* sums) {
  using S = Simd<WIDTH>;
  const float magic = 0x1.8p23f;  // what is added to it is rounded to an integer
  for (int64_t g = 0; g < size / GROUP; g++, x += GROUP, q += GROUP) {
    S::F most = {}, check = {};
    for (int i = 0; i < GROUP; i += WIDTH) {
      const S::F v = S::load(x + i), magnitude = v < 0.0f ? -v : v;
      most = magnitude > most ? magnitude : most;
      check += v * 0.0f;
    }
    const float largest = S::max(most);
    const bool finite = S::sum(check) == 0.0f;
    const float inverse = finite && largest > 1e-30f ? 32767.0f / largest : 0.0f;
    S::I total = {};
    for (int i = 0; i < GROUP; i += WIDTH) {
      const S::I n = to_int(((finite ? S::load(x + i) : S::F{}) * inverse + magic) - magic);
      const S::H halves = narrow((S::U)n);
      memcpy(q + i, &halves, sizeof halves);
      total += n;
    }
    int32_t sum = 0;
    for (int i = 0; i < WIDTH; i++) sum += total[i];
    scales[g] = finite ? largest / 32767.0f : NAN;
    sums[g] = (float)sum * scales[g];
  }
}

template <int BITS, int GROUP, bool HAS_MINIMUMS, class ScaleType>
struct TileLayout {
  using Scale = ScaleType;
  static constexpr int bits = BITS, group = GROUP;
  static constexpr bool has_minimums = HAS_MINIMUMS;
  static constexpr int64_t integer_bytes = (int64_t)TILE * GROUP * BITS / 8;
  static constexpr int64_t group_bytes = integer_bytes + TILE * sizeof(Scale) * (HAS_MINIMUMS ? 2 : 1);
};

// ROWS rows times the W outputs of a tile that start at `first`. `q` etc. are of the first row; out is [rows, stride].
template <int ROWS, int W, class Layout>
void tile_rows(const uint8_t* tile, int first, const int16_t* q, const float* scales, const float* sums, int64_t groups,
               float* out, int64_t stride, int num_outputs) {
  using S = Simd<W>;
  using P = Pairs<W>;
  using Scale = typename Layout::Scale;
  constexpr int GROUP = Layout::group;
  typename S::F total[ROWS] = {};
  for (int64_t g = 0; g < groups; g++, tile += Layout::group_bytes) {
    typename S::I sum[ROWS] = {};
    const int16_t* x = q + g * GROUP;
    __builtin_prefetch(tile + 4 * Layout::group_bytes);
    if constexpr (Layout::bits == 4) {
      // A 16-bit word holds four weights of an output, for every other of eight inputs.
      for (int quad = 0; quad < GROUP / 8; quad++) {
        const auto words = (typename P::U)P::load(tile + (quad * TILE + first) * 4);
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
          const auto weights = (typename P::V)((words >> (4 * j)) & 15);
#pragma GCC unroll 8
          for (int r = 0; r < ROWS; r++)
            sum[r] = P::add_products(sum[r], weights, P::fill(x + r * groups * GROUP + 8 * quad + 2 * j));
        }
      }
    } else {
#pragma GCC unroll 4
      for (int pair = 0; pair < GROUP / 2; pair++) {
        const auto weights = P::load_bytes((const int8_t*)tile + (pair * TILE + first) * 2);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++)
          sum[r] = P::add_products(sum[r], weights, P::fill(x + r * groups * GROUP + 2 * pair));
      }
    }
    const Scale* numbers = (const Scale*)(tile + Layout::integer_bytes) + first;
    const auto scale = S::load(numbers);
    for (int r = 0; r < ROWS; r++) {
      total[r] += to_float(sum[r]) * (scale * scales[r * groups + g]);
      if constexpr (Layout::has_minimums) total[r] += S::load(numbers + TILE) * sums[r * groups + g];
    }
  }
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

// kernels/cpu.py declares the same.
struct QuantisedArgs {
  const uint8_t* tiles;  // [ceil(outputs / TILE), groups, bytes of a group]
  const float* x;        // [rows, size]
  float* out;            // [rows, outputs], rows `stride` apart
  int64_t rows, size, outputs, stride;
  int bits, group, has_minimums, wide_scales, threads;
};

template <class Layout>
void quantised_linear(const QuantisedArgs& a) {
  constexpr int BLOCK = NUM_REGISTERS == 32 ? 6 : 4;
  const int64_t groups = a.size / Layout::group, num_tiles = (a.outputs + TILE - 1) / TILE;
  const int64_t tile_bytes = groups * Layout::group_bytes;
  std::unique_ptr<int16_t[]> integers(new int16_t[a.rows * a.size]);
  std::unique_ptr<float[]> scales(new float[a.rows * groups]), sums(new float[a.rows * groups]);
  const int64_t chunk = std::max<int64_t>(1, CHUNK_BYTES / (2 * a.size) / BLOCK) * BLOCK;
  const int64_t num_chunks = (a.rows + chunk - 1) / chunk;
#pragma omp parallel num_threads(a.threads) if (a.rows * a.outputs * a.size > PARALLEL_PRODUCTS)
  {
#pragma omp for
    for (int64_t r = 0; r < a.rows; r++)
      quantise_row<Layout::group>(a.x + r * a.size, a.size, &integers[r * a.size], &scales[r * groups], &sums[r * groups]);
#pragma omp for collapse(2) schedule(static)
    for (int64_t c = 0; c < num_chunks; c++)
      for (int64_t t = 0; t < num_tiles; t++) {
        const uint8_t* tile = a.tiles + t * tile_bytes;
        const int64_t end = std::min(a.rows, (c + 1) * chunk);
        for (int first = 0; first < TILE; first += WIDTH) {
          const int num_outputs = (int)std::min<int64_t>(WIDTH, a.outputs - t * TILE - first);
          if (num_outputs <= 0) break;
          auto run = [&](auto count, int64_t r) {
            tile_rows<decltype(count)::value, WIDTH, Layout>(
                tile, first, &integers[r * a.size], &scales[r * groups], &sums[r * groups], groups,
                a.out + r * a.stride + t * TILE + first, a.stride, num_outputs);
          };
          int64_t r = c * chunk;
          for (; r + BLOCK <= end; r += BLOCK) run(std::integral_constant<int, BLOCK>{}, r);
          if (r + 4 <= end && BLOCK > 4) run(std::integral_constant<int, 4>{}, r), r += 4;
          if (r + 2 <= end) run(std::integral_constant<int, 2>{}, r), r += 2;
          if (r < end) run(std::integral_constant<int, 1>{}, r);
        }
      }
  }
}

// Calls f with TileLayout's parameters, as a value of that type.
template <class Function>
void with_layout(const QuantisedArgs& a, Function f) {
  auto scaled = [&](auto scale) {
    using Scale = decltype(scale);
    if (a.bits == 4) return f(TileLayout<4, 32, true, Scale>{});
    if (a.group == 16) return f(TileLayout<8, 16, false, Scale>{});
    if (a.has_minimums) return f(TileLayout<8, 32, true, Scale>{});
    f(TileLayout<8, 32, false, Scale>{});
  };
  if (a.wide_scales) scaled(float{});
  else scaled(Float16{});
}
