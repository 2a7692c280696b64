// Products with quantised weights for many rows, by AMX: the same bits as those of quantised.h.
//
// For each group AMX makes the sums of a block of 16 rows times two tiles of weights, and vectors scale them and add
// them to the totals. Sums of four-bit weights are below 2^24, so float32 holds them exactly: weights and activations
// are bfloat16, and both planes of an activation add up in one sum. Eight-bit weights stay bytes, and each plane has
// its sum.
//
// The order of work: a few groups, and for them all rows of a chunk. So these groups' weights are unpacked once, and
// they, the sums and the chunk's totals stay in half of the first cache: the core's other thread has the other half.
#pragma once

#include "amx.h"

#if HAS_TILES
#include <algorithm>
#include <utility>

#include "products.h"
#include "quantised_layout.h"
#include "team.h"

// Rows that are multiplied together, blocks of a chunk, tiles of weights beside each other, groups at a time.
constexpr int BLOCK_ROWS = 16, CHUNK_BLOCKS = 4, PAIR = 2, FEW_GROUPS = 2;
// For fewer rows vectors alone are faster.
constexpr int64_t AMX_ROWS = 12;

// A group of a block of rows, as AMX takes it: [planes, rows, inputs].
template <class Layout, int ACTIVATION_BITS>
struct GroupOfBlock {
  static constexpr int group = Layout::group, bits = ACTIVATION_BITS, planes = ACTIVATION_BITS / 8;
  static constexpr bool are_floats = Layout::bits == 4;
  static constexpr float largest = GroupOf<group, bits>::largest;
  static constexpr int row_bytes = group * (are_floats ? 2 : 1), plane_bytes = row_bytes * BLOCK_ROWS;
  static constexpr int bytes = planes * plane_bytes, numbers_stride = BLOCK_ROWS;
  // Rows of a tile with a group's weights, and sums for each row and output.
  static constexpr int weight_rows = row_bytes / 4, num_sums = are_floats ? 1 : planes;

  // The integers of inputs i to i + WIDTH of a row.
  static void store(int i, Simd<WIDTH>::I q, int8_t* to) {
    if constexpr (planes == 1) {
      store_plane(i, q, to);
    } else {
      const Simd<WIDTH>::I high = (q + 128) >> 8;
      store_plane(i, are_floats ? high << 8 : high, to);
      store_plane(i, q - (high << 8), to + plane_bytes);
    }
  }

 private:
  static void store_plane(int i, Simd<WIDTH>::I q, int8_t* to) {
    if constexpr (are_floats) {
      // In the order of unpack_floats. Eight bits of an integer fit.
      const __m256i order = _mm256_setr_epi16(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
      const __m256i words = _mm512_cvtepi32_epi16(_mm512_srli_epi32((__m512i)to_float(q), 16));
      _mm256_storeu_si256((__m256i*)(to + 2 * i), _mm256_permutexvar_epi16(order, words));
    } else {
      store_bytes(q, to + i);
    }
  }
};

// Four-bit weights of a group as bfloat16: of eight inputs 0 2, 4 6, 1 3, 5 7 are pairs.
inline void unpack_floats(const uint8_t* from, int eights, __m512i* to) {
  // By five bits of a word, of which the highest belongs to the next weight.
  alignas(64) static constexpr uint16_t TABLE[32] = {
      0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120,
      0x4130, 0x4140, 0x4150, 0x4160, 0x4170, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0,
      0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};
  const __m512i table = _mm512_load_si512(TABLE);
  for (int i = 0; i < eights; i++, to += 4) {
    const __m512i bytes = _mm512_loadu_si512(from + 64 * i);
    to[0] = _mm512_permutexvar_epi16(bytes, table);
    to[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(bytes, 4), table);
    to[2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(bytes, 8), table);
    to[3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(bytes, 12), table);
  }
}

// What a thread multiplies at a time: two tiles of weights, the first of which is `tile`, with the chunk of rows that
// begins at first_row. Where only the second is wanted, the first is not written.
template <class Layout, class Group>
class ChunkProduct {
  using S = Simd<16>;
  static constexpr int PART = 4;  // rows whose totals are in registers

  const QuantisedArgs& a_;
  const int64_t num_groups_ = a_.size / Layout::group;
  alignas(64) __m512i weights_[FEW_GROUPS][PAIR][Group::weight_rows];
  alignas(64) S::F scales_[FEW_GROUPS][PAIR], minimums_[FEW_GROUPS][PAIR];
  alignas(64) S::I sums_[FEW_GROUPS][PAIR][Group::num_sums][BLOCK_ROWS];
  alignas(64) S::F totals_[CHUNK_BLOCKS * BLOCK_ROWS][PAIR];

 public:
  explicit ChunkProduct(const QuantisedArgs& a) : a_(a) {}

  // The chunk's activations are at x: [blocks, groups, Group], and their numbers [blocks, groups, rows of a block].
  void run(int64_t tile, int first_wanted, int64_t first_row, const int8_t* x, const GroupNumbers* numbers) {
    const int64_t rows = std::min<int64_t>(CHUNK_BLOCKS * BLOCK_ROWS, a_.rows - first_row);
    for (int64_t first = 0; first < num_groups_; first += FEW_GROUPS) {
      const int count = (int)std::min<int64_t>(FEW_GROUPS, num_groups_ - first);
      for (int t = 0; t < PAIR; t++) unpack(tile + t, t, first, count);
      for (int64_t row = 0; row < rows; row += BLOCK_ROWS) {
        const int64_t group = row / BLOCK_ROWS * num_groups_ + first;
        for (int g = 0; g < count; g++) multiply(x + (group + g) * Group::bytes, g);
        for (int64_t part = row; part < std::min(rows, row + BLOCK_ROWS); part += PART)
          add(part, numbers + group * BLOCK_ROWS + part % BLOCK_ROWS, first, count);
      }
    }
    for (int64_t row = 0; row < rows; row++)
      for (int t = first_wanted; t < PAIR; t++) {
        const int64_t output = (tile + t) * TILE, count = std::min<int64_t>(TILE, a_.outputs - output);
        float* const out = a_.out + (first_row + row) * a_.stride + output;
        _mm512_mask_storeu_ps(out, (__mmask16)((1 << count) - 1), (__m512)totals_[row][t]);
      }
  }

 private:
  void unpack(int64_t tile, int t, int64_t first, int count) {
    const uint8_t* from = a_.tiles + (tile * num_groups_ + first) * Layout::group_bytes;
    for (int g = 0; g < count; g++, from += Layout::group_bytes) {
#pragma GCC unroll 16
      for (int i = 0; i < Layout::group_bytes; i += 64) fetch(from + AHEAD + i);
      if constexpr (Group::are_floats) unpack_floats(from, Layout::group / 8, weights_[g][t]);
      else memcpy(weights_[g][t], from, Layout::integer_bytes);
      const auto* scales = (const typename Layout::Scale*)(from + Layout::integer_bytes);
      scales_[g][t] = S::load(scales);
      if constexpr (Layout::has_minimums) minimums_[g][t] = S::load(scales + TILE);
    }
  }

  // The sums of group g. Tiles 0 to 3 are sums, 4 and 5 activations, 6 and 7 weights.
  __attribute__((always_inline)) void multiply(const int8_t* x, int g) {
    auto& sums = sums_[g];
    load_tile<4>(x, Group::row_bytes);
    load_tile<6>(weights_[g][0], 64);
    load_tile<7>(weights_[g][1], 64);
    clear_tile<0>();
    clear_tile<1>();
    if constexpr (Group::are_floats) {
      multiply_bfloat16<0, 4, 6>();
      multiply_bfloat16<1, 4, 7>();
      if constexpr (Group::planes == 2) {
        load_tile<5>(x + Group::plane_bytes, Group::row_bytes);
        multiply_bfloat16<0, 5, 6>();
        multiply_bfloat16<1, 5, 7>();
      }
    } else {
      multiply_bytes<0, 4, 6>();
      multiply_bytes<1, 4, 7>();
      if constexpr (Group::planes == 2) {
        load_tile<5>(x + Group::plane_bytes, Group::row_bytes);
        clear_tile<2>();
        clear_tile<3>();
        multiply_bytes<2, 5, 6>();
        multiply_bytes<3, 5, 7>();
        store_tile<2>(sums[0][1], 64);
        store_tile<3>(sums[1][1], 64);
      }
    }
    store_tile<0>(sums[0][0], 64);
    store_tile<1>(sums[1][0], 64);
  }

  // To the totals of the chunk's rows from `row` the sums of `count` groups, in order; numbers are of the first.
  __attribute__((always_inline)) void add(int64_t row, const GroupNumbers* numbers, int64_t first, int count) {
    auto* const totals = totals_ + row;
    typename S::F total[PART][PAIR];
#pragma GCC unroll 4
    for (int r = 0; r < PART; r++)
#pragma GCC unroll 2
      for (int t = 0; t < PAIR; t++) total[r][t] = first ? totals[r][t] : typename S::F{};
    for (int g = 0; g < count; g++, numbers += BLOCK_ROWS) {
#pragma GCC unroll 4
      for (int r = 0; r < PART; r++)
#pragma GCC unroll 2
        for (int t = 0; t < PAIR; t++) {
          const GroupNumbers& n = numbers[r];
          const auto* sums = &sums_[g][t][0][row % BLOCK_ROWS + r];
          typename S::F sum;
          if constexpr (Group::are_floats) {
            sum = (typename S::F)sums[0];
          } else {
            typename S::I all = Group::planes == 2 ? (sums[0] << 8) + sums[BLOCK_ROWS] : sums[0];
            if constexpr (Layout::has_zero) all += n.offset;
            sum = to_float(all);
          }
          total[r][t] += sum * (scales_[g][t] * n.scale);
          if constexpr (Layout::has_minimums) total[r][t] += minimums_[g][t] * n.sum;
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < PART; r++)
#pragma GCC unroll 2
      for (int t = 0; t < PAIR; t++) totals[r][t] = total[r][t];
  }
};

inline bool by_amx(const QuantisedArgs& a) { return a.rows >= AMX_ROWS && a.outputs > TILE; }

inline int64_t amx_scratch(const QuantisedArgs& a) {
  const int64_t rows = (a.rows + BLOCK_ROWS - 1) / BLOCK_ROWS * BLOCK_ROWS;
  const int64_t bytes = a.activation_bits / 8 * (a.bits == 4 ? 2 : 1);
  return rows * a.size * bytes + rows * (a.size / a.group) * sizeof(GroupNumbers);
}

template <class Layout, int ACTIVATION_BITS>
void linear_by_amx(const QuantisedArgs& a, Team& team) {
  using Group = GroupOfBlock<Layout, ACTIVATION_BITS>;
  const int64_t groups = a.size / Layout::group, num_tiles = (a.outputs + TILE - 1) / TILE;
  const int64_t num_blocks = (a.rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
  int8_t* const integers = (int8_t*)team.memory();
  auto* const numbers = (GroupNumbers*)(integers + num_blocks * groups * Group::bytes);
  quantise_rows<Group>(a, team, [&](int64_t r) {
    const int64_t group = r / BLOCK_ROWS * groups, row = r % BLOCK_ROWS;
    return std::pair(integers + group * Group::bytes + row * Group::row_bytes, numbers + group * BLOCK_ROWS + row);
  });
  constexpr TileShape sums, activations{BLOCK_ROWS, Group::row_bytes}, weights{Group::weight_rows};
  const Tiles tiles({sums, sums, sums, sums, activations, activations, weights, weights});
  ChunkProduct<Layout, Group> product(a);
  const int64_t num_pairs = (num_tiles + PAIR - 1) / PAIR, num_chunks = (num_blocks + CHUNK_BLOCKS - 1) / CHUNK_BLOCKS;
  const int64_t count = num_pairs * num_chunks, rows = std::min<int64_t>(a.rows, CHUNK_BLOCKS * BLOCK_ROWS);
  const int64_t grain = grain_of(a.rows, count, rows * a.size * TILE * PAIR, team.size());
  for (Range range; (range = team.take(count, grain)).begin < range.end;)
    for (int64_t i = range.begin; i < range.end; i++) {
      const int64_t chunk = i / num_pairs, block = chunk * CHUNK_BLOCKS;
      // The last tile of an odd number is multiplied beside one that another pair has.
      const int64_t tile = std::min(i % num_pairs * PAIR, num_tiles - PAIR);
      const int first_wanted = (int)(i % num_pairs * PAIR - tile);
      product.run(tile, first_wanted, block * BLOCK_ROWS, integers + block * groups * Group::bytes,
                  numbers + block * groups * BLOCK_ROWS);
    }
}
#endif
