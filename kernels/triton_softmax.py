"""Softmax as attention takes it, tile of keys by tile of keys, in float32 and with exponents of two.

A row's state is the largest score so far, the sum of its weights and the weighted sum of values; both sums are relative
to the largest score, and shrink when a larger one comes (Milakov and Gimelshein 2018, "Online normalizer calculation
for softmax"). Scores are products times `factor`, which has the scale and the logarithm of e in it.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

LOG2_E = tl.constexpr(math.log2(math.e))


def exponents(scale: float, softcap: float) -> tuple[float, float]:
    """(inner, factor) of attend: what products are multiplied with inside the cap's tanh, and what scores are."""
    log2_e = LOG2_E.value
    return (2 * log2_e * scale / softcap, softcap * log2_e) if softcap else (0.0, scale * log2_e)


@triton.jit
def begin(sinks, heads, ROWS: tl.constexpr):
    """The largest score and the sum of weights of rows that saw nothing yet, or only their heads' sinks."""
    if sinks is None:
        maxima, sums = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    else:
        maxima, sums = tl.load(sinks + heads) * LOG2_E, tl.full([ROWS], 1.0, tl.float32)
    return maxima, sums


@triton.jit
def in_float16(query):
    """query [rows, head_dim], without a power of two so that it fits into float16, and that power [rows].

    What caches of 8 bits are multiplied with: they become float16 in one instruction and bfloat16 in several, which
    would take longer than reading them.
    """
    wide = query.to(tl.float32)
    power = tl.max(tl.abs(wide), 1).to(tl.int32, bitcast=True) & 0x7F800000
    inverse = (0x7F000000 - power).to(tl.float32, bitcast=True)
    return (wide * inverse[:, None]).to(tl.float16), power.to(tl.float32, bitcast=True)


@triton.jit
def load_tile(cache, at, real, dims, dtype: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr):
    """Keys or values at [tile, PADDED_DIM], zero where they are not real, if that is given [tile]."""
    if HEAD_DIM == PADDED_DIM:
        tile = tl.load(cache + at) if real is None else tl.load(cache + at, mask=real[:, None], other=0.0)
    else:
        mask = (dims < HEAD_DIM)[None, :]
        mask = mask if real is None else real[:, None] & mask
        tile = tl.load(cache + at, mask=mask, other=0.0)
    return tile.to(dtype)


@triton.jit
def attend(
    query,
    magnitudes,
    keys,
    values,
    seen,
    maxima,
    sums,
    weighted,
    inner,
    factor,
    CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The state after query [rows, head_dim] saw keys and values [tile, head_dim] where `seen` [rows, tile].

    Products are multiplied with magnitudes [rows], if they are given."""
    scores = tl.dot(query, tl.trans(keys), input_precision="tf32x3")
    if magnitudes is not None:
        scores *= magnitudes[:, None]
    if CAPPED:
        # tanh, whose own function the interpreter does not have; this way around nothing overflows.
        decay = tl.exp2(-tl.abs(scores * inner))
        scores = tl.where(scores < 0.0, decay - 1.0, 1.0 - decay) / (1.0 + decay)
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    larger = tl.maximum(maxima, tl.max(scores, 1) * factor)
    # Where no key was seen yet there is nothing to be relative to.
    base = tl.where(larger == float("-inf"), 0.0, larger) if MASKED else larger
    weights = tl.exp2(scores * factor - base[:, None])
    shrink = tl.exp2(maxima - base)
    sums = sums * shrink + tl.sum(weights, 1)
    weighted = tl.dot(weights.to(values.dtype), values, weighted * shrink[:, None], input_precision="tf32x3")
    return larger, sums, weighted
