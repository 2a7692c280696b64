"""Batches for paged attention, whose caches hold numbers only where rows have keys that they see."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from kernels.reference import FP8, ReferenceOps

CPU = torch.device("cpu")
SHORT, WIDE, EXACT = torch.float16, torch.bfloat16, torch.float32
HEAD_SHAPES = [
    (16, 4, 4, 16, EXACT),
    (32, 8, 1, 32, SHORT),
    (64, 9, 3, 16, WIDE),
    (80, 2, 2, 32, WIDE),
    (80, 8, 1, 16, EXACT),
    (96, 4, 1, 16, SHORT),
    (128, 8, 1, 32, WIDE),
    (128, 20, 1, 16, EXACT),
    (256, 8, 2, 16, WIDE),
    (256, 3, 1, 32, EXACT),
]
"""For kernels of GPUs: head_dim, heads, kv_heads, block_size, dtype."""


@dataclass(frozen=True)
class Batch:
    """Rows of queries over a cache that is NaN where no row looks. Keys lie as the twin has them, dimension by
    dimension, until they are laid out for others."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    query_starts: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    window: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    key_scale: float = 1.0
    value_scale: float = 1.0

    def run(self, ops: ReferenceOps) -> torch.Tensor:
        return self.laid_out_for(ops).attend(ops)

    def laid_out_for(self, ops: ReferenceOps) -> Batch:
        """With keys as ops want them: those of GPUs lie token by token."""
        if ops.kv_cache_shapes(1, 1, 64, 16)[0] == (1, 1, 64, 16):
            return self
        return replace(self, key_cache=self.key_cache.transpose(2, 3).contiguous())

    def attend(self, ops: ReferenceOps) -> torch.Tensor:
        """Of a batch that is laid out for ops."""
        return ops.attention(
            self.query,
            self.key_cache,
            self.value_cache,
            self.query_starts,
            self.seq_lens,
            self.block_tables,
            1 / math.sqrt(self.query.shape[-1]),
            self.window,
            self.softcap,
            self.sinks,
            self.key_scale,
            self.value_scale,
        )

    def in_eight_bits(self, key_scale: float, value_scale: float) -> Batch:
        """The cache holds what it held, divided by the scales, as float8_e4m3fn."""
        return replace(
            self,
            key_cache=(self.key_cache.float() / key_scale).to(FP8),
            value_cache=(self.value_cache.float() / value_scale).to(FP8),
            key_scale=key_scale,
            value_scale=value_scale,
        )

    def part(self, row: int, first: int, end: int) -> Batch:
        """Queries first:end of one row, as a step that computes only them would see them."""
        start, stop = self.query_starts[row : row + 2].tolist()
        return replace(
            self,
            query=self.query[start + first : start + end],
            query_starts=torch.tensor([0, end - first], dtype=torch.int32),
            seq_lens=self.seq_lens[row : row + 1] - (stop - start - end),
            block_tables=self.block_tables[row : row + 1].clone(),
        )


def make_batch(
    rows: list[tuple[int, int]],
    heads: int = 6,
    kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    window: int = 0,
    softcap: float = 0.0,
    has_sinks: bool = False,
    seed: int = 0,
    device: torch.device = CPU,
) -> Batch:
    """Each row is (queries, keys); the block tables are wider than they need be and hold nonsense there."""
    generator = torch.Generator(device).manual_seed(seed)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, device=device, generator=generator)

    def int32s(numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    blocks_of = [-(-length // block_size) for _, length in rows]
    num_blocks = sum(blocks_of) + 1
    key_shape, value_shape = ReferenceOps().kv_cache_shapes(num_blocks, kv_heads, head_dim, block_size)
    key_cache, value_cache = (
        torch.full(shape, torch.nan, dtype=cache_dtype or dtype, device=device) for shape in (key_shape, value_shape)
    )
    tables = torch.full((len(rows), max(blocks_of) + 2), 2**30, dtype=torch.int32, device=device)
    free = torch.randperm(num_blocks - 1, device=device, generator=generator) + 1
    for row, (queries, length) in enumerate(rows):
        blocks, free = free[: blocks_of[row]], free[blocks_of[row] :]
        tables[row, : len(blocks)] = blocks
        positions = torch.arange(length, device=device)
        slots = blocks[positions // block_size] * block_size + positions % block_size
        if window:
            slots[: max(0, length - queries - window + 1)] = -1
        keys, values = (random(length, kv_heads, head_dim).to(dtype) for _ in range(2))
        ReferenceOps().write_kv(keys, values, key_cache, value_cache, slots)
    starts = [0, *accumulate(queries for queries, _ in rows)]
    # A slice of a wider tensor, as the query of a merged projection is.
    query = random(starts[-1], heads + 2 * kv_heads, head_dim).to(dtype)[:, :heads]
    lengths = int32s([length for _, length in rows])
    sinks = random(heads) + 2 if has_sinks else None
    return Batch(query, key_cache, value_cache, int32s(starts), lengths, tables, window, softcap, sinks)
