// AMX: eight tiles, of up to 16 rows of 64 bytes each, and their products.
//
// C += A * B, where a lane of C is four bytes: A is [rows, inputs], B [inputs / n, outputs, n], with n inputs in a
// lane: four bytes, or two bfloat16.
#pragma once

#include <cstdint>
#include <initializer_list>

#if defined(__AMX_INT8__) && defined(__AMX_BF16__)
#define HAS_TILES 1
#include <sys/syscall.h>
#include <unistd.h>

// The operating system keeps the tiles of a process's threads only if the process has asked for them.
inline bool ask_for_tiles() {
  constexpr long ASK = 0x1023, TILES = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, ASK, TILES) == 0;
}

struct TileShape {
  uint8_t rows = 16;
  uint16_t bytes = 64;  // of a row
};

// The shapes of this thread's tiles 0 and on, as long as this lives. What other code had in them is lost, and nothing
// is left to be saved when the thread is switched.
class Tiles {
 public:
  explicit Tiles(std::initializer_list<TileShape> shapes) {
    struct {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    int tile = 0;
    for (const TileShape& shape : shapes) {
      config.rows[tile] = shape.rows;
      config.bytes[tile++] = shape.bytes;
    }
    asm volatile("ldtilecfg %0" ::"m"(config));
  }
  ~Tiles() { asm volatile("tilerelease" ::: "memory"); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

// Rows are `stride` bytes apart.
template <int TILE_NUMBER>
inline void load_tile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(TILE_NUMBER), "r"(from), "r"(stride) : "memory");
}

template <int TILE_NUMBER>
inline void store_tile(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(TILE_NUMBER), "r"(to), "r"(stride) : "memory");
}

template <int TILE_NUMBER>
inline void clear_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(TILE_NUMBER));
}

// Bytes with a sign times bytes without, added up in 32 bits.
template <int C, int A, int B>
inline void multiply_bytes() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

// Bfloat16, added up in float32.
template <int C, int A, int B>
inline void multiply_bfloat16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
#else
inline bool ask_for_tiles() { return true; }
#endif
