"""Writes into the KV cache as models of 8 and of 70 billion parameters make them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tests.kernels.cross_compile import Launch, meta

if TYPE_CHECKING:
    from kernels.cuda import CudaOps

FP8 = torch.float8_e4m3fn


def write(
    ops: CudaOps,
    heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    pairs: int = 64,
    dtype: torch.dtype | None = None,
) -> None:
    """Without pairs nothing is turned. The cache's type is that of keys unless it is given."""
    merged = meta(64, heads + 2 * kv_heads, head_dim)
    key_shape, value_shape = ops.kv_cache_shapes(100, kv_heads, head_dim, 16)
    _, key, value = merged.split([heads, kv_heads, kv_heads], dim=1)
    angles = [meta(64, pairs, dtype=torch.float32) for _ in range(2)]
    slots = meta(64, dtype=torch.int64)
    caches = [meta(*shape, dtype=dtype or merged.dtype) for shape in (key_shape, value_shape)]
    if pairs:
        ops.rotate_and_write(merged, kv_heads, *angles, *caches, slots)
    else:
        ops.write_kv(key, value, *caches, slots)


LAUNCHES = {
    "rotate and write, 128": Launch(write),
    "rotate and write, 80 in part": Launch(lambda ops: write(ops, 32, 32, 80, 16)),
    "write, 96": Launch(lambda ops: write(ops, 32, 32, 96, 0)),
    "rotate, 256": Launch(lambda ops: ops.rotary(meta(64, 16, 256), *(meta(64, 128, dtype=torch.float32),) * 2)),
    "rotate and write, 128, fp8": Launch(lambda ops: write(ops, dtype=FP8), capabilities=(90,)),
}
