// Kernels that touch each number once: KV-cache write, norms, rotary embedding, activations, capped logits.
#pragma once

#include <algorithm>

#include "simd.h"

// Below this many numbers, waking threads costs more than it saves.
constexpr int64_t PARALLEL_CELLS = 1 << 17;

// key and value [tokens, kv_heads, head_dim], rows `stride` apart, into the slots' blocks; slot -1 is skipped.
template <class T>
void write_kv(const T* key, const T* value, T* key_cache, T* value_cache, const int64_t* slots, int64_t tokens,
              int64_t key_stride, int64_t value_stride, int kv_heads, int head_dim, int block_size, int threads) {
#pragma omp parallel for num_threads(threads) if (tokens * kv_heads * head_dim > PARALLEL_CELLS)
  for (int64_t t = 0; t < tokens; t++) {
    if (slots[t] < 0) continue;
    const int64_t block = slots[t] / block_size, lane = slots[t] % block_size;
    for (int h = 0; h < kv_heads; h++) {
      const int64_t cell = (block * kv_heads + h) * head_dim * block_size;
      const T* from = key + t * key_stride + (int64_t)h * head_dim;
      T* to = key_cache + cell + lane;
      for (int d = 0; d < head_dim; d++) to[(int64_t)d * block_size] = from[d];
      memcpy(value_cache + cell + lane * head_dim, value + t * value_stride + (int64_t)h * head_dim,
             head_dim * sizeof(T));
    }
  }
}

// out = from / sqrt(mean(from^2) + eps) * weight, rounded once; `out` may be `from`. size is a multiple of 16.
template <class T>
void norm_row(const T* from, const float* weight, T* out, int64_t size, float eps) {
  using S = Simd<WIDTH>;
  S::F squares = {};
  for (int64_t i = 0; i < size; i += WIDTH) {
    const S::F v = S::load(from + i);
    squares += v * v;
  }
  const float scale = 1.0f / std::sqrt(S::sum(squares) / (float)size + eps);
  for (int64_t i = 0; i < size; i += WIDTH) S::store(out + i, S::load(from + i) * scale * S::load(weight + i));
}

// What is to be normed: x or, with a residual, the sum that is stored in it, as rounded.
template <class T>
const T* add_row(const T* x, T* residual, int64_t size) {
  using S = Simd<WIDTH>;
  if (!residual) return x;
  for (int64_t i = 0; i < size; i += WIDTH) S::store(residual + i, S::load(residual + i) + S::load(x + i));
  return residual;
}

// Each row of x [tokens, size], normed. With a residual: x is added to it in place first.
template <class T>
void rms_norm(const T* x, T* residual, const float* weight, T* out, int64_t tokens, int64_t size, float eps,
              int threads) {
#pragma omp parallel for num_threads(threads) if (tokens * size > PARALLEL_CELLS)
  for (int64_t t = 0; t < tokens; t++)
    norm_row(add_row(x + t * size, residual ? residual + t * size : nullptr, size), weight, out + t * size, size, eps);
}

// Each row of x [tokens, size] less its mean, over its deviation, times weight, plus bias. With a residual: as above.
template <class T>
void layer_norm(const T* x, T* residual, const float* weight, const float* bias, T* out, int64_t tokens, int64_t size,
                float eps, int threads) {
  using S = Simd<WIDTH>;
#pragma omp parallel for num_threads(threads) if (tokens * size > PARALLEL_CELLS)
  for (int64_t t = 0; t < tokens; t++) {
    const T* from = add_row(x + t * size, residual ? residual + t * size : nullptr, size);
    S::F sums = {}, squares = {};
    for (int64_t i = 0; i < size; i += WIDTH) sums += S::load(from + i);
    const float mean = S::sum(sums) / (float)size;
    for (int64_t i = 0; i < size; i += WIDTH) {
      const S::F v = S::load(from + i) - mean;
      squares += v * v;
    }
    const float scale = 1.0f / std::sqrt(S::sum(squares) / (float)size + eps);
    for (int64_t i = 0; i < size; i += WIDTH)
      S::store(out + t * size + i, (S::load(from + i) - mean) * scale * S::load(weight + i) + S::load(bias + i));
  }
}

// Norms each head of x [tokens, heads, head_dim] in place; tokens lie `stride` apart.
template <class T>
void norm_heads(T* x, const float* weight, int64_t tokens, int64_t stride, int heads, int head_dim, float eps,
                int threads) {
#pragma omp parallel for num_threads(threads) if (tokens * heads * head_dim > PARALLEL_CELLS)
  for (int64_t t = 0; t < tokens; t++)
    for (int h = 0; h < heads; h++) {
      T* head = x + t * stride + (int64_t)h * head_dim;
      norm_row(head, weight, head, head_dim, eps);
    }
}

// Rotates the first `rotated` dimensions of each head of x [tokens, heads, head_dim] in place, pairing
// dimension i with i + rotated / 2. cosines and sines are [tokens, rotated / 2].
template <class T>
void rotary(T* x, const float* cosines, const float* sines, int64_t tokens, int64_t stride, int heads, int head_dim,
            int rotated, int threads) {
  // Half of 16 dimensions is 8, which a vector of 16 does not divide.
  constexpr int width = std::min(WIDTH, 8);
  using S = Simd<width>;
  const int half = rotated / 2;
#pragma omp parallel for num_threads(threads) if (tokens * heads * head_dim > PARALLEL_CELLS)
  for (int64_t t = 0; t < tokens; t++) {
    const float *c = cosines + t * half, *s = sines + t * half;
    for (int h = 0; h < heads; h++) {
      T *low = x + t * stride + (int64_t)h * head_dim, *high = low + half;
      for (int i = 0; i < half; i += width) {
        const S::F a = S::load(low + i), b = S::load(high + i), cosine = S::load(c + i), sine = S::load(s + i);
        S::store(low + i, a * cosine - b * sine);
        S::store(high + i, b * cosine + a * sine);
      }
    }
  }
}

// Activations of the form x * sigmoid(y): what y is.
enum Activation { SILU = 0, GELU = 1 };
template <Activation ACTIVATION, class F>
F sigmoid_argument(F x) {
  if constexpr (ACTIVATION == SILU) return x;
  // gelu by tanh: (1 + tanh(z)) / 2 is sigmoid(2 z), with z = sqrt(2 / pi) * (x + 0.044715 x^3).
  else return x * (x * x * 0.044715f + 1.0f) * 1.5957691216f;
}
template <Activation ACTIVATION, class S>
typename S::F activate(typename S::F x) {
  const typename S::F y = sigmoid_argument<ACTIVATION>(x);
  return x / ((-y > 88.0f ? S::fill(INFINITY) : S::exp(-y)) + 1.0f);
}

// out = activation(gate) * up, where x is [tokens, 2 * size]: the gates, then the ups. size is a multiple of 16.
template <Activation ACTIVATION, class T>
void gated(const T* x, T* out, int64_t tokens, int64_t size, int threads) {
  using S = Simd<WIDTH>;
#pragma omp parallel for num_threads(threads) if (tokens * size > PARALLEL_CELLS)
  for (int64_t t = 0; t < tokens; t++) {
    const T *gate = x + t * 2 * size, *up = gate + size;
    for (int64_t i = 0; i < size; i += WIDTH)
      S::store(out + t * size + i, activate<ACTIVATION, S>(S::load(gate + i)) * S::load(up + i));
  }
}

// out = gelu(x), by tanh. cells is a multiple of 16.
template <class T>
void gelu(const T* x, T* out, int64_t cells, int threads) {
  using S = Simd<WIDTH>;
#pragma omp parallel for num_threads(threads) if (cells > PARALLEL_CELLS)
  for (int64_t i = 0; i < cells; i += WIDTH) S::store(out + i, activate<GELU, S>(S::load(x + i)));
}

// x = cap * tanh(x / cap) in place. cells is a multiple of 16.
inline void softcap(float* x, int64_t cells, float cap, int threads) {
  using S = Simd<WIDTH>;
#pragma omp parallel for num_threads(threads) if (cells > PARALLEL_CELLS)
  for (int64_t i = 0; i < cells; i += WIDTH) S::store(x + i, S::tanh(S::load(x + i) / cap) * cap);
}
