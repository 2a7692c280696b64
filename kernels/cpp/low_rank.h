// Adds to some tokens' rows their products with two thin matrices, one after the other.
#pragma once

#include "simd.h"
#include "team.h"

constexpr int MOST_RANK = 512;

struct LowRankArgs {
  const void* x;          // [tokens, ins], ins a multiple of 16
  void* out;              // [tokens, outs], rows `stride` apart; outs a multiple of 16
  const float *a, *b;     // [rank, ins], [rank, outs]
  const int64_t* tokens;  // [count]: which; none for the first ones
  int64_t count, ins, outs, stride;
  int rank, dtype;

  int64_t cells() const { return count * rank * ((ins + outs) / 16); }
};

// Of some tokens, inner[first rank .. + N) = a x, for N rows of a. Each is added up in one order, however many there are.
template <int TOKENS, int N, class T>
void low_rank_inner(const T* const* x, const float* a, int64_t ins, float (*inner)[MOST_RANK], int rank) {
  using S = Simd<WIDTH>;
  S::F sums[TOKENS][N] = {};
  for (int64_t i = 0; i < ins; i += WIDTH)
    for (int t = 0; t < TOKENS; t++) {
      const S::F v = S::load(x[t] + i);
      for (int n = 0; n < N; n++) sums[t][n] += v * S::load(a + n * ins + i);
    }
  for (int t = 0; t < TOKENS; t++)
    for (int n = 0; n < N; n++) inner[t][rank + n] = S::sum(sums[t][n]);
}

// out += inner b, for N vectors of outputs of some tokens; likewise.
template <int TOKENS, int N, class T>
void low_rank_outer(const float (*inner)[MOST_RANK], int rank, const float* b, int64_t outs, T* const* out, int64_t at) {
  using S = Simd<WIDTH>;
  S::F sums[TOKENS][N] = {};
  for (int r = 0; r < rank; r++)
    for (int n = 0; n < N; n++) {
      const S::F v = S::load(b + r * outs + at + n * WIDTH);
      for (int t = 0; t < TOKENS; t++) sums[t][n] += inner[t][r] * v;
    }
  for (int t = 0; t < TOKENS; t++)
    for (int n = 0; n < N; n++) {
      T* to = out[t] + at + n * WIDTH;
      S::store(to, S::load(to) + sums[t][n]);
    }
}

template <int TOKENS, class T>
void low_rank_tokens(const LowRankArgs& a, int64_t first) {
  constexpr int TOGETHER = 4;
  const T* x[TOKENS];
  T* out[TOKENS];
  for (int t = 0; t < TOKENS; t++) {
    const int64_t token = a.tokens ? a.tokens[first + t] : first + t;
    x[t] = (const T*)a.x + token * a.ins;
    out[t] = (T*)a.out + token * a.stride;
  }
  float inner[TOKENS][MOST_RANK];
  int r = 0;
  for (; r + TOGETHER <= a.rank; r += TOGETHER) low_rank_inner<TOKENS, TOGETHER>(x, a.a + r * a.ins, a.ins, inner, r);
  for (; r < a.rank; r++) low_rank_inner<TOKENS, 1>(x, a.a + r * a.ins, a.ins, inner, r);
  int64_t o = 0;
  for (; o + TOGETHER * WIDTH <= a.outs; o += TOGETHER * WIDTH)
    low_rank_outer<TOKENS, TOGETHER>(inner, a.rank, a.b, a.outs, out, o);
  for (; o < a.outs; o += WIDTH) low_rank_outer<TOKENS, 1>(inner, a.rank, a.b, a.outs, out, o);
}

template <class T>
void add_low_rank(const LowRankArgs& a, Team& team) {
  constexpr int TOKENS = NUM_REGISTERS / 8;  // whose sums, of 4 vectors each, fill half of the registers
  const Range ours = team.share(a.count);
  int64_t i = ours.begin;
  for (; i + TOKENS <= ours.end; i += TOKENS) low_rank_tokens<TOKENS, T>(a, i);
  for (; i < ours.end; i++) low_rank_tokens<1, T>(a, i);
}
