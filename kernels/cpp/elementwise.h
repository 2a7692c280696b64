// Kernels that touch each number once: KV-cache write, norms, rotary embedding, activations, sums, rows of a table,
// the largest of a row.
#pragma once

#include <algorithm>
#include <type_traits>

#include "activations.h"
#include "simd.h"
#include "team.h"

// Below this many numbers, waking threads costs more than it saves.
constexpr int64_t PARALLEL_CELLS = 1 << 17;
constexpr float LARGEST_HALF = 65504.0f;

// The structs of arguments are declared again in kernels/cpu_library.py, field by field.

struct WriteKvArgs {
  const void *key, *value;      // [tokens, kv_heads, head_dim], rows `stride` apart
  void *key_cache, *value_cache;
  const int64_t* slots;         // [tokens]; -1 is skipped
  int64_t tokens, key_stride, value_stride;
  int dtype, cache_dtype, kv_heads, head_dim, block_size;

  int64_t cells() const { return tokens * kv_heads * head_dim; }
};

// to[i * stride] = from[i], in the type of `to`: numbers beyond what halves reach become the largest half.
template <class From, class To>
void store_cells(const From* from, To* to, int64_t stride, int count) {
  using S = Simd<WIDTH>;
  for (int first = 0; first < count; first += WIDTH) {
    const int cells = std::min(WIDTH, count - first);
    From given[WIDTH] = {};
    To kept[WIDTH];
    memcpy(given, from + first, cells * sizeof(From));
    S::F v = S::load(given);
    if constexpr (std::is_same_v<To, Float16>) {
      v = v > LARGEST_HALF ? S::fill(LARGEST_HALF) : v;
      v = v < -LARGEST_HALF ? S::fill(-LARGEST_HALF) : v;
    }
    S::store(kept, v);
    for (int i = 0; i < cells; i++) to[(first + i) * stride] = kept[i];
  }
}

template <class From, class To>
void write_rows(const WriteKvArgs& a, Range tokens) {
  for (int64_t t = tokens.begin; t < tokens.end; t++) {
    if (a.slots[t] < 0) continue;
    const int64_t block = a.slots[t] / a.block_size, lane = a.slots[t] % a.block_size;
    for (int h = 0; h < a.kv_heads; h++) {
      const int64_t cell = (block * a.kv_heads + h) * a.head_dim * a.block_size;
      const From* key = (const From*)a.key + t * a.key_stride + (int64_t)h * a.head_dim;
      const From* value = (const From*)a.value + t * a.value_stride + (int64_t)h * a.head_dim;
      To *keys = (To*)a.key_cache + cell + lane, *values = (To*)a.value_cache + cell + lane * a.head_dim;
      if constexpr (std::is_same_v<From, To>) {
        for (int d = 0; d < a.head_dim; d++) keys[(int64_t)d * a.block_size] = key[d];
        memcpy(values, value, a.head_dim * sizeof(To));
      } else {
        store_cells(key, keys, a.block_size, a.head_dim);
        store_cells(value, values, 1, a.head_dim);
      }
    }
  }
}

inline void write_kv(const WriteKvArgs& a, Team& team) {
  const Range tokens = team.share(a.tokens);
  with_type(a.dtype, [&](auto from) {
    with_type(a.cache_dtype, [&](auto to) { write_rows<decltype(from), decltype(to)>(a, tokens); });
  });
}

struct NormArgs {
  const void* x;              // [tokens, size], size a multiple of 16
  void* residual;             // none, or [tokens, size]: x is added to it in place first, and the sum is normed
  const float *weight, *bias; // [size]; the norm without a mean has no bias
  void* out;
  int64_t tokens, size;
  float eps;
  int dtype;

  int64_t cells() const { return tokens * size; }
};

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
const T* row_to_norm(const NormArgs& a, int64_t token) {
  using S = Simd<WIDTH>;
  const T* x = (const T*)a.x + token * a.size;
  if (!a.residual) return x;
  T* residual = (T*)a.residual + token * a.size;
  for (int64_t i = 0; i < a.size; i += WIDTH) S::store(residual + i, S::load(residual + i) + S::load(x + i));
  return residual;
}

template <class T>
void rms_norm(const NormArgs& a, Team& team) {
  const Range tokens = team.share(a.tokens);
  for (int64_t t = tokens.begin; t < tokens.end; t++)
    norm_row(row_to_norm<T>(a, t), a.weight, (T*)a.out + t * a.size, a.size, a.eps);
}

// Each row less its mean, over its deviation, times weight, plus bias.
template <class T>
void layer_norm(const NormArgs& a, Team& team) {
  using S = Simd<WIDTH>;
  const Range tokens = team.share(a.tokens);
  for (int64_t t = tokens.begin; t < tokens.end; t++) {
    const T* from = row_to_norm<T>(a, t);
    S::F sums = {}, squares = {};
    for (int64_t i = 0; i < a.size; i += WIDTH) sums += S::load(from + i);
    const float mean = S::sum(sums) / (float)a.size;
    for (int64_t i = 0; i < a.size; i += WIDTH) {
      const S::F v = S::load(from + i) - mean;
      squares += v * v;
    }
    const float scale = 1.0f / std::sqrt(S::sum(squares) / (float)a.size + a.eps);
    for (int64_t i = 0; i < a.size; i += WIDTH)
      S::store((T*)a.out + t * a.size + i,
               (S::load(from + i) - mean) * scale * S::load(a.weight + i) + S::load(a.bias + i));
  }
}

// Heads of x [tokens, heads, head_dim], in place; tokens lie `stride` apart.
struct NormHeadsArgs {
  void* x;
  const float* weight;  // [head_dim]
  int64_t tokens, stride;
  float eps;
  int dtype, heads, head_dim;

  int64_t cells() const { return tokens * heads * head_dim; }
};

template <class T>
void norm_heads(const NormHeadsArgs& a, Team& team) {
  const Range tokens = team.share(a.tokens);
  for (int64_t t = tokens.begin; t < tokens.end; t++)
    for (int h = 0; h < a.heads; h++) {
      T* head = (T*)a.x + t * a.stride + (int64_t)h * a.head_dim;
      norm_row(head, a.weight, head, a.head_dim, a.eps);
    }
}

struct RotaryArgs {
  void* x;                      // [tokens, heads, head_dim], tokens `stride` apart
  const float *cosines, *sines; // [tokens, rotated / 2]
  int64_t tokens, stride;
  int dtype, heads, head_dim, rotated;

  int64_t cells() const { return tokens * heads * head_dim; }
};

// Rotates the first `rotated` dimensions of each head in place, pairing dimension i with i + rotated / 2.
template <class T>
void rotary(const RotaryArgs& a, Team& team) {
  // Half of 16 dimensions is 8, which a vector of 16 does not divide.
  constexpr int width = std::min(WIDTH, 8);
  using S = Simd<width>;
  const int half = a.rotated / 2;
  const Range tokens = team.share(a.tokens);
  for (int64_t t = tokens.begin; t < tokens.end; t++) {
    const float *c = a.cosines + t * half, *s = a.sines + t * half;
    for (int h = 0; h < a.heads; h++) {
      T *low = (T*)a.x + t * a.stride + (int64_t)h * a.head_dim, *high = low + half;
      for (int i = 0; i < half; i += width) {
        const S::F p = S::load(low + i), q = S::load(high + i), cosine = S::load(c + i), sine = S::load(s + i);
        S::store(low + i, p * cosine - q * sine);
        S::store(high + i, q * cosine + p * sine);
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
struct GatedArgs {
  const void* x;
  void* out;
  int64_t tokens, size;
  int dtype, activation;

  int64_t cells() const { return tokens * size; }
};

template <Activation ACTIVATION, class T>
void gate_cells(const T* gate, const T* up, T* out, int64_t cells) {
  using S = Simd<WIDTH>;
  for (int64_t i = 0; i < cells; i += WIDTH)
    S::store(out + i, activate<ACTIVATION, S>(S::load(gate + i)) * S::load(up + i));
}

template <class T>
void gated(const GatedArgs& a, Team& team) {
  // By vectors of all rows: one row is enough for several members.
  const int64_t vectors = a.size / 16;
  const Range ours = team.share(a.tokens * vectors);
  for (int64_t i = ours.begin; i < ours.end;) {
    const int64_t t = i / vectors, first = i % vectors, count = std::min(vectors - first, ours.end - i);
    const T* gate = (const T*)a.x + t * 2 * a.size + first * 16;
    auto* const run = a.activation == SILU ? gate_cells<SILU, T> : gate_cells<GELU, T>;
    run(gate, gate + a.size, (T*)a.out + t * a.size + first * 16, count * 16);
    i += count;
  }
}

// out = gelu(x), by tanh. cells is a multiple of 16.
struct GeluArgs {
  const void* x;
  void* out;
  int64_t num_cells;
  int dtype;

  int64_t cells() const { return num_cells; }
};

template <class T>
void gelu(const GeluArgs& a, Team& team) {
  using S = Simd<WIDTH>;
  const Range ours = team.share(a.num_cells / 16);
  for (int64_t i = ours.begin * 16; i < ours.end * 16; i += WIDTH)
    S::store((T*)a.out + i, activate<GELU, S>(S::load((const T*)a.x + i)));
}

// x = cap * tanh(x / cap) in place. cells is a multiple of 16.
struct SoftcapArgs {
  float* x;
  int64_t num_cells;
  float cap;

  int64_t cells() const { return num_cells; }
};

inline void softcap(const SoftcapArgs& a, Team& team) {
  using S = Simd<WIDTH>;
  const Range ours = team.share(a.num_cells / 16);
  for (int64_t i = ours.begin * 16; i < ours.end * 16; i += WIDTH)
    S::store(a.x + i, S::tanh(S::load(a.x + i) / a.cap) * a.cap);
}

// x [rows, size] plus y, whose rows are `y_stride` apart, in place. size is a multiple of 16.
struct AddArgs {
  void* x;
  const void* y;
  int64_t rows, size, y_stride;
  int dtype;

  int64_t cells() const { return rows * size; }
};

template <class T>
void add(const AddArgs& a, Team& team) {
  using S = Simd<WIDTH>;
  const Range rows = team.share(a.rows);
  for (int64_t r = rows.begin; r < rows.end; r++) {
    T* x = (T*)a.x + r * a.size;
    const T* y = (const T*)a.y + r * a.y_stride;
    for (int64_t i = 0; i < a.size; i += WIDTH) S::store(x + i, S::load(x + i) + S::load(y + i));
  }
}

// x = x * factor in place. cells is a multiple of 16.
struct ScaleArgs {
  void* x;
  int64_t num_cells;
  float factor;
  int dtype;

  int64_t cells() const { return num_cells; }
};

template <class T>
void scale(const ScaleArgs& a, Team& team) {
  using S = Simd<WIDTH>;
  const Range ours = team.share(a.num_cells / 16);
  for (int64_t i = ours.begin * 16; i < ours.end * 16; i += WIDTH)
    S::store((T*)a.x + i, S::load((const T*)a.x + i) * a.factor);
}

// Rows of a table, as they are.
struct RowsArgs {
  const char* table;
  const int64_t* indices;  // [count]
  char* out;               // dense
  int64_t count, bytes, stride;  // bytes of a row, and from one of the table's to the next

  int64_t cells() const { return count * bytes / 4; }
};

inline void take_rows(const RowsArgs& a, Team& team) {
  const Range rows = team.share(a.count);
  for (int64_t r = rows.begin; r < rows.end; r++) memcpy(a.out + r * a.bytes, a.table + a.indices[r] * a.stride, a.bytes);
}

// The place of each row's largest number, the first of several; -1 where that is -inf or any is not a number.
struct ArgmaxArgs {
  const float* x;       // rows of `size`, dense
  const int64_t* rows;  // [count]; none is the first `count`
  int32_t* out;         // [count]
  int64_t count, size;

  int64_t cells() const { return count * size; }
};

inline int32_t argmax_row(const float* x, int64_t size) {
  using S = Simd<WIDTH>;
  constexpr int VECTORS = 4, CELLS = VECTORS * WIDTH;
  constexpr float LEAST = -INFINITY;
  const int64_t whole = size / CELLS * CELLS;
  S::F most[VECTORS] = {S::fill(LEAST), S::fill(LEAST), S::fill(LEAST), S::fill(LEAST)};
  S::I strange = {};
  for (int64_t i = 0; i < whole; i += CELLS)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) {
      const S::F cells = S::load(x + i + v * WIDTH);
      most[v] = cells > most[v] ? cells : most[v];
      strange |= cells != cells;
    }
  float largest = LEAST;
  for (const S::F& each : most) largest = std::max(largest, S::max(each));
  bool is_strange = sum_lanes(strange) != 0;
  for (int64_t i = whole; i < size; i++) {
    largest = x[i] > largest ? x[i] : largest;
    is_strange |= x[i] != x[i];
  }
  if (is_strange || largest == LEAST) return -1;
  int64_t i = 0;
  for (; i < whole; i += CELLS) {
    S::I found = {};
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) found |= S::load(x + i + v * WIDTH) == largest;
    if (sum_lanes(found)) break;
  }
  while (x[i] != largest) i++;
  return (int32_t)i;
}

inline void argmax(const ArgmaxArgs& a, Team& team) {
  const Range ours = team.share(a.count);
  for (int64_t i = ours.begin; i < ours.end; i++) a.out[i] = argmax_row(a.x + (a.rows ? a.rows[i] : i) * a.size, a.size);
}
