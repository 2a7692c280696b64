"""Attention of prompts and of steps in which each row has one query, at head sizes that models have."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tests.kernels.cross_compile import Launch, meta

if TYPE_CHECKING:
    from kernels.cuda import CudaOps

FP8 = torch.float8_e4m3fn


def attend(
    ops: CudaOps,
    tokens: int,
    head_dim: int,
    heads: int = 32,
    kv_heads: int = 8,
    window: int = 0,
    softcap: float = 0.0,
    has_sinks: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
    block_size: int = 16,
) -> None:
    """64 rows; with as many tokens each has one."""
    query = meta(tokens, heads + 2 * kv_heads, head_dim, dtype=dtype)[:, :heads]
    caches = [
        meta(*shape, dtype=cache_dtype or dtype) for shape in ops.kv_cache_shapes(100, kv_heads, head_dim, block_size)
    ]
    indices = [meta(*size, dtype=torch.int32) for size in ((65,), (64,), (64, 257))]
    sinks = meta(heads, dtype=torch.float32) if has_sinks else None
    ops.attention(query, *caches, *indices, head_dim**-0.5, window, softcap, sinks)


WGMMA = frozenset({"attention_kernel"})
LAUNCHES = {
    "prompt, 64": Launch(lambda ops: attend(ops, 999, 64), wgmma=WGMMA),
    "prompt, 80": Launch(lambda ops: attend(ops, 999, 80, 32, 32), wgmma=WGMMA),
    "prompt, 128": Launch(lambda ops: attend(ops, 999, 128), wgmma=WGMMA),
    "prompt, 128, fp16, blocks of 32": Launch(
        lambda ops: attend(ops, 999, 128, dtype=torch.float16, block_size=32), wgmma=WGMMA
    ),
    "prompt, 128, window and sinks": Launch(
        lambda ops: attend(ops, 999, 128, 64, window=4096, has_sinks=True), wgmma=WGMMA
    ),
    "prompt, 128, fp8 cache": Launch(
        lambda ops: attend(ops, 999, 128, cache_dtype=FP8), capabilities=(90,), wgmma=WGMMA
    ),
    "prompt, 256, window and cap": Launch(
        lambda ops: attend(ops, 999, 256, 8, 4, window=4096, softcap=50.0), wgmma=WGMMA
    ),
    "prompt, 128, float32": Launch(lambda ops: attend(ops, 999, 128, dtype=torch.float32), capabilities=(90,)),
    "one query each, 64": Launch(lambda ops: attend(ops, 64, 64, 9, 3)),
    "one query each, 128": Launch(lambda ops: attend(ops, 64, 128)),
    "one query each, 128, fp8 cache": Launch(lambda ops: attend(ops, 64, 128, cache_dtype=FP8), capabilities=(90,)),
    "one query each, 256, window and cap": Launch(lambda ops: attend(ops, 64, 256, 8, 4, window=4096, softcap=50.0)),
    "one query each, 128, float32": Launch(lambda ops: attend(ops, 64, 128, dtype=torch.float32), capabilities=(90,)),
}
