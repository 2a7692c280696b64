// Team: the threads that carry out kernels together, and how a list of kernels is run on them.
//
// A kernel is a function of its arguments and of the team's member that calls it: each member does its share. All
// members are through with a kernel before any begins the next. So a whole list runs with threads woken once: in
// between they wait at a barrier, awake but not for long: where another process has a core, it gets the time. If a member
// that is kept from its core makes the list take longer than one thread does, one thread runs it for a while.
#pragma once

#include <omp.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>

#include "simd.h"

// Looks at a barrier before the time is given to whoever else wants it: about 20 microseconds.
constexpr int SPINS = 1 << 10;
using Clock = std::chrono::steady_clock;
// Nobody's share of a kernel of a list takes so much longer than another's: its thread does not run.
constexpr double STALL = 1e-3;
constexpr double PAUSE = 0.1;

inline double seconds() { return std::chrono::duration<double>(Clock::now().time_since_epoch()).count(); }

inline void pause_briefly() {
#if defined(__SSE2__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

struct Range {
  int64_t begin, end;
};

// What the members of a team share.
struct Shared {
  alignas(64) std::atomic<int64_t> next{0};
  alignas(64) std::atomic<int> arrived{0};
  alignas(64) std::atomic<int> round{0};
  std::atomic<bool> has_stalled{false};
  std::unique_ptr<char[]> memory;
  int64_t capacity = 0;

  void fit(int64_t bytes) {
    if (bytes <= capacity) return;
    memory.reset(new char[bytes + 64]);
    capacity = bytes;
  }
};

class Team {
 public:
  Team(Shared& shared, int member, int size) : shared_(shared), member_(member), size_(size) {}

  int size() const { return size_; }
  int member() const { return member_; }

  // This member's part of `count` things.
  Range share(int64_t count) const { return {count * member_ / size_, count * (member_ + 1) / size_}; }

  // The next `grain` of `count` things that no member has taken since the last barrier; empty at the end.
  Range take(int64_t count, int64_t grain) {
    if (size_ == 1) grain = count;
    const int64_t begin = shared_.next.load(std::memory_order_relaxed) >= count
                              ? count
                              : shared_.next.fetch_add(grain, std::memory_order_relaxed);
    return {std::min(begin, count), std::min(begin + grain, count)};
  }

  // Memory for all members, as much as the kernel's `scratch` says.
  char* memory() const { return (char*)(((uintptr_t)shared_.memory.get() + 63) & ~(uintptr_t)63); }

  void barrier() {
    if (size_ == 1) {
      shared_.next.store(0, std::memory_order_relaxed);
      return;
    }
    const int round = shared_.round.load(std::memory_order_relaxed);
    if (shared_.arrived.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
      shared_.arrived.store(0, std::memory_order_relaxed);
      shared_.next.store(0, std::memory_order_relaxed);
      shared_.round.store(round + 1, std::memory_order_release);
      return;
    }
    for (int i = 0; i < SPINS; i++) {
      if (shared_.round.load(std::memory_order_acquire) != round) return;
      pause_briefly();
    }
    const double start = seconds();
    while (shared_.round.load(std::memory_order_acquire) == round) sched_yield();
    if (seconds() - start > STALL) shared_.has_stalled.store(true, std::memory_order_relaxed);
  }

 private:
  Shared& shared_;
  const int member_, size_;
};

struct Kernel {
  const char* name;
  void (*run)(const void* args, Team& team);
  // Whether the work, alone, is longer than waking threads that sleep takes.
  bool (*is_long)(const void* args);
  // Bytes of Team::memory.
  int64_t (*scratch)(const void* args, int threads);
};

// kernels/cpu_library.py declares the same.
struct Call {
  const Kernel* kernel;
  const void* args;
};

// What is known of a list that is run again and again; in seconds, of a clock that only goes forward. Declared there too.
struct Pace {
  double alone = 0;        // how long it takes on one thread, about, or at most; 0 before anything is known
  double alone_until = 0;  // when several may try again
};

// One after the other, on `threads` threads. The threads are those of OpenMP: torch's. A list has a pace, a call has none.
inline void run_calls(const Call* calls, int64_t count, int threads, Pace* pace) {
  static thread_local Shared shared;
  const double start = pace ? seconds() : 0;
  if (pace ? start < pace->alone_until : !calls->kernel->is_long(calls->args)) threads = 1;
  for (int64_t i = 0; i < count; i++) shared.fit(calls[i].kernel->scratch(calls[i].args, threads));
  Shared* const ours = &shared;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    Team team(*ours, omp_get_thread_num(), omp_get_num_threads());
    for (int64_t i = 0; i < count; i++) {
      calls[i].kernel->run(calls[i].args, team);
      team.barrier();
    }
  }
  const bool has_stalled = shared.has_stalled.exchange(false, std::memory_order_relaxed);
  if (!pace) return;
  const double end = seconds(), took = end - start;
  if (threads == 1) pace->alone = pace->alone > 0 ? 0.75 * pace->alone + 0.25 * took : took;
  else if (!has_stalled && pace->alone == 0) pace->alone = threads * took;
  else if (has_stalled && took > pace->alone) pace->alone_until = end + PAUSE;
}
