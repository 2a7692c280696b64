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

// inner[0..N) = a x, for N rows of a. Each is added up in one order, whatever N is.
template <int N, class T>
void low_rank_inner(const T* x, const float* a, int64_t ins, float* inner) {
  using S = Simd<WIDTH>;
  S::F sums[N] = {};
  for (int64_t i = 0; i < ins; i += WIDTH) {
    const S::F v = S::load(x + i);
    for (int n = 0; n < N; n++) sums[n] += v * S::load(a + n * ins + i);
  }
  for (int n = 0; n < N; n++) inner[n] = S::sum(sums[n]);
}

// out += inner b, for N vectors of out.
template <int N, class T>
void low_rank_outer(const float* inner, int rank, const float* b, int64_t outs, T* out) {
  using S = Simd<WIDTH>;
  S::F sums[N] = {};
  for (int r = 0; r < rank; r++)
    for (int n = 0; n < N; n++) sums[n] += inner[r] * S::load(b + r * outs + n * WIDTH);
  for (int n = 0; n < N; n++) S::store(out + n * WIDTH, S::load(out + n * WIDTH) + sums[n]);
}

template <class T>
void add_low_rank(const LowRankArgs& a, Team& team) {
  constexpr int TOGETHER = 4;
  const Range ours = team.share(a.count);
  for (int64_t i = ours.begin; i < ours.end; i++) {
    const int64_t token = a.tokens ? a.tokens[i] : i;
    const T* x = (const T*)a.x + token * a.ins;
    T* out = (T*)a.out + token * a.stride;
    float inner[MOST_RANK];
    int r = 0;
    for (; r + TOGETHER <= a.rank; r += TOGETHER) low_rank_inner<TOGETHER>(x, a.a + r * a.ins, a.ins, inner + r);
    for (; r < a.rank; r++) low_rank_inner<1>(x, a.a + r * a.ins, a.ins, inner + r);
    int64_t o = 0;
    for (; o + TOGETHER * WIDTH <= a.outs; o += TOGETHER * WIDTH)
      low_rank_outer<TOGETHER>(inner, a.rank, a.b + o, a.outs, out + o);
    for (; o < a.outs; o += WIDTH) low_rank_outer<1>(inner, a.rank, a.b + o, a.outs, out + o);
  }
}
