"""Paged attention for steps in which each row has one query: what limits it is reading the cache once.

A row's keys are split over programs, which read them side by side ("Flash-Decoding", Dao et al. 2023), and a second
kernel merges what they found. The grid depends on shapes alone and lengths are read on the device, so that a graph can
be captured. Splits are whole tiles of keys, at least MIN_TILES, as evenly as that goes; where a row has fewer tiles,
the last splits are empty and end at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton_softmax import attend, begin, in_float16, load_tile

PROGRAMS_PER_SM = 8
"""Enough to hide that some end later than others."""
MIN_SPLITS, MAX_SPLITS = 4, 64
"""At least so many that one long row among short ones does not keep the rest waiting."""
MIN_TILES = 2
INVARIANT_SPLITS = 8
"""Of the mode in which what a row gets may not depend on the rows beside it."""
TILE_BYTES = 16 * 1024
"""Keys of one tile."""
NUM_STAGES = 5
"""So that two tiles of keys and of values are on their way: their blocks are read two stages before."""


def num_splits(rows: int, kv_heads: int, num_sms: int) -> int:
    """Parts that each row's keys are read in: enough to fill the device, a power of two. rows has the padding in it."""
    wanted = triton.cdiv(PROGRAMS_PER_SM * num_sms, rows * kv_heads)
    return min(max(triton.next_power_of_2(wanted), MIN_SPLITS), MAX_SPLITS)


def tile_keys(padded_dim: int, itemsize: int) -> int:
    return min(max(TILE_BYTES // (padded_dim * itemsize), 16), 128)


@triton.jit
def _splits_used(length, window, NUM_SPLITS: tl.constexpr, TILE_KEYS: tl.constexpr, MIN_TILES: tl.constexpr):
    """(first key, keys in a split, splits with keys) of a row; keys in a split are whole tiles."""
    first = 0
    if window > 0:
        first = max(length - window, 0) // TILE_KEYS * TILE_KEYS
    num_tiles = tl.cdiv(length - first, TILE_KEYS)
    size = max(tl.cdiv(num_tiles, NUM_SPLITS), MIN_TILES)
    return first, size * TILE_KEYS, tl.cdiv(num_tiles, size)


@triton.jit(do_not_specialize=["table_stride", "window"])
def decode_kernel(
    query,
    key_cache,
    value_cache,
    partial,
    maxima_out,
    sums_out,
    seq_lens,
    block_tables,
    query_stride,
    table_stride,
    window,
    inner,
    factor,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    MIN_TILES: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """The grid is (KV heads, splits, rows). A split that has keys leaves its state in partial
    [rows, heads, splits, PADDED_DIM], maxima_out and sums_out [rows, heads, splits]."""
    kv_head, split, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(seq_lens + row)
    first, size, used = _splits_used(length, window, NUM_SPLITS, TILE_KEYS, MIN_TILES)
    if split >= used:
        return
    start = first + split * size
    end = min(start + size, length)
    oldest = 0
    if window > 0:
        oldest = max(length - window, 0)
    members = tl.arange(0, TILE_ROWS)
    heads = kv_head * GROUP + members
    dims = tl.arange(0, PADDED_DIM)
    is_head = members < GROUP
    at = row.to(tl.int64) * query_stride + heads[:, None] * HEAD_DIM + dims[None, :]
    tile_query = tl.load(query + at, mask=is_head[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    magnitudes = None
    if key_cache.dtype.element_ty == tl.float8e4nv and tile_query.dtype == tl.bfloat16:
        tile_query, magnitudes = in_float16(tile_query)
    table = block_tables + row.to(tl.int64) * table_stride
    maxima, sums = begin(None, heads, TILE_ROWS)
    weighted = tl.zeros([TILE_ROWS, PADDED_DIM], tl.float32)
    for tile_start in range(start, end, TILE_KEYS):
        keys = tile_start + tl.arange(0, TILE_KEYS)
        real = (keys >= oldest) & (keys < end)
        blocks = tl.load(table + keys // BLOCK_SIZE, mask=real, other=0)
        lines = (blocks.to(tl.int64) * KV_HEADS + kv_head) * BLOCK_SIZE + keys % BLOCK_SIZE
        cells = lines[:, None] * HEAD_DIM + dims[None, :]
        key = load_tile(key_cache, cells, real, dims, tile_query.dtype, HEAD_DIM, PADDED_DIM)
        value = load_tile(value_cache, cells, real, dims, tile_query.dtype, HEAD_DIM, PADDED_DIM)
        maxima, sums, weighted = attend(
            tile_query, magnitudes, key, value, real[None, :], maxima, sums, weighted, inner, factor, CAPPED, True
        )
    places = (row.to(tl.int64) * (KV_HEADS * GROUP) + heads) * NUM_SPLITS + split
    tl.store(partial + places[:, None] * PADDED_DIM + dims[None, :], weighted, mask=is_head[:, None])
    tl.store(maxima_out + places, maxima, mask=is_head)
    tl.store(sums_out + places, sums, mask=is_head)


@triton.jit(do_not_specialize=["window"])
def merge_kernel(
    partial,
    maxima,
    sums,
    out,
    seq_lens,
    sinks,
    window,
    value_scale,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    MIN_TILES: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    """The grid is (heads, rows). A row without keys gets zeros."""
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    _, _, used = _splits_used(tl.load(seq_lens + row), window, NUM_SPLITS, TILE_KEYS, MIN_TILES)
    splits = tl.arange(0, NUM_SPLITS)
    dims = tl.arange(0, PADDED_DIM)
    is_used = splits < used
    places = (row * HEADS + head) * NUM_SPLITS + splits
    parts = tl.load(maxima + places, mask=is_used, other=float("-inf"))
    largest, total = begin(sinks, head + tl.zeros([1], tl.int32), 1)
    base = tl.maximum(largest, tl.max(parts, 0))
    base = tl.where(base == float("-inf"), 0.0, base)
    weights = tl.exp2(parts - base)
    total = tl.sum(total * tl.exp2(largest - base), 0)
    total += tl.sum(weights * tl.load(sums + places, mask=is_used, other=0.0), 0)
    values = tl.load(partial + places[:, None] * PADDED_DIM + dims[None, :], mask=is_used[:, None], other=0.0)
    merged = tl.sum(values * weights[:, None], 0) * (value_scale / tl.where(total == 0.0, 1.0, total))
    tl.store(out + (row * HEADS + head) * HEAD_DIM + dims, merged.to(out.dtype.element_ty), mask=dims < HEAD_DIM)


def decode(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    out: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    sinks: torch.Tensor | None,
    window: int,
    softcap: float,
    inner: float,
    factor: float,
    value_scale: float,
    splits: int,
) -> None:
    """Fills out [rows, heads, head_dim] with what query, alike, gets of each row's keys."""
    rows, heads, head_dim = query.shape
    kv_heads, block_size = key_cache.shape[1:3]
    group = heads // kv_heads
    padded = max(16, triton.next_power_of_2(head_dim))
    keys = tile_keys(padded, key_cache.dtype.itemsize)
    partial = torch.empty((rows, heads, splits, padded), dtype=torch.float32, device=query.device)
    maxima, sums = (torch.empty((rows, heads, splits), dtype=torch.float32, device=query.device) for _ in range(2))
    decode_kernel[(kv_heads, splits, rows)](
        query,
        key_cache,
        value_cache,
        partial,
        maxima,
        sums,
        seq_lens,
        block_tables,
        query.stride(0),
        block_tables.stride(0),
        window,
        inner,
        factor,
        GROUP=group,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        NUM_SPLITS=splits,
        MIN_TILES=MIN_TILES,
        TILE_ROWS=max(16, triton.next_power_of_2(group)),
        TILE_KEYS=keys,
        PADDED_DIM=padded,
        CAPPED=softcap > 0,
        num_warps=4,
        num_stages=NUM_STAGES,
    )
    merge_kernel[(heads, rows)](
        partial,
        maxima,
        sums,
        out,
        seq_lens,
        sinks,
        window,
        value_scale,
        HEADS=heads,
        HEAD_DIM=head_dim,
        NUM_SPLITS=splits,
        MIN_TILES=MIN_TILES,
        TILE_KEYS=keys,
        PADDED_DIM=padded,
        num_warps=4,
    )
