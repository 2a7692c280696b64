// Paged attention over block tables: prefill, decode and mixed rows in one call, tile by tile or by parts of tiles.
#pragma once

#include <algorithm>
#include <vector>

#include "attention_vectors.h"
#include "team.h"

// Below so many pairs of a query's and a key's dimension, waking threads that sleep costs more than it saves.
constexpr int64_t PARALLEL_PAIRS = 1 << 20;

inline Scratch& thread_scratch() {
  static thread_local Scratch scratch;
  return scratch;
}

// Whole tiles for each member; used where there are enough of them.
template <class Computed>
void attend_tiles(const AttentionArgs& args, const std::vector<Tile>& tiles, Team& team) {
  Scratch& scratch = thread_scratch();
  for (Range range; (range = team.take(tiles.size(), 1)).begin < range.end;)
    for (int64_t i = range.begin; i < range.end; i++) {
      Computed tile(args, tiles[i], scratch);
      tile.start();
      for (int p = tile.first_partition(); p <= tile.last_partition(); p++) {
        tile.attend(p);
        tile.merge(scratch.partial.data(), scratch.partial_max.data(), scratch.partial_sum.data());
      }
      tile.finish();
    }
}

// One partition of a tile, and where its output, maxima and sums lie among all partial results.
struct Part {
  int32_t tile, partition;
  size_t output, statistics;
};

// Partitions of the same tile by different members, then the same merge as above, in the same order.
template <class Computed>
void attend_parts(const AttentionArgs& args, const std::vector<Tile>& tiles, Team& team) {
  Scratch& scratch = thread_scratch();
  std::vector<Part> parts;
  std::vector<size_t> tile_parts = {0};
  size_t rows = 0;
  for (size_t i = 0; i < tiles.size(); i++) {
    Computed tile(args, tiles[i], scratch);
    for (int p = tile.first_partition(); p <= tile.last_partition(); p++, rows += tile.rows())
      parts.push_back({(int32_t)i, p, rows * args.head_dim, rows});
    tile_parts.push_back(parts.size());
  }
  float* const outputs = (float*)team.memory();
  float *const maxima = outputs + rows * args.head_dim, *const sums = maxima + rows;
  for (Range range; (range = team.take(parts.size(), 1)).begin < range.end;)
    for (int64_t i = range.begin; i < range.end; i++) {
      Computed tile(args, tiles[parts[i].tile], scratch);
      tile.attend(parts[i].partition);
      std::copy_n(scratch.partial.begin(), (size_t)tile.rows() * args.head_dim, &outputs[parts[i].output]);
      std::copy_n(scratch.partial_max.begin(), tile.rows(), &maxima[parts[i].statistics]);
      std::copy_n(scratch.partial_sum.begin(), tile.rows(), &sums[parts[i].statistics]);
    }
  team.barrier();
  for (Range range; (range = team.take(tiles.size(), 1)).begin < range.end;)
    for (int64_t i = range.begin; i < range.end; i++) {
      Computed tile(args, tiles[i], scratch);
      tile.start();
      for (size_t p = tile_parts[i]; p < tile_parts[i + 1]; p++)
        tile.merge(&outputs[parts[p].output], &maxima[parts[p].statistics], &sums[parts[p].statistics]);
      tile.finish();
    }
}

inline int tile_queries(const AttentionArgs& args) {
  return std::max(1, VECTOR_TILE_ROWS / (args.num_heads / args.num_kv_heads));
}

// Whether there are so few tiles, and one so long, that members share tiles.
inline bool shares_tiles(const AttentionArgs& args, int threads) {
  int longest = 0;
  int64_t tiles = 0;
  for (int row = 0; row < args.num_rows && tiles < 2 * threads; row++) {
    const int queries = args.query_starts[row + 1] - args.query_starts[row];
    if (queries > 0) longest = std::max(longest, args.seq_lens[row]);
    tiles += (queries + tile_queries(args) - 1) / tile_queries(args) * args.num_kv_heads;
  }
  return threads > 1 && longest > PARTITION && tiles < 2 * threads;
}

// Of the partial results of shared tiles.
inline int64_t attention_scratch(const AttentionArgs& args, int threads) {
  if (!shares_tiles(args, threads)) return 0;
  int64_t rows = 0;
  for (int row = 0; row < args.num_rows; row++)
    rows += (int64_t)(args.query_starts[row + 1] - args.query_starts[row]) * args.num_heads *
            (args.seq_lens[row] / (PARTITION / 2) + 2);
  return rows * (args.head_dim + 2) * sizeof(float);
}

inline bool attention_is_long(const AttentionArgs& args) {
  int64_t pairs = 0;
  for (int row = 0; row < args.num_rows; row++)
    pairs += (int64_t)(args.query_starts[row + 1] - args.query_starts[row]) * args.seq_lens[row];
  return pairs * args.num_heads * args.head_dim >= PARALLEL_PAIRS;
}

inline void attend(const AttentionArgs& args, Team& team) {
  const int most = tile_queries(args);
  static thread_local std::vector<Tile> tiles;
  tiles.clear();
  for (int row = 0; row < args.num_rows; row++) {
    const int queries = args.query_starts[row + 1] - args.query_starts[row];
    // Late queries see most keys; the longest work goes first, so that threads end together.
    for (int first = (queries - 1) / most * most; queries > 0 && first >= 0; first -= most)
      for (int head = 0; head < args.num_kv_heads; head++)
        tiles.push_back({row, head, first, std::min(most, queries - first)});
  }
  with_type(args.cache_dtype, [&](auto type) {
    using Computed = VectorTile<decltype(type), WIDTH>;
    auto* const run = shares_tiles(args, team.size()) ? attend_parts<Computed> : attend_tiles<Computed>;
    run(args, tiles, team);
  });
}
