// What a step computes, looked up in tables of tokens and blocks: so little work that one member of the team does it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "team.h"

struct StepArgs {
  const int32_t* token_table;   // rows token_stride apart
  const int32_t* block_table;   // rows block_stride apart
  const int32_t* rows;          // [num_rows]
  const int32_t* starts;        // [num_rows]
  const int32_t* query_starts;  // [num_rows + 1]
  int64_t* input_ids;           // [padded_tokens]
  int64_t* positions;           // [padded_tokens]
  int64_t* slots;               // [padded_tokens]
  int32_t* out_query_starts;    // [padded_rows + 1]
  int32_t* seq_lens;            // [padded_rows]
  int32_t* block_tables;        // [padded_rows][width], rows out_stride apart; filled as far as a row's keys go
  int64_t token_stride, block_stride, out_stride;
  int64_t num_rows, padded_rows, padded_tokens, width, block_size;
};

inline void step_tensors(const StepArgs& a, Team& team) {
  if (team.member()) return;
  memcpy(a.out_query_starts, a.query_starts, (a.num_rows + 1) * sizeof(int32_t));
  int64_t token = 0;
  for (int64_t r = 0; r < a.num_rows; r++) {
    const int32_t* ids = a.token_table + a.rows[r] * a.token_stride;
    const int32_t* blocks = a.block_table + a.rows[r] * a.block_stride;
    int64_t position = a.starts[r];
    for (; token < a.query_starts[r + 1]; token++, position++) {
      a.input_ids[token] = ids[position];
      a.positions[token] = position;
      a.slots[token] = blocks[position / a.block_size] * a.block_size + position % a.block_size;
    }
    a.seq_lens[r] = (int32_t)position;
    const int64_t width = std::min(a.width, (position + a.block_size - 1) / a.block_size);
    memcpy(a.block_tables + r * a.out_stride, blocks, width * sizeof(int32_t));
  }
  for (int64_t r = a.num_rows; r < a.padded_rows; r++) {
    a.seq_lens[r] = 0;
    a.out_query_starts[r + 1] = (int32_t)std::min(token + 1 + r - a.num_rows, a.padded_tokens);
  }
  for (; token < a.padded_tokens; token++) {
    a.input_ids[token] = a.positions[token] = 0;
    a.slots[token] = -1;
  }
}
