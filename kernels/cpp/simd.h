// Vectors of W floats, on the compiler's own vector type: one source for every instruction set.
//
// Storage types are float, Bfloat16 and Float16; arithmetic is always in float.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define WIDTH 16
#define NUM_REGISTERS 32
#else
#if defined(__AVX2__)
#define WIDTH 8
#else
#define WIDTH 4
#endif
#define NUM_REGISTERS 16
#endif

struct Bfloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

// Begins to read what will be wanted soon, into the second cache: more lines can be on their way there at a time than to
// the nearest.
inline void fetch(const void* p) { __builtin_prefetch(p, 0, 2); }

template <int W>
struct VectorTypes;

// Conversions are overloads, not template code, because GCC 12 has no conversion of dependent vectors.
#define DECLARE_VECTORS(W)                                     \
  template <>                                                  \
  struct VectorTypes<W> {                                      \
    typedef float F __attribute__((vector_size(W * 4)));       \
    typedef int32_t I __attribute__((vector_size(W * 4)));     \
    typedef uint32_t U __attribute__((vector_size(W * 4)));    \
    typedef uint16_t H __attribute__((vector_size(W * 2)));    \
    typedef int16_t P __attribute__((vector_size(W * 4)));     \
    typedef uint16_t Q __attribute__((vector_size(W * 4)));    \
    typedef uint8_t B __attribute__((vector_size(W * 4)));     \
  };                                                           \
  inline VectorTypes<W>::F to_float(VectorTypes<W>::I v) {     \
    return __builtin_convertvector(v, VectorTypes<W>::F);      \
  }                                                            \
  inline VectorTypes<W>::I to_int(VectorTypes<W>::F v) {       \
    return __builtin_convertvector(v, VectorTypes<W>::I);      \
  }                                                            \
  inline VectorTypes<W>::U widen(VectorTypes<W>::H v) {        \
    return __builtin_convertvector(v, VectorTypes<W>::U);      \
  }                                                            \
  inline VectorTypes<W>::H narrow(VectorTypes<W>::U v) {       \
    return __builtin_convertvector(v, VectorTypes<W>::H);      \
  }
DECLARE_VECTORS(4)
DECLARE_VECTORS(8)
DECLARE_VECTORS(16)

template <int W>
struct Simd {
  using F = typename VectorTypes<W>::F;
  using I = typename VectorTypes<W>::I;
  using U = typename VectorTypes<W>::U;
  using H = typename VectorTypes<W>::H;

  static F fill(float x) { return F{} + x; }

  // 0 to W - 1.
  static I lanes() {
    I lane;
    for (int i = 0; i < W; i++) lane[i] = i;
    return lane;
  }

  static F load(const float* p) {
    F v;
    memcpy(&v, p, sizeof v);
    return v;
  }

  static F load(const Bfloat16* p) { return (F)(load_halves(p) << 16); }

  static F load(const Float16* p) {
#if defined(__F16C__)
    if constexpr (W == 8) return (F)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#endif
#if defined(__AVX512F__)
    if constexpr (W == 16) return (F)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#endif
    // Shifted into a float's fields, a half is 2^112 too small; the product also normalises subnormals.
    U h = load_halves(p);
    F magnitude = (F)((h & 0x7fff) << 13) * 0x1p112f;
    U special = (U)((h & 0x7c00) == 0x7c00) & 0x7f800000;
    return (F)((U)magnitude | special | (h & 0x8000) << 16);
  }

  static void store(float* p, F v) { memcpy(p, &v, sizeof v); }

  static void store(Bfloat16* p, F v) {
    U bits = (U)v;
    U rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    U nan = (bits >> 16) | 0x40;
    store_halves(p, v == v ? rounded : nan);
  }

  static void store(Float16* p, F v) {
#if defined(__F16C__)
    if constexpr (W == 8) {
      _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
      return;
    }
#endif
#if defined(__AVX512F__)
    if constexpr (W == 16) {
      _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
      return;
    }
#endif
    U bits = (U)v, sign = (bits >> 16) & 0x8000, size = bits & 0x7fffffff;
    U normal = (size + 0xc8000fff + ((size >> 13) & 1)) >> 13;
    // Adding 0.5 leaves a subnormal half, rounded by the addition itself, in the low bits.
    U subnormal = (U)((F)size + 0.5f) - 0x3f000000;
    U half = size < 0x38800000 ? subnormal : normal;
    half = size >= 0x47800000 ? U{} + 0x7c00 : half;
    half = size > 0x7f800000 ? U{} + 0x7e00 : half;
    store_halves(p, half | sign);
  }

  // The order of additions is the same whatever W lanes hold zeros.
  static float sum(F v) {
    float lanes[W];
    store(lanes, v);
    for (int step = W / 2; step > 0; step /= 2)
      for (int i = 0; i < step; i++) lanes[i] += lanes[i + step];
    return lanes[0];
  }

  static float max(F v) {
    float lanes[W];
    store(lanes, v);
    for (int step = W / 2; step > 0; step /= 2)
      for (int i = 0; i < step; i++) lanes[i] = lanes[i] > lanes[i + step] ? lanes[i] : lanes[i + step];
    return lanes[0];
  }

  // e^x to about 1 ulp for x <= 88; 0 below -87. Cody-Waite reduction to |r| <= ln(2)/2, then the
  // Taylor polynomial of degree 7, whose remainder there is below 6e-9 of the result. NaN stays NaN.
  static F exp(F x) {
    const float magic = 0x1.8p23f;
    F clamped = x < -87.0f ? fill(-87.0f) : x;
    F n = (clamped * 0x1.715476p0f + magic) - magic;
    F r = clamped - n * 0x1.62e4p-1f;
    r = r - n * 0x1.7f7d1cp-20f;
    F p = fill(1.0f / 5040);
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    F power = (F)((to_int(n) + 127) << 23);
    return x < -87.0f ? F{} : p * power;
  }

  // log(x) to about 1 ulp for normal x > 0: x is 2^n * m with m from 0.7 to 1.42, and log(m) is twice the artanh of
  // (m - 1) / (m + 1), whose series, cut behind the sixth term, has a remainder there below 1e-10 of the result.
  static F log(F x) {
    I n = ((I)x - 0x3f3504f3) >> 23;
    F m = (F)((I)x - (n << 23)), k = to_float(n);
    F r = (m - 1.0f) / (m + 1.0f), square = r * r;
    F p = fill(2.0f / 11);
    p = p * square + 2.0f / 9;
    p = p * square + 2.0f / 7;
    p = p * square + 2.0f / 5;
    p = p * square + 2.0f / 3;
    p = p * square + 2.0f;
    return k * 0x1.62e4p-1f + (p * r + k * 0x1.7f7d1cp-20f);
  }

  // tanh(x) to about 2 ulp: (e^2x - 1) / (e^2x + 1) or, below 1, where that would cancel, its continued fraction
  // cut behind the seventh term (a remainder below 1e-9 of the result). NaN stays NaN.
  static F tanh(F x) {
    F square = x * x;
    F above = (((square + 378.0f) * square + 17325.0f) * square + 135135.0f) * x;
    F below = ((square * 28.0f + 3150.0f) * square + 62370.0f) * square + 135135.0f;
    F magnitude = x < 0.0f ? -x : x;
    F power = exp(magnitude > 10.0f ? fill(20.0f) : magnitude * 2.0f);
    F large = x < 0.0f ? 1.0f - power : power - 1.0f;
    return (magnitude < 1.0f ? above : large) / (magnitude < 1.0f ? below : power + 1.0f);
  }

 private:
  static U load_halves(const void* p) {
    H h;
    memcpy(&h, p, sizeof h);
    return widen(h);
  }

  static void store_halves(void* p, U v) {
    H h = narrow(v);
    memcpy(p, &h, sizeof h);
  }
};

// Calls f with the storage type that `dtype` numbers: 0 float32, 1 bfloat16, 2 float16.
template <class Function>
void with_type(int dtype, Function f) {
  if (dtype == 0) f(float{});
  if (dtype == 1) f(Bfloat16{});
  if (dtype == 2) f(Float16{});
}
