// A tile of paged attention, on one thread: what is common to all ways of computing it.
//
// A tile is a few consecutive queries of one row with all query heads of one KV head: M tile rows
// that share every key and value they read. Keys are taken in partitions of about 512, cut at
// absolute positions. Inside a partition: scores of all M rows, their maximum, exponentials and sum,
// then the weighted values; across partitions a running (maximum, sum, output) is rescaled and added
// to. So each row's numbers are added up in an order that depends on absolute positions alone: not on
// the tile, the other rows, the way a prompt was cut into steps, or the number of threads. Keys that
// a row must not see weigh exactly 0 and change nothing.
#pragma once

#include <algorithm>
#include <cstddef>
#include <limits>
#include <vector>

#include "simd.h"

struct AttentionArgs {
  const void* query;        // [tokens, num_heads, head_dim], rows query_stride apart
  const void* key_cache;    // [blocks, num_kv_heads, head_dim, block_size]
  const void* value_cache;  // [blocks, num_kv_heads, block_size, head_dim]
  void* out;                // [tokens, num_heads, head_dim], dense, of the query's type
  const int32_t* query_starts;  // [rows + 1], first token of each row
  const int32_t* seq_lens;      // [rows], keys of each row, this step's included
  const int32_t* block_tables;  // [rows, table_stride]
  int64_t query_stride;
  int64_t table_stride;
  int32_t num_rows;
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t block_size;
  int32_t sliding_window;  // keys a query sees, itself included; 0 is all
  int32_t dtype;
  int32_t cache_dtype;
  float scale;
  float softcap;  // scores become softcap * tanh(score / softcap); 0 leaves them
};

constexpr int PARTITION = 512;
constexpr float INFINITE = std::numeric_limits<float>::infinity();

// One thread's working memory; kept between calls, so that a step allocates nothing.
struct Scratch {
  std::vector<float> query, scores, partial, output;
  std::vector<float> partial_max, partial_sum, running_max, running_sum;
  std::vector<const void*> key_vectors, value_blocks;
};

template <class T>
void fit(std::vector<T>& memory, size_t size) {
  if (memory.size() < size) memory.resize(size);
}

// Consecutive queries of one batch row, and a KV head.
struct Tile {
  int32_t row, kv_head, first, count;
};

inline int partition_size(int block_size) { return block_size * std::max(1, PARTITION / block_size); }

// A subclass has attend(partition): maximum, sum and unscaled output of one partition, into the scratch's partial_*.
template <int W>
class TileState {
 protected:
  using S = Simd<W>;

 public:
  TileState(const AttentionArgs& args, const Tile& tile, Scratch& scratch)
      : args_(args),
        tile_(tile),
        scratch_(scratch),
        group_(args.num_heads / args.num_kv_heads),
        rows_(tile.count * group_),
        head_dim_(args.head_dim),
        partition_(partition_size(args.block_size)) {
    const int row_queries = args.query_starts[tile.row + 1] - args.query_starts[tile.row];
    first_position_ = args.seq_lens[tile.row] - row_queries + tile.first;
    const size_t cells = (size_t)rows_ * head_dim_;
    for (auto* v : {&scratch.query, &scratch.partial, &scratch.output}) fit(*v, cells);
    for (auto* v : {&scratch.partial_max, &scratch.partial_sum, &scratch.running_max, &scratch.running_sum})
      fit(*v, rows_);
  }

  int rows() const { return rows_; }
  int first_partition() const { return lowest_key(0) / partition_; }
  int last_partition() const { return (first_position_ + tile_.count - 1) / partition_; }

  __attribute__((noinline)) void start() {
    std::fill_n(scratch_.running_max.begin(), rows_, -INFINITE);
    std::fill_n(scratch_.running_sum.begin(), rows_, 0.0f);
    std::fill_n(scratch_.output.begin(), rows_ * head_dim_, 0.0f);
  }

  // Adds a partition's result to the running one. Partitions must come in order.
  __attribute__((noinline)) void merge(const float* partial, const float* partial_max, const float* partial_sum) {
    for (int m = 0; m < rows_; m++) {
      if (partial_max[m] == -INFINITE) continue;
      const float high = std::max(scratch_.running_max[m], partial_max[m]);
      const float keep = std::exp(scratch_.running_max[m] - high), add = std::exp(partial_max[m] - high);
      scratch_.running_max[m] = high;
      scratch_.running_sum[m] = scratch_.running_sum[m] * keep + partial_sum[m] * add;
      float* output = &scratch_.output[(size_t)m * head_dim_];
      for (int d = 0; d < head_dim_; d += W)
        S::store(output + d, S::load(output + d) * keep + S::load(partial + (size_t)m * head_dim_ + d) * add);
    }
  }

  __attribute__((noinline)) void finish() {
    with_type(args_.dtype, [&](auto type) {
      auto* const out = (decltype(type)*)args_.out;
      for (int m = 0; m < rows_; m++) {
        auto* to = out + (token(m) * args_.num_heads + head(m)) * head_dim_;
        const float* output = &scratch_.output[(size_t)m * head_dim_];
        for (int d = 0; d < head_dim_; d += W) S::store(to + d, S::load(output + d) / scratch_.running_sum[m]);
      }
    });
  }

 protected:
  int64_t token(int m) const { return args_.query_starts[tile_.row] + tile_.first + m / group_; }
  int head(int m) const { return tile_.kv_head * group_ + m % group_; }

  int lowest_key(int query) const {
    const int position = first_position_ + query;
    return args_.sliding_window > 0 ? std::max(0, position - args_.sliding_window + 1) : 0;
  }

  // Queries, scaled, as floats.
  __attribute__((noinline)) void load_query() {
    with_type(args_.dtype, [&](auto type) {
      const auto* query = (const decltype(type)*)args_.query;
      for (int m = 0; m < rows_; m++) {
        const auto* from = query + token(m) * args_.query_stride + (int64_t)head(m) * head_dim_;
        for (int d = 0; d < head_dim_; d += W)
          S::store(&scratch_.query[(size_t)m * head_dim_ + d], S::load(from + d) * args_.scale);
      }
    });
  }

  const AttentionArgs& args_;
  const Tile tile_;
  Scratch& scratch_;
  const int group_, rows_, head_dim_, partition_;
  int first_position_;
};
