// The C interface: kernels by name, and one function that runs a list of them.
//
// Each variant (generic.cpp, avx2.cpp, avx512.cpp, amx.cpp) is this file compiled for another instruction set. dtype is
// 0 float32, 1 bfloat16, 2 float16.
#pragma once

#include "amx.h"
#include "attention.h"
#include "draw.h"
#include "elementwise.h"
#include "halves.h"
#include "low_rank.h"
#include "quantised.h"
#include "step.h"
#include "team.h"

inline bool is_short(const void*) { return false; }
inline int64_t no_scratch(const void*, int) { return 0; }

template <class Args>
bool many_cells(const void* args) {
  return ((const Args*)args)->cells() > PARALLEL_CELLS;
}

// FUNCTION<T>(args, team), with T the storage type that the arguments name.
#define TYPED(Args, FUNCTION)                                \
  [](const void* args, Team& team) {                         \
    with_type(((const Args*)args)->dtype, [&](auto zero) {   \
      FUNCTION<decltype(zero)>(*(const Args*)args, team);    \
    });                                                      \
  }
#define PLAIN(Args, FUNCTION) [](const void* args, Team& team) { FUNCTION(*(const Args*)args, team); }

static const Kernel KERNELS[] = {
    {"attention", PLAIN(AttentionArgs, attend),
     [](const void* args) { return attention_is_long(*(const AttentionArgs*)args); },
     [](const void* args, int threads) { return attention_scratch(*(const AttentionArgs*)args, threads); }},
    {"write_kv", PLAIN(WriteKvArgs, write_kv), many_cells<WriteKvArgs>, no_scratch},
    {"rms_norm", TYPED(NormArgs, rms_norm), many_cells<NormArgs>, no_scratch},
    {"layer_norm", TYPED(NormArgs, layer_norm), many_cells<NormArgs>, no_scratch},
    {"norm_heads", TYPED(NormHeadsArgs, norm_heads), many_cells<NormHeadsArgs>, no_scratch},
    {"rotary", TYPED(RotaryArgs, rotary), many_cells<RotaryArgs>, no_scratch},
    {"gated", TYPED(GatedArgs, gated), many_cells<GatedArgs>, no_scratch},
    {"gelu", TYPED(GeluArgs, gelu), many_cells<GeluArgs>, no_scratch},
    {"softcap", PLAIN(SoftcapArgs, softcap), many_cells<SoftcapArgs>, no_scratch},
    {"add", TYPED(AddArgs, add), many_cells<AddArgs>, no_scratch},
    {"scale", TYPED(ScaleArgs, scale), many_cells<ScaleArgs>, no_scratch},
    {"add_low_rank", TYPED(LowRankArgs, add_low_rank), many_cells<LowRankArgs>, no_scratch},
    {"argmax", PLAIN(ArgmaxArgs, argmax), many_cells<ArgmaxArgs>, no_scratch},
    {"draw", PLAIN(DrawArgs, draw), many_cells<DrawArgs>, no_scratch},
    {"thresholds", PLAIN(ThresholdsArgs, thresholds), many_cells<ThresholdsArgs>, no_scratch},
    {"rows", PLAIN(RowsArgs, take_rows), many_cells<RowsArgs>, no_scratch},
    {"quantised_linear", PLAIN(QuantisedArgs, quantised_linear),
     [](const void* args) { return is_long_product(*(const QuantisedArgs*)args); },
     [](const void* args, int) { return quantised_scratch(*(const QuantisedArgs*)args); }},
    {"quantised_rows", PLAIN(QuantisedRowsArgs, quantised_rows), many_cells<QuantisedRowsArgs>, no_scratch},
    {"halves_linear", TYPED(HalvesArgs, halves_linear),
     [](const void* args) { return is_long_product(*(const HalvesArgs*)args); },
     [](const void* args, int threads) { return halves_scratch(*(const HalvesArgs*)args, threads); }},
    {"halves_rows", TYPED(HalvesRowsArgs, halves_rows), many_cells<HalvesRowsArgs>, no_scratch},
    {"step_tensors", PLAIN(StepArgs, step_tensors), is_short, no_scratch},
};

// All else stays in its variant: statics of the same name are not shared between them.
#pragma GCC visibility push(default)
extern "C" {

// Whether the operating system lets this process use what the processor has. To be asked before anything else.
int tailrace_may_run() {
#if HAS_TILES
  return ask_for_tiles();
#else
  return 1;
#endif
}

// A vector of keys lies in one block, so block_size must be a multiple of this.
int tailrace_vector_width() { return WIDTH; }

const Kernel* tailrace_kernel(const char* name) {
  for (const Kernel& kernel : KERNELS)
    if (!strcmp(kernel.name, name)) return &kernel;
  return nullptr;
}

void tailrace_run(const Call* calls, int64_t count, int threads, Pace* pace) { run_calls(calls, count, threads, pace); }
}
#pragma GCC visibility pop
