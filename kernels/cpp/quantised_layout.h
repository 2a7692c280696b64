// How quantised weights lie in memory, and what products with them are given.
#pragma once

#include <algorithm>

#include "activations.h"
#include "simd.h"
#include "team.h"

// Outputs that lie together. The weights of a tile are, group by group: the integers, TILE scales, TILE minimums.
constexpr int TILE = 16;
// How far ahead of the products weights are fetched, bytes.
constexpr int64_t AHEAD = 8192;

template <int BITS, int GROUP, bool HAS_MINIMUMS, class ScaleType>
struct TileLayout {
  using Scale = ScaleType;
  static constexpr int bits = BITS, group = GROUP;
  static constexpr bool has_minimums = HAS_MINIMUMS, has_zero = BITS == 8 && !HAS_MINIMUMS;
  static constexpr int64_t integer_bytes = (int64_t)TILE * GROUP * BITS / 8;
  static constexpr int64_t group_bytes = integer_bytes + TILE * sizeof(Scale) * (HAS_MINIMUMS ? 2 : 1);
};

// kernels/cpu_library.py declares the same.
struct QuantisedArgs {
  const uint8_t* tiles;  // [ceil(outputs / TILE), groups, bytes of a group]
  const float* x;        // [rows, size]
  float* out;            // [rows, outputs], rows `stride` apart
  int64_t rows, size, outputs, stride;
  int bits, group, has_minimums, wide_scales, activation_bits;
};

// Calls f with TileLayout's parameters, as a value of that type.
template <class Args, class Function>
void with_layout(const Args& a, Function f) {
  auto scaled = [&](auto scale) {
    using Scale = decltype(scale);
    if (a.bits == 4) return f(TileLayout<4, 32, true, Scale>{});
    if (a.group == 16) return f(TileLayout<8, 16, false, Scale>{});
    if (a.has_minimums) return f(TileLayout<8, 32, true, Scale>{});
    f(TileLayout<8, 32, false, Scale>{});
  };
  if (a.wide_scales) scaled(float{});
  else scaled(Float16{});
}

// The activations as integers, groups of rows shared out to the members; place(row) is where a row's first group belongs,
// and its numbers.
template <class Group, class Place>
void quantise_rows(const QuantisedArgs& a, Team& team, Place place) {
  const int64_t groups = a.size / Group::group;
  const Range ours = team.share(a.rows * groups);
  for (int64_t i = ours.begin; i < ours.end;) {
    const int64_t r = i / groups, first = i % groups, end = std::min(groups, first + ours.end - i);
    const auto [integers, numbers] = place(r);
    quantise_row<Group>(a.x + r * a.size, first, end, integers, numbers);
    i += end - first;
  }
  team.barrier();
}
