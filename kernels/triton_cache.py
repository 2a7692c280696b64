"""Writes into the KV cache, and the rotation before them: one kernel that reads each query, key and value once.

On GPUs both caches of a layer are [blocks, kv_heads, block_size, head_dim]: a head's part of a block is one piece of
memory, and the threads of attention load 16 bytes each of keys and of values alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from kernels.reference import ReferenceOps

if TYPE_CHECKING:
    import torch

TILE_SIZE = 1024
"""Numbers that a program takes at a time: about 16 bytes for each of 4 * 32 threads."""


@triton.jit
def _rotated(low, high, cosines, sines):
    """Pairs of dimensions turned by their angles, in float32."""
    return low * cosines - high * sines, high * cosines + low * sines


@triton.jit
def _store(cache, at, x, inverse_scale, mask):
    """Writes x as the cache keeps it; float8 has no infinity, and what is too large becomes its largest number."""
    if cache.dtype.element_ty == tl.float8e4nv:
        scaled = x.to(tl.float32) * inverse_scale
        x = tl.clamp(scaled, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(cache + at, x.to(cache.dtype.element_ty), mask=mask)


@triton.jit
def rotate_and_write_kernel(
    query,
    key,
    value,
    cosines,
    sines,
    key_cache,
    value_cache,
    slots,
    query_stride,
    key_stride,
    value_stride,
    key_inverse,
    value_inverse,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PADDED_PAIRS: tl.constexpr,
):
    """A program has one token and TILE_HEADS of its heads: first those of the query, then those of key and value."""
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    QUERY_TILES: tl.constexpr = (HEADS + TILE_HEADS - 1) // TILE_HEADS
    if PAIRS > 0:
        pairs = tl.arange(0, PADDED_PAIRS)
        turns = pairs < PAIRS
        cosine = tl.load(cosines + token * PAIRS + pairs, mask=turns, other=0.0)[None, :]
        sine = tl.load(sines + token * PAIRS + pairs, mask=turns, other=0.0)[None, :]
    if HEADS > 0 and tile < QUERY_TILES:
        heads = tile * TILE_HEADS + tl.arange(0, TILE_HEADS)
        at = query + token * query_stride + heads[:, None] * HEAD_DIM + pairs[None, :]
        mask = (heads < HEADS)[:, None] & turns[None, :]
        low = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        high = tl.load(at + PAIRS, mask=mask, other=0.0).to(tl.float32)
        low, high = _rotated(low, high, cosine, sine)
        tl.store(at, low.to(query.dtype.element_ty), mask=mask)
        tl.store(at + PAIRS, high.to(query.dtype.element_ty), mask=mask)
    if KV_HEADS > 0 and tile >= QUERY_TILES:
        slot = tl.load(slots + token).to(tl.int64)
        if slot >= 0:
            heads = (tile - QUERY_TILES) * TILE_HEADS + tl.arange(0, TILE_HEADS)
            real = (heads < KV_HEADS)[:, None]
            rows = (slot // BLOCK_SIZE * KV_HEADS + heads[:, None]) * BLOCK_SIZE + slot % BLOCK_SIZE
            dims = tl.arange(0, PADDED_DIM)
            mask = real & (dims < HEAD_DIM)[None, :]
            x = tl.load(value + token * value_stride + heads[:, None] * HEAD_DIM + dims[None, :], mask=mask)
            _store(value_cache, rows * HEAD_DIM + dims[None, :], x, value_inverse, mask)
            if PAIRS > 0:
                at = key + token * key_stride + heads[:, None] * HEAD_DIM + pairs[None, :]
                mask = real & turns[None, :]
                low = tl.load(at, mask=mask, other=0.0).to(tl.float32)
                high = tl.load(at + PAIRS, mask=mask, other=0.0).to(tl.float32)
                low, high = _rotated(low, high, cosine, sine)
                # Rounded as the key would be that is not fused with its write.
                low, high = low.to(key.dtype.element_ty), high.to(key.dtype.element_ty)
                _store(key_cache, rows * HEAD_DIM + pairs[None, :], low, key_inverse, mask)
                _store(key_cache, rows * HEAD_DIM + PAIRS + pairs[None, :], high, key_inverse, mask)
            if 2 * PAIRS < HEAD_DIM:
                mask = real & (dims >= 2 * PAIRS)[None, :] & (dims < HEAD_DIM)[None, :]
                x = tl.load(key + token * key_stride + heads[:, None] * HEAD_DIM + dims[None, :], mask=mask)
                _store(key_cache, rows * HEAD_DIM + dims[None, :], x, key_inverse, mask)


class TritonCache(ReferenceOps):
    """The cache's layout, and what writes it."""

    def kv_cache_shapes(
        self, num_blocks: int, num_kv_heads: int, head_dim: int, block_size: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        shape = (num_blocks, num_kv_heads, block_size, head_dim)
        return shape, shape

    def rotary(self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> None:
        _launch(x, None, None, cosines, sines, None, None, None, 1.0, 1.0)

    def write_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slots: torch.Tensor,
        key_scale: float = 1.0,
        value_scale: float = 1.0,
    ) -> None:
        _launch(None, key, value, None, None, key_cache, value_cache, slots, key_scale, value_scale)

    def rotate_and_write(
        self,
        merged: torch.Tensor,
        kv_heads: int,
        cosines: torch.Tensor,
        sines: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slots: torch.Tensor,
        key_scale: float = 1.0,
        value_scale: float = 1.0,
    ) -> None:
        with_keys = merged.shape[1] - kv_heads
        query, key = merged[:, : with_keys - kv_heads], merged[:, with_keys - kv_heads : with_keys]
        value = merged[:, with_keys:]
        _launch(query, key, value, cosines, sines, key_cache, value_cache, slots, key_scale, value_scale)


def _launch(
    query: torch.Tensor | None,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    cosines: torch.Tensor | None,
    sines: torch.Tensor | None,
    key_cache: torch.Tensor | None,
    value_cache: torch.Tensor | None,
    slots: torch.Tensor | None,
    key_scale: float,
    value_scale: float,
) -> None:
    """Of what is not given nothing is turned or written."""
    given = [x for x in (query, key, value) if x is not None]
    tokens, _, head_dim = given[0].shape
    if tokens == 0:
        return
    assert all(x.stride(1) == head_dim and x.stride(2) == 1 for x in given)
    assert all(x is None or x.is_contiguous() for x in (cosines, sines, key_cache, value_cache, slots))
    heads = query.shape[1] if query is not None else 0
    kv_heads = key.shape[1] if key is not None else 0
    pairs = cosines.shape[1] if cosines is not None else 0
    padded = triton.next_power_of_2(head_dim)
    tile_heads = max(1, min(TILE_SIZE // padded, triton.next_power_of_2(max(heads, kv_heads))))
    rotate_and_write_kernel[(tokens, triton.cdiv(heads, tile_heads) + triton.cdiv(kv_heads, tile_heads))](
        query,
        key,
        value,
        cosines,
        sines,
        key_cache,
        value_cache,
        slots,
        query.stride(0) if query is not None else 0,
        key.stride(0) if key is not None else 0,
        value.stride(0) if value is not None else 0,
        1 / key_scale,
        1 / value_scale,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        PAIRS=pairs,
        BLOCK_SIZE=value_cache.shape[2] if value_cache is not None else 1,
        TILE_HEADS=tile_heads,
        PADDED_DIM=padded,
        PADDED_PAIRS=triton.next_power_of_2(max(pairs, 1)),
        num_warps=4,
    )
