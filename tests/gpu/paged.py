"""PagedProblem: queries, and a KV cache in which the keys of each row lie in blocks anywhere, for a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kernels.ops import Ops


@dataclass(frozen=True, slots=True)
class PagedProblem:
    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    query_starts: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    scale: float
    cache_scales: tuple[float, float]
    """Of keys and of values."""

    def attend(
        self, ops: Ops, window: int = 0, softcap: float = 0.0, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[tokens, heads, head_dim]."""
        return ops.attention(
            self.query,
            self.key_cache,
            self.value_cache,
            self.query_starts,
            self.seq_lens,
            self.block_tables,
            self.scale,
            window,
            softcap,
            sinks,
            *self.cache_scales,
        )


def paged_problem(
    ops: Ops,
    device: torch.device,
    dtype: torch.dtype,
    query_lens: list[int],
    seq_lens: list[int],
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int = 16,
    cache_dtype: torch.dtype | None = None,
) -> PagedProblem:
    """Random numbers; what is no row's is NaN. Row r has query_lens[r] queries, the last of its seq_lens[r] tokens."""
    generator = torch.Generator(device).manual_seed(len(seq_lens) + head_dim)
    counts = [-(-length // block_size) for length in seq_lens]
    num_blocks = 1 + sum(counts)
    order = 1 + torch.randperm(num_blocks - 1)
    tables = torch.zeros(len(seq_lens), max(counts), dtype=torch.int32)
    slots: list[torch.Tensor] = []
    first = 0
    for row, (count, length) in enumerate(zip(counts, seq_lens, strict=True)):
        blocks = order[first : first + count]
        tables[row, :count] = blocks
        positions = torch.arange(length)
        slots.append(blocks[positions // block_size] * block_size + positions % block_size)
        first += count

    def random(tokens: int, of: int) -> torch.Tensor:
        return torch.randn(tokens, of, head_dim, device=device, generator=generator).to(dtype)

    key_shape, value_shape = ops.kv_cache_shapes(num_blocks, kv_heads, head_dim, block_size)
    key_cache, value_cache = (
        torch.full(shape, torch.nan, device=device).to(cache_dtype or dtype) for shape in (key_shape, value_shape)
    )
    total, scales = sum(seq_lens), (1.0, 1.0) if cache_dtype is None else (0.02, 0.01)
    key, value = random(total, kv_heads), random(total, kv_heads)
    ops.write_kv(key, value, key_cache, value_cache, torch.cat(slots).to(device), *scales)
    starts = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return PagedProblem(
        random(sum(query_lens), heads),
        key_cache,
        value_cache,
        starts.to(device),
        torch.tensor(seq_lens, dtype=torch.int32, device=device),
        tables.to(device),
        head_dim**-0.5,
        scales,
    )
