// Tiles of paged attention by vectors of floats, from a cache of any type.
//
//   K block: [head_dim][block_size]   a vector holds one dimension of W consecutive keys
//   V block: [block_size][head_dim]   a vector holds W consecutive dimensions of one key
//   scores:  [M][partition]           so neither product needs a sum across lanes
#pragma once

#include <array>
#include <utility>

#include "attention_tile.h"

// Rows of a tile, about: keys and values become floats once for all of them.
constexpr int VECTOR_TILE_ROWS = 48;
// How far ahead of the sums values are fetched, blocks.
constexpr int BLOCKS_AHEAD = 4;

// Most accumulators of a kernel, rows x vectors, that leave registers for the operands.
constexpr int MAX_ROWS = 6;
constexpr int max_vectors(int rows) { return NUM_REGISTERS == 32 || rows <= 3 ? 4 : 2; }

// scores[m][v * W + lane] = sum over d of query[m][d] * keys[v][d * key_stride + lane]. What lies at `ahead` (or nothing)
// is fetched meanwhile, as much as the keys are.
template <class T, int W, int ROWS, int VECTORS>
void score_kernel(const float* query, int head_dim, const T* const* keys, int key_stride, float* scores,
                  int score_stride, const T* const* ahead) {
  using S = Simd<W>;
  typename S::F sums[ROWS][VECTORS];
#pragma GCC unroll 8
  for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) sums[m][v] = S::fill(0.0f);
  for (int d = 0; d < head_dim; d++) {
    typename S::F key[VECTORS];
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) key[v] = S::load(keys[v] + (int64_t)d * key_stride);
    if (ahead)
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; v++) fetch(ahead[v] + (int64_t)d * key_stride);
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; v++) sums[m][v] += key[v] * query[m * head_dim + d];
  }
#pragma GCC unroll 8
  for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) S::store(scores + (int64_t)m * score_stride + v * W, sums[m][v]);
}

// out[m][v * W + lane] = sum over keys j of weights[m][j] * value j[column + v * W + lane]
// for keys [begin, end) of a partition; blocks[b] starts the partition's b-th block of values.
template <class T, int W, int ROWS, int VECTORS>
void value_kernel(const float* weights, int weight_stride, const T* const* blocks, int block_size, int begin, int end,
                  int column, int head_dim, float* out) {
  using S = Simd<W>;
  typename S::F sums[ROWS][VECTORS];
#pragma GCC unroll 8
  for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) sums[m][v] = S::fill(0.0f);
  for (int j = begin; j < end;) {
    const int block = j / block_size, stop = std::min(end, (block + 1) * block_size);
    const T* value = blocks[block] + (int64_t)(j - block * block_size) * head_dim + column;
    const int64_t ahead = blocks[std::min(block + BLOCKS_AHEAD, (end - 1) / block_size)] - blocks[block];
    for (; j < stop; j++, value += head_dim) {
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; v++) fetch(value + ahead + v * W);
      typename S::F vector[VECTORS];
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; v++) vector[v] = S::load(value + v * W);
#pragma GCC unroll 8
      for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) sums[m][v] += vector[v] * weights[(int64_t)m * weight_stride + j];
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) S::store(out + (int64_t)m * head_dim + column + v * W, sums[m][v]);
}

// The kernels for 1 to MAX_ROWS rows (entry rows - 1), with one vector or with the most.
using RowCounts = std::make_integer_sequence<int, MAX_ROWS>;
template <class T, int W, int... I>
constexpr auto score_kernels(bool single, std::integer_sequence<int, I...>) {
  return std::array{single ? &score_kernel<T, W, I + 1, 1> : &score_kernel<T, W, I + 1, max_vectors(I + 1)>...};
}
template <class T, int W, int... I>
constexpr auto value_kernels(bool single, std::integer_sequence<int, I...>) {
  return std::array{single ? &value_kernel<T, W, I + 1, 1> : &value_kernel<T, W, I + 1, max_vectors(I + 1)>...};
}
template <class T, int W>
constexpr std::array SCORE_KERNELS = {score_kernels<T, W>(false, RowCounts{}), score_kernels<T, W>(true, RowCounts{})};
template <class T, int W>
constexpr std::array VALUE_KERNELS = {value_kernels<T, W>(false, RowCounts{}), value_kernels<T, W>(true, RowCounts{})};

template <class T, int W>
class VectorTile : public TileState<W> {
  using Base = TileState<W>;
  using typename Base::S;
  using F = typename S::F;
  using I = typename S::I;
  using Base::args_, Base::tile_, Base::scratch_, Base::group_, Base::rows_, Base::head_dim_, Base::partition_;
  using Base::first_position_, Base::lowest_key;

 public:
  VectorTile(const AttentionArgs& args, const Tile& tile, Scratch& scratch) : Base(args, tile, scratch) {
    fit(scratch.scores, (size_t)rows_ * partition_);
    fit(scratch.key_vectors, (size_t)partition_ + max_vectors(1));
    fit(scratch.value_blocks, (size_t)(partition_ / args.block_size));
    Base::load_query();
  }

  __attribute__((noinline)) void attend(int partition) {
    const int base = partition * partition_;
    const int begin = std::max(lowest_key(0), base) - base;
    const int end = std::min(first_position_ + tile_.count, base + partition_) - base;
    const int first_vector = begin / W, end_vector = (end + W - 1) / W;
    locate(base, first_vector, end_vector);
    score(first_vector, end_vector);
    for (int m = 0; m < rows_; m++) soften(m, base, first_vector, end_vector);
    weigh(begin, end);
  }

 private:
  // Where each vector of keys and each block of values of the partition lies.
  void locate(int base, int first_vector, int end_vector) {
    const int block_size = args_.block_size;
    const int32_t* table = args_.block_tables + tile_.row * args_.table_stride + base / block_size;
    const int64_t block_cells = (int64_t)head_dim_ * block_size;
    for (int v = first_vector; v < end_vector; v++) {
      const int block = v * W / block_size, lane = v * W % block_size;
      const int64_t cell = ((int64_t)table[block] * args_.num_kv_heads + tile_.kv_head) * block_cells;
      scratch_.key_vectors[v] = (const T*)args_.key_cache + cell + lane;
      scratch_.value_blocks[block] = (const T*)args_.value_cache + cell;
    }
    // Behind the last keys come the first values.
    const int first_block = first_vector * W / block_size, last_block = (end_vector * W - 1) / block_size;
    for (int i = 0; i < max_vectors(1); i++)
      scratch_.key_vectors[end_vector + i] = scratch_.value_blocks[std::min(first_block + i, last_block)];
  }

  // A few vectors of keys at a time, so that they stay in the nearest cache for all rows.
  void score(int first_vector, int end_vector) {
    const T* const* keys = (const T* const*)scratch_.key_vectors.data();
    for (int group = first_vector; group < end_vector; group += max_vectors(1)) {
      const int group_end = std::min(end_vector, group + max_vectors(1));
      for (int m = 0; m < rows_; m += MAX_ROWS) {
        const int rows = std::min(rows_ - m, MAX_ROWS);
        for (int v = group; v < group_end;) {
          const bool single = group_end - v < max_vectors(rows);
          SCORE_KERNELS<T, W>[single][rows - 1](&scratch_.query[(size_t)m * head_dim_], head_dim_, keys + v,
                                                args_.block_size, &scratch_.scores[(size_t)m * partition_ + v * W],
                                                partition_, m ? nullptr : keys + v + (group_end - group));
          v += single ? 1 : max_vectors(rows);
        }
      }
    }
  }

  // Scores of one tile row become weights: e^(score - maximum), 0 for keys it must not see.
  void soften(int m, int base, int first_vector, int end_vector) {
    const int query = m / group_;
    const int low = lowest_key(query) - base, high = first_position_ + query - base;
    const float cap = args_.softcap, inverse_cap = 1.0f / cap;
    float* scores = &scratch_.scores[(size_t)m * partition_];
    const I lane = S::lanes();
    F maxima = S::fill(-INFINITE);
    for (int v = first_vector; v < end_vector; v++) {
      const I key = lane + v * W;
      const F product = S::load(scores + v * W);
      const F capped = cap > 0 ? S::tanh(product * inverse_cap) * cap : product;
      const F score = (key >= low) & (key <= high) ? capped : S::fill(-INFINITE);
      S::store(scores + v * W, score);
      maxima = score > maxima ? score : maxima;
    }
    const float maximum = S::max(maxima);
    const float shift = maximum == -INFINITE ? 0.0f : maximum;
    F sums = {};
    for (int v = first_vector; v < end_vector; v++) {
      const F weight = S::exp(S::load(scores + v * W) - shift);
      S::store(scores + v * W, weight);
      sums += weight;
    }
    scratch_.partial_max[m] = maximum;
    scratch_.partial_sum[m] = S::sum(sums);
  }

  void weigh(int begin, int end) {
    const T* const* blocks = (const T* const*)scratch_.value_blocks.data();
    for (int m = 0; m < rows_; m += MAX_ROWS) {
      const int rows = std::min(rows_ - m, MAX_ROWS);
      for (int d = 0; d < head_dim_;) {
        const bool single = (head_dim_ - d) / W < max_vectors(rows);
        VALUE_KERNELS<T, W>[single][rows - 1](&scratch_.scores[(size_t)m * partition_], partition_, blocks,
                                             args_.block_size, begin, end, d, head_dim_,
                                             &scratch_.partial[(size_t)m * head_dim_]);
        d += (single ? 1 : max_vectors(rows)) * W;
      }
    }
  }
};
