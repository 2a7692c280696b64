"""Thresholds in Triton: thresholds.py without a sort, one program a row.

What is looked for is the smallest logit such that the larger ones weigh less than a goal: in number for top-k, in
probability for top-p. It lies between two keys (a float's bits, ordered as the float is) that come nearer with each
pass over the row: a pass weighs what is above two of the keys between them, one halfway in keys, which halves the
interval whatever the logits are, and one halfway in value, which is mostly nearer; and moves to logits that there are.
So there are at most 32 passes. Weights are float64, as the twin's, and added in one order.

The row is read twice: for its largest logit, and for the candidates, those that are not far below it, which are kept
together. The search passes over candidates alone, unless there are too few of them or they weigh too little.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from kernels.thresholds import Filters

BLOCK = 2048
"""Logits that a program reads at a time."""
NUM_WARPS = 16
REACH: tl.constexpr = tl.constexpr(12.0)
"""How far below the largest logit candidates are: of a token there the probability is 6e-6 of the likeliest one's."""
LOWEST: tl.constexpr = tl.constexpr(-2139095041)
"""The key of -inf."""


def thresholds(logits: torch.Tensor, rows: torch.Tensor, temperature: torch.Tensor, filters: Filters) -> torch.Tensor:
    """[n] float32: of the rows' logits over the temperature, those are kept that are at least the threshold."""
    limits = torch.empty(len(rows), dtype=torch.float32, device=logits.device)
    candidates = torch.empty((len(rows), logits.shape[1]), dtype=torch.float32, device=logits.device)
    thresholds_kernel[(len(rows),)](
        logits,
        rows,
        temperature,
        filters.top_k,
        filters.top_p,
        filters.log_min_p,
        candidates,
        limits,
        logits.shape[1],
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )
    return limits


@triton.jit
def scaled_logits(start, token_ids, vocab_size, temperature):
    """Of tokens beyond the vocabulary -inf."""
    return tl.div_rn(tl.load(start + token_ids, mask=token_ids < vocab_size, other=float("-inf")), temperature)


@triton.jit
def _weight_from(start, size, temperature, limit, highest, BLOCK: tl.constexpr):
    """Of all that is at least the limit."""
    weights = tl.zeros([BLOCK], tl.float64)
    for offset in range(0, size, BLOCK):
        x = scaled_logits(start, offset + tl.arange(0, BLOCK), size, temperature)
        weights += tl.where(x >= limit, _weights(x, highest, True), 0.0)
    return tl.sum(weights)


@triton.jit
def _key(x):
    """int32 in the order of float32; 0 and -0 have the same."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _float(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _weights(x, highest, WEIGHTED: tl.constexpr):
    """Probabilities up to a factor, or 1 each."""
    if WEIGHTED:
        return tl.exp((x - highest).to(tl.float64))
    return tl.full(x.shape, 1.0, tl.float64)


@triton.jit
def _search(start, vocab_size, temperature, highest, low, high, goal, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    """The smallest logit, as a key, above which there is less than the goal.

    It is above `low`, and at most `high`, which is a logit's; both are int64.
    """
    column = tl.arange(0, BLOCK)
    while high - low > 1:
        halfway = low + (high - low) // 2
        top = _float(high.to(tl.int32))
        bottom = tl.maximum(_float(tl.maximum(low, LOWEST).to(tl.int32)), top - 32.0)
        in_value = _key(0.5 * bottom + 0.5 * top).to(tl.int64)
        in_value = tl.minimum(tl.maximum(in_value, low + 1), high - 1)
        first, second = tl.minimum(halfway, in_value).to(tl.int32), tl.maximum(halfway, in_value).to(tl.int32)
        first_weight, second_weight = tl.zeros([BLOCK], tl.float64), tl.zeros([BLOCK], tl.float64)
        first_below, second_below = tl.full([BLOCK], -0x80000000, tl.int32), tl.full([BLOCK], -0x80000000, tl.int32)
        first_above, second_above = tl.full([BLOCK], 0x7FFFFFFF, tl.int32), tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
        for offset in range(0, vocab_size, BLOCK):
            x = scaled_logits(start, offset + column, vocab_size, temperature)
            x = tl.where(x == x, x, float("-inf"))
            key, weight = _key(x), _weights(x, highest, WEIGHTED)
            above = key > first
            first_weight += tl.where(above, weight, 0.0)
            first_above = tl.where(above, tl.minimum(first_above, key), first_above)
            first_below = tl.where(above, first_below, tl.maximum(first_below, key))
            above = key > second
            second_weight += tl.where(above, weight, 0.0)
            second_above = tl.where(above, tl.minimum(second_above, key), second_above)
            second_below = tl.where(above, second_below, tl.maximum(second_below, key))
        if tl.sum(first_weight) < goal:
            high = tl.max(first_below).to(tl.int64)
        elif tl.sum(second_weight) < goal:
            low = tl.min(first_above).to(tl.int64) - 1
            high = tl.max(second_below).to(tl.int64)
        else:
            low = tl.min(second_above).to(tl.int64) - 1
    return high.to(tl.int32)


@triton.jit(do_not_specialize_on_alignment=["rows", "temperatures", "top_k", "top_p", "log_min_p"])
def thresholds_kernel(
    logits, rows, temperatures, top_k, top_p, log_min_p, candidates, limits, vocab_size, BLOCK: tl.constexpr
):
    place = tl.program_id(0)
    count, share, distance = tl.load(top_k + place), tl.load(top_p + place), tl.load(log_min_p + place)
    limit = tl.full([], float("-inf"), tl.float32)
    counts = (count > 0) & (count < vocab_size)
    if counts | (share < 1) | (distance > float("-inf")):
        start = logits + tl.load(rows + place) * vocab_size
        temperature = tl.load(temperatures + place).to(tl.float32)
        column = tl.arange(0, BLOCK)
        largest = tl.full([BLOCK], float("-inf"), tl.float32)
        for offset in range(0, vocab_size, BLOCK):
            x = scaled_logits(start, offset + column, vocab_size, temperature)
            largest = tl.where(x > largest, x, largest)
        highest = tl.max(largest)
        if distance > float("-inf"):
            wide = highest.to(tl.float64) + distance
            limit = wide.to(tl.float32)
            if limit.to(tl.float64) < wide:
                limit = _float(_key(limit) + 1)
        high = _key(highest).to(tl.int64)
        # Where all are -inf, or one is inf, there is nothing to share.
        finite = tl.where(tl.abs(highest) < float("inf"), highest, 0.0)
        floor = tl.maximum(limit, finite - REACH)
        own = candidates + place.to(tl.int64) * vocab_size
        num_candidates = tl.full([], 0, tl.int32)
        below = tl.zeros([BLOCK], tl.float64)
        for offset in range(0, vocab_size, BLOCK):
            x = scaled_logits(start, offset + column, vocab_size, temperature)
            is_candidate = (x >= floor).to(tl.int32)
            tl.store(own + num_candidates + tl.cumsum(is_candidate) - 1, x, mask=is_candidate > 0)
            num_candidates += tl.sum(is_candidate)
            below += tl.where((x >= limit) & (x < floor), _weights(x, finite, True), 0.0)
        # They are read by other threads than those that wrote them.
        tl.debug_barrier()
        rest = tl.sum(below)
        source, size, scale = own, num_candidates, tl.full([], 1.0, tl.float32)
        if counts:
            if num_candidates < count:
                source, size, scale = start, vocab_size, temperature
            low = tl.full([], LOWEST - 1, tl.int64)
            last = _search(source, size, scale, finite, low, high, count.to(tl.float64), False, BLOCK)
            limit = tl.maximum(limit, _float(last))
        if share < 1:
            weight = _weight_from(source, size, scale, limit, finite, BLOCK)
            goal = share * (weight if counts else weight + rest)
            if weight < goal:
                source, size, scale = start, vocab_size, temperature
            low = _key(limit).to(tl.int64) - 1
            last = _search(source, size, scale, finite, low, high, goal, True, BLOCK)
            limit = tl.maximum(limit, _float(last))
    tl.store(limits + place, limit)
