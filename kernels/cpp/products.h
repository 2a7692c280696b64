// How products of rows and weights are divided: among threads, and into blocks of rows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

// Below so many products, waking threads that sleep costs more than it saves.
constexpr int64_t PARALLEL_PRODUCTS = 1 << 23;
// As many are taken by a thread at a time, about.
constexpr int64_t GRAIN_PRODUCTS = 1 << 23;

template <class Args>
bool is_long_product(const Args& a) {
  return a.rows * a.outputs * a.size > PARALLEL_PRODUCTS;
}

// With up to so many rows it is the weights that take time, to come from memory.
constexpr int64_t FEW_ROWS = 8;

// How many of `count` pieces of work a thread takes at a time, of up to `products` each; of the weights of few rows
// much, since memory is faster where it is read on and on.
inline int64_t grain_of(int64_t rows, int64_t count, int64_t products, int threads) {
  const int64_t most = GRAIN_PRODUCTS / std::max<int64_t>(1, products);
  const int times = rows <= FEW_ROWS ? 2 : 8;
  return std::max<int64_t>(1, std::min(most, count / (times * threads)));
}

// Calls f(count, first row), with a constant for a count, for the rows [begin, end): blocks of MOST, and what is left in
// smaller ones.
template <int MOST, class Function>
__attribute__((always_inline)) inline void for_blocks(int64_t begin, int64_t end, Function f) {
  for (; begin + MOST <= end; begin += MOST) f(std::integral_constant<int, MOST>{}, begin);
  if constexpr (MOST > 8)
    if (begin + 8 <= end) f(std::integral_constant<int, 8>{}, begin), begin += 8;
  if constexpr (MOST > 4)
    if (begin + 4 <= end) f(std::integral_constant<int, 4>{}, begin), begin += 4;
  if (begin + 2 <= end) f(std::integral_constant<int, 2>{}, begin), begin += 2;
  if (begin < end) f(std::integral_constant<int, 1>{}, begin);
}
