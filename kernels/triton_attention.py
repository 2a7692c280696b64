"""Paged attention for steps in which rows have any number of queries: prompts, pieces of prompts, and rows that draw.

A program has the queries of one KV head in one tile: all its query heads for some tokens of one row. It walks the
row's keys tile by tile through the block table (Dao 2023, "FlashAttention-2"), without a mask where all of its queries
see all keys. Tiles of keys begin at multiples of their size in the sequence: what a query gets depends neither on its
batch nor on how its prompt was cut into steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from kernels.reference import ReferenceOps
from kernels.triton_decode import INVARIANT_SPLITS, decode, num_splits
from kernels.triton_softmax import attend, begin, exponents, in_float16, load_tile

if TYPE_CHECKING:
    from kernels.gpu import Gpu


class Tiles(NamedTuple):
    """How a program is shaped."""

    rows: int
    """Queries times heads."""
    keys: int
    num_warps: int
    num_stages: int
    """Of the pipeline: half as many tiles of keys and of values are on their way, for their blocks are read before."""


def tiles(gpu: Gpu, padded_dim: int, dtype: torch.dtype, has_window: bool) -> Tiles:
    """By what fits into the registers and the shared memory of a block."""
    if dtype.itemsize == 4:
        return Tiles(16, 32 if padded_dim <= 128 else 16, 4, 3)
    if gpu.capability < 90:
        if padded_dim > 128:
            return Tiles(64, 32, 8, 3)
        return Tiles(128, 32 if padded_dim > 64 else 64, 8, 5)
    if padded_dim > 128:
        return Tiles(128, 32, 8, 3)
    return Tiles(128, 64, 8, 5) if has_window else Tiles(128, 128, 8, 3)


@triton.jit(do_not_specialize=["num_rows", "table_stride", "window"])
def attention_kernel(
    query,
    key_cache,
    value_cache,
    out,
    query_starts,
    seq_lens,
    block_tables,
    sinks,
    num_rows,
    query_stride,
    table_stride,
    window,
    inner,
    factor,
    value_scale,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """The grid is (KV heads, tiles). Tiles of row r begin at query_starts[r] // QUERIES + r: no two rows share one."""
    QUERIES: tl.constexpr = TILE_ROWS // GROUP
    kv_head = tl.program_id(0)
    # The last tokens of a prompt see most keys: they begin first, and what is left at the end is short.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    row, beyond = 0, num_rows
    while beyond - row > 1:
        middle = (row + beyond) // 2
        is_later = tl.load(query_starts + middle) // QUERIES + middle > tile
        row, beyond = tl.where(is_later, row, middle), tl.where(is_later, middle, beyond)
    row_start = tl.load(query_starts + row)
    num_queries = tl.load(query_starts + row + 1) - row_start
    first_query = (tile - row_start // QUERIES - row) * QUERIES
    if first_query >= num_queries:
        return
    members = tl.arange(0, TILE_ROWS)
    queries = first_query + members // GROUP
    heads = kv_head * GROUP + members % GROUP
    dims = tl.arange(0, PADDED_DIM)
    is_query = (queries < num_queries) & (members < QUERIES * GROUP)
    mask = is_query[:, None] & (dims < HEAD_DIM)[None, :]
    tokens = (row_start + queries).to(tl.int64)
    at = tokens[:, None] * query_stride + heads[:, None] * HEAD_DIM + dims[None, :]
    tile_query = tl.load(query + at, mask=mask, other=0.0)
    magnitudes = None
    if key_cache.dtype.element_ty == tl.float8e4nv and tile_query.dtype == tl.bfloat16:
        tile_query, magnitudes = in_float16(tile_query)

    # Keys first:newest + 1; of them low:high are seen by each query of the tile, and are whole tiles.
    before = tl.load(seq_lens + row) - num_queries
    positions = before + queries
    newest = before + min(first_query + QUERIES, num_queries) - 1
    first, low, oldest = 0, 0, 0
    if WINDOWED:
        oldest = max(before + first_query - window + 1, 0)
        first = oldest // TILE_KEYS * TILE_KEYS
        low = tl.cdiv(max(newest - window + 1, 0), TILE_KEYS) * TILE_KEYS
    high = max((before + first_query + 1) // TILE_KEYS * TILE_KEYS, low)

    table = block_tables + tl.cast(row, tl.int64) * table_stride
    maxima, sums = begin(sinks, heads, TILE_ROWS)
    weighted = tl.zeros([TILE_ROWS, PADDED_DIM], tl.float32)
    for part in tl.static_range(0 if WINDOWED else 1, 3):
        if part == 0:
            start, end = first, low
        elif part == 1:
            start, end = low, high
        else:
            start, end = high, newest + 1
        for tile_start in range(start, end, TILE_KEYS):
            keys = tile_start + tl.arange(0, TILE_KEYS)
            real = (keys >= oldest) & (keys <= newest)
            blocks = tl.load(table + keys // BLOCK_SIZE, mask=real, other=0)
            lines = (blocks.to(tl.int64) * KV_HEADS + kv_head) * BLOCK_SIZE + keys % BLOCK_SIZE
            cells = lines[:, None] * HEAD_DIM + dims[None, :]
            seen = keys[None, :] <= positions[:, None]
            if WINDOWED:
                seen &= keys[None, :] > positions[:, None] - window
            # Of keys that are not seen scores are replaced, whatever they are; their values' weight is zero.
            key = load_tile(key_cache, cells, None, dims, tile_query.dtype, HEAD_DIM, PADDED_DIM)
            value = load_tile(
                value_cache, cells, real if part != 1 else None, dims, tile_query.dtype, HEAD_DIM, PADDED_DIM
            )
            maxima, sums, weighted = attend(
                tile_query,
                magnitudes,
                key,
                value,
                seen,
                maxima,
                sums,
                weighted,
                inner,
                factor,
                CAPPED,
                part != 1,
            )
    at = (tokens[:, None] * (KV_HEADS * GROUP) + heads[:, None]) * HEAD_DIM + dims[None, :]
    # Padding has no keys.
    sums = tl.where(sums == 0.0, 1.0, sums)
    tl.store(out + at, (weighted * (value_scale / sums)[:, None]).to(out.dtype.element_ty), mask=mask)


class TritonAttention(ReferenceOps):
    """One kernel for rows of any number of queries, and one for steps in which each row has one."""

    gpu: Gpu
    batch_invariant: bool

    def attention(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        query_starts: torch.Tensor,
        seq_lens: torch.Tensor,
        block_tables: torch.Tensor,
        scale: float,
        sliding_window: int,
        softcap: float,
        sinks: torch.Tensor | None = None,
        key_scale: float = 1.0,
        value_scale: float = 1.0,
    ) -> torch.Tensor:
        tokens, heads, head_dim = query.shape
        rows, kv_heads, block_size = len(seq_lens), key_cache.shape[1], key_cache.shape[2]
        assert (query.stride(1), query.stride(2), block_tables.stride(1)) == (head_dim, 1, 1)
        assert all(x.is_contiguous() for x in (key_cache, value_cache, query_starts, seq_lens))
        out = torch.empty((tokens, heads, head_dim), dtype=query.dtype, device=query.device)
        inner, factor = exponents(scale * key_scale, softcap)
        if tokens == 0:
            return out
        if tokens == rows:
            splits = INVARIANT_SPLITS if self.batch_invariant else num_splits(rows, kv_heads, self.gpu.num_sms)
            decode(
                query,
                key_cache,
                value_cache,
                out,
                seq_lens,
                block_tables,
                sinks,
                sliding_window,
                softcap,
                inner,
                factor,
                value_scale,
                splits,
            )
            return out
        group = heads // kv_heads
        padded = max(16, triton.next_power_of_2(head_dim))
        shape = tiles(self.gpu, padded, query.dtype, sliding_window > 0)
        tile_rows = max(shape.rows, triton.next_power_of_2(group))
        attention_kernel[(kv_heads, tokens // (tile_rows // group) + rows)](
            query,
            key_cache,
            value_cache,
            out,
            query_starts,
            seq_lens,
            block_tables,
            sinks,
            rows,
            query.stride(0),
            block_tables.stride(0),
            sliding_window,
            inner,
            factor,
            value_scale,
            GROUP=group,
            KV_HEADS=kv_heads,
            HEAD_DIM=head_dim,
            BLOCK_SIZE=block_size,
            TILE_ROWS=tile_rows,
            TILE_KEYS=shape.keys,
            PADDED_DIM=padded,
            WINDOWED=sliding_window > 0,
            CAPPED=softcap > 0,
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
        )
        return out
