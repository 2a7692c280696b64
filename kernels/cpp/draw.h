// Draws: the largest of scaled logits and noise, neither of which is ever in memory; and, for filters, the smallest logit
// that is kept, without a sort of the vocabulary.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "activations.h"
#include "simd.h"
#include "team.h"

struct DrawArgs {
  const float* logits;         // rows of `size`, dense
  const int64_t* rows;         // [count]
  const double* temperatures;  // [count]
  const int64_t* keys;         // [count], two of 32 bits each
  const float* limits;         // [count], of logits over the temperature; none keeps all
  int32_t* out;                // [count]
  int64_t count, size;

  // Each takes as long as a dozen of what else is counted; a row is one member's.
  int64_t cells() const { return count > 1 ? count * size * 12 : 0; }
};

// The finalizer of MurmurHash3.
inline Simd<WIDTH>::U mix(Simd<WIDTH>::U bits) {
  bits = (bits ^ (bits >> 16)) * 0x85ebca6b;
  bits = (bits ^ (bits >> 13)) * 0xc2b2ae35;
  return bits ^ (bits >> 16);
}

// kernels/gumbel.py: -log(-log(1 - v)) of uniform v, a hash of the token ids and a row's keys.
inline Simd<WIDTH>::F gumbel_noise(Simd<WIDTH>::U token_ids, uint32_t first, uint32_t second) {
  using S = Simd<WIDTH>;
  const S::I bits = (S::I)mix(mix(token_ids ^ first) + second);
  const S::F number = to_float(bits) + (bits < 0 ? S::fill(0x1p32f) : S::F{});
  const S::F halfway = (number + 0.5f) * 0x1p-32f, most = S::fill(1.0f - 0x1p-24f);
  const S::F v = halfway > most ? most : halfway;
  // log(1 - v) is that of a number rounded to 1 - left, and nearly as wrong as left is.
  const S::F rest = 1.0f - v, left = 1.0f - rest;
  const S::F none = S::F{};
  const S::F log = left == none ? -v : S::log(rest) * (v / (left == none ? none + 1.0f : left));
  return -S::log(-log);
}

// Logits i to i + WIDTH over the temperature; -inf beyond the last.
inline Simd<WIDTH>::F scaled_logits(const float* logits, int64_t i, int64_t size, float temperature) {
  using S = Simd<WIDTH>;
  if (i + WIDTH <= size) return S::load(logits + i) / temperature;
  float lanes[WIDTH];
  std::fill_n(lanes, WIDTH, -INFINITY);
  std::copy(logits + i, logits + size, lanes);
  return S::load(lanes) / temperature;
}

// The first of the largest; -1 where that is -inf or any logit is not a number.
inline int32_t draw_row(const float* logits, int64_t size, float temperature, float limit, uint64_t key) {
  using S = Simd<WIDTH>;
  const S::I lane = S::lanes();
  S::F most = S::fill(-INFINITY);
  S::I token_ids = {}, strange = {};
  for (int64_t i = 0; i < size; i += WIDTH) {
    const S::I ids = lane + (int32_t)i;
    const S::F scaled = scaled_logits(logits, i, size, temperature);
    const S::F kept = scaled < limit ? S::fill(-INFINITY) : scaled;
    const S::F sum = kept + gumbel_noise((S::U)ids, (uint32_t)key, (uint32_t)(key >> 32));
    strange |= scaled != scaled;
    token_ids = sum > most ? ids : token_ids;
    most = sum > most ? sum : most;
  }
  const float largest = S::max(most);
  if (sum_lanes(strange) || largest == -INFINITY) return -1;
  int32_t found = INT32_MAX;
  for (int i = 0; i < WIDTH; i++)
    if (most[i] == largest) found = std::min(found, (int32_t)token_ids[i]);
  return found;
}

inline void draw(const DrawArgs& a, Team& team) {
  const Range ours = team.share(a.count);
  for (int64_t i = ours.begin; i < ours.end; i++)
    a.out[i] = draw_row(a.logits + a.rows[i] * a.size, a.size, (float)a.temperatures[i],
                        a.limits ? a.limits[i] : -INFINITY, (uint64_t)a.keys[i]);
}

struct ThresholdsArgs {
  const float* logits;         // rows of `size`, dense
  const int64_t* rows;         // [count]
  const double* temperatures;  // [count]
  const int64_t* top_k;        // [count]; 0 keeps all
  const double* top_p;         // [count]; 1 keeps all
  const double* log_min_p;     // [count]; -inf keeps all
  float* out;                  // [count]
  int64_t count, size;

  int64_t cells() const { return count > 1 ? count * size * 4 : 0; }
};

// How far below the largest logit those are that are looked at first, and then, where these do not settle it.
constexpr float NEAR = 5.0f, FAR = 15.0f;
// How far down they are put in order at first; then twice as far, and so on.
constexpr float STRIDE = 3.0f;

// kernels/thresholds.py, of one row.
class Threshold {
 public:
  Threshold(const float* logits, int64_t size, float temperature, std::vector<float>& memory)
      : logits_(logits), size_(size), temperature_(temperature), candidates_(memory) {
    S::F most = S::fill(-INFINITY);
    for (int64_t i = 0; i < size; i += WIDTH) {
      const S::F scaled = scaled_logits(logits, i, size, temperature);
      most = scaled > most ? scaled : most;
    }
    highest_ = S::max(most);
  }

  float find(int64_t top_k, double top_p, double log_min_p) {
    float limit = -INFINITY;
    if (log_min_p > -INFINITY) limit = round_up(highest_ + log_min_p);
    const bool counts = top_k > 0 && top_k < size_;
    if ((!counts && !(top_p < 1)) || highest_ == -INFINITY) return limit;
    gather(limit, NEAR);
    if (counts) {
      while ((int64_t)candidates_.size() < top_k && widen(limit)) {
      }
      if ((int64_t)candidates_.size() >= top_k) {
        std::nth_element(candidates_.begin(), candidates_.begin() + top_k - 1, candidates_.end(), std::greater<float>());
        limit = std::max(limit, candidates_[top_k - 1]);
      }
    }
    if (!(top_p < 1)) return limit;
    if (highest_ == INFINITY) return highest_;
    double weight, goal;
    do {
      weight = weigh(limit);
      goal = top_p * (weight + (limit < floor_ ? below(limit) : 0.0));
    } while (weight < goal && widen(limit));
    return std::max(limit, border(limit, goal));
  }

 private:
  using S = Simd<WIDTH>;

  static float round_up(double number) {
    const float rounded = (float)number;
    return rounded < number ? std::nextafter(rounded, INFINITY) : rounded;
  }

  // Looks further down; whether there is anything of what is at least the limit.
  bool widen(float limit) {
    if (floor_ <= limit) return false;
    gather(limit, reach_ < FAR ? FAR : INFINITY);
    return true;
  }

  // Candidates are all that is at least the limit, and within reach of the largest.
  void gather(float limit, float reach) {
    reach_ = reach;
    floor_ = std::max(limit, highest_ < INFINITY ? highest_ - reach : limit);
    candidates_.clear();
    for (int64_t i = 0; i < size_; i += WIDTH) {
      const S::F scaled = scaled_logits(logits_, i, size_, temperature_);
      if (!sum_lanes(scaled >= floor_)) continue;
      const int count = (int)std::min<int64_t>(WIDTH, size_ - i);
      for (int lane = 0; lane < count; lane++)
        if (scaled[lane] >= floor_) candidates_.push_back(scaled[lane]);
    }
  }

  double weight_of(float scaled) const { return std::exp((double)scaled - highest_); }

  double weigh(float limit) const {
    double sum = 0.0;
    for (float candidate : candidates_)
      if (candidate >= limit) sum += weight_of(candidate);
    return sum;
  }

  // Of what is at least the limit and below the candidates.
  double below(float limit) const {
    double sum = 0.0;
    for (int64_t i = 0; i < size_; i += WIDTH) {
      const S::F scaled = scaled_logits(logits_, i, size_, temperature_);
      const S::F weight = S::exp(scaled - highest_);
      sum += S::sum((scaled >= limit) & (scaled < floor_) ? weight : S::F{});
    }
    return sum;
  }

  // The smallest candidate above which there is less than the goal.
  float border(float limit, double goal) {
    auto begin = candidates_.begin();
    const auto end = std::partition(begin, candidates_.end(), [&](float each) { return each >= limit; });
    double larger = 0.0;
    float found = highest_;
    for (float reach = STRIDE; begin != end; reach *= 2) {
      const auto next = std::partition(begin, end, [&](float each) { return each >= highest_ - reach; });
      std::sort(begin, next, std::greater<float>());
      for (; begin != next; ++begin) {
        if (larger >= goal) return found;
        found = *begin;
        larger += weight_of(found);
      }
    }
    return found;
  }

  const float* const logits_;
  const int64_t size_;
  const float temperature_;
  std::vector<float>& candidates_;
  float highest_, floor_, reach_;
};

inline void thresholds(const ThresholdsArgs& a, Team& team) {
  static thread_local std::vector<float> memory;
  const Range ours = team.share(a.count);
  for (int64_t i = ours.begin; i < ours.end; i++) {
    Threshold row(a.logits + a.rows[i] * a.size, a.size, (float)a.temperatures[i], memory);
    a.out[i] = row.find(a.top_k[i], a.top_p[i], a.log_min_p[i]);
  }
}
