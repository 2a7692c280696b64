// The C interface: raw pointers and sizes; dtype is 0 float32, 1 bfloat16, 2 float16.
//
// Each variant (generic.cpp, avx2.cpp, avx512.cpp) is this file compiled for another instruction set.
#pragma once

#include "attention.h"
#include "elementwise.h"
#include "quantised.h"

extern "C" {

// A vector of keys lies in one block, so block_size must be a multiple of this.
int tailrace_vector_width() { return WIDTH; }

void tailrace_attention(int dtype, const AttentionArgs* args) {
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    attend<T, WIDTH>(*args);
  });
}

void tailrace_write_kv(int dtype, const void* key, const void* value, void* key_cache, void* value_cache,
                       const int64_t* slots, int64_t tokens, int64_t key_stride, int64_t value_stride, int kv_heads,
                       int head_dim, int block_size, int threads) {
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    write_kv((const T*)key, (const T*)value, (T*)key_cache, (T*)value_cache, slots, tokens, key_stride, value_stride,
             kv_heads, head_dim, block_size, threads);
  });
}

void tailrace_rms_norm(int dtype, const void* x, void* residual, const float* weight, void* out, int64_t tokens,
                       int64_t size, float eps, int threads) {
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    rms_norm((const T*)x, (T*)residual, weight, (T*)out, tokens, size, eps, threads);
  });
}

void tailrace_layer_norm(int dtype, const void* x, void* residual, const float* weight, const float* bias, void* out,
                         int64_t tokens, int64_t size, float eps, int threads) {
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    layer_norm((const T*)x, (T*)residual, weight, bias, (T*)out, tokens, size, eps, threads);
  });
}

void tailrace_norm_heads(int dtype, void* x, const float* weight, int64_t tokens, int64_t stride, int heads,
                         int head_dim, float eps, int threads) {
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    norm_heads((T*)x, weight, tokens, stride, heads, head_dim, eps, threads);
  });
}

void tailrace_rotary(int dtype, void* x, const float* cosines, const float* sines, int64_t tokens, int64_t stride,
                     int heads, int head_dim, int rotated, int threads) {
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    rotary((T*)x, cosines, sines, tokens, stride, heads, head_dim, rotated, threads);
  });
}

void tailrace_gated(int dtype, int activation, const void* x, void* out, int64_t tokens, int64_t size, int threads) {
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    (activation == SILU ? gated<SILU, T> : gated<GELU, T>)((const T*)x, (T*)out, tokens, size, threads);
  });
}

void tailrace_gelu(int dtype, const void* x, void* out, int64_t cells, int threads) {
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    gelu((const T*)x, (T*)out, cells, threads);
  });
}

void tailrace_quantised_linear(const QuantisedArgs* args) {
  with_layout(*args, [&](auto layout) { quantised_linear<decltype(layout)>(*args); });
}

void tailrace_softcap(float* x, int64_t cells, float cap, int threads) { softcap(x, cells, cap, threads); }
}
