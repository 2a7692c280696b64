"""Draws in Triton: the largest of scaled logits and noise, neither of which is ever in memory.

A row is cut into parts, so that few rows keep a GPU busy too; a second kernel merges what the parts found. Of equal
numbers the first wins whatever the parts are, so a row's token does not depend on the rows beside it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from kernels.reference import ReferenceOps
from kernels.triton_thresholds import scaled_logits, thresholds

if TYPE_CHECKING:
    from kernels.gpu import Gpu
    from kernels.thresholds import Filters

BLOCK = 1024
"""Logits that a program reads at a time."""
MAX_PARTS = 64
"""Of a row."""
BELOW_ONE: tl.constexpr = tl.constexpr(1.0 - 2.0**-24)


@triton.jit
def _mix32(bits):
    """MurmurHash3's finalizer, of uint32."""
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6B
    bits = (bits ^ (bits >> 13)) * 0xC2B2AE35
    return bits ^ (bits >> 16)


@triton.jit
def gumbel_noise(token_ids, keys):
    """gumbel.py, of the row's two keys as one int64: the same bits, the same number of each, the same logarithms up to
    their last places."""
    first, second = keys.to(tl.uint32), (keys >> 32).to(tl.uint32)
    bits = _mix32(_mix32(token_ids.to(tl.uint32) ^ first) + second).to(tl.int32, bitcast=True)
    numbers = bits.to(tl.float32)
    numbers = tl.where(bits < 0, numbers + 4294967296.0, numbers)
    numbers = tl.minimum((numbers + 0.5) * 2.3283064365386963e-10, BELOW_ONE)
    # log1p, which Triton has not: log(rest) is that of a number rounded to 1 - left, and nearly as wrong as left is.
    rest = 1.0 - numbers
    left = 1.0 - rest
    log = tl.where(left == 0, -numbers, tl.log(rest) * (numbers / tl.where(left == 0, 1.0, left)))
    return -tl.log(-log)


# Columns lie side by side in one copy, so where one begins differs from step to step.
@triton.jit(do_not_specialize_on_alignment=["rows", "temperatures", "keys"])
def part_kernel(
    logits,
    rows,
    temperatures,
    limits,
    keys,
    highest_of_parts,
    token_of_parts,
    vocab_size,
    part_size,
    HAS_ROWS: tl.constexpr,
    DRAWS: tl.constexpr,
    HAS_LIMITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest number of a part of a row and its token; NaN where any logit is."""
    place, part = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + place) if HAS_ROWS else place.to(tl.int64)
    start, column = logits + row * vocab_size, tl.arange(0, BLOCK)
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    tokens = tl.zeros([BLOCK], tl.int32)
    spoilt = tl.zeros([BLOCK], tl.int32)
    temperature = tl.load(temperatures + place).to(tl.float32) if DRAWS else 1.0
    if DRAWS:
        key = tl.load(keys + place)
    if HAS_LIMITS:
        limit = tl.load(limits + place)
    end = tl.minimum((part + 1) * part_size, vocab_size)
    for offset in range(part * part_size, end, BLOCK):
        token_ids = offset + column
        if DRAWS:
            x = scaled_logits(start, token_ids, vocab_size, temperature)
            if HAS_LIMITS:
                x = tl.where(x < limit, float("-inf"), x)
            x += gumbel_noise(token_ids, key)
        else:
            x = tl.load(start + token_ids, mask=token_ids < vocab_size, other=float("-inf"))
        spoilt = tl.where(x == x, spoilt, 1)
        tokens = tl.where(x > highest, token_ids, tokens)
        highest = tl.where(x > highest, x, highest)
    largest = tl.max(highest)
    token = tl.min(tl.where(highest == largest, tokens, vocab_size))
    at = place * tl.num_programs(1) + part
    tl.store(highest_of_parts + at, tl.where(tl.max(spoilt) > 0, float("nan"), largest))
    tl.store(token_of_parts + at, token)


@triton.jit(do_not_specialize=["num_parts"])
def merge_kernel(highest_of_parts, token_of_parts, out, num_parts, MAX_PARTS: tl.constexpr):
    place, part = tl.program_id(0), tl.arange(0, MAX_PARTS)
    inside = part < num_parts
    highest = tl.load(highest_of_parts + place * num_parts + part, mask=inside, other=float("-inf"))
    tokens = tl.load(token_of_parts + place * num_parts + part, mask=inside, other=0)
    spoilt = tl.max(tl.where(highest == highest, 0, 1)) > 0
    highest = tl.where(highest == highest, highest, float("-inf"))
    largest = tl.max(highest)
    token = tl.min(tl.where(highest == largest, tokens, 0x7FFFFFFF))
    tl.store(out + place, tl.where(spoilt | (largest == float("-inf")), -1, token))


class TritonSampling(ReferenceOps):
    gpu: Gpu

    def argmax(self, logits: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        return self._largest(logits, rows, None, None, None)

    def draw(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        temperature: torch.Tensor,
        filters: Filters | None,
        keys: torch.Tensor,
    ) -> torch.Tensor:
        limits = None if filters is None else self.limits(logits, rows, temperature, filters)
        return self._largest(logits, rows, temperature, limits, keys)

    def limits(
        self, logits: torch.Tensor, rows: torch.Tensor, temperature: torch.Tensor, filters: Filters
    ) -> torch.Tensor:
        return thresholds(logits, rows, temperature, filters)

    def _largest(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor | None,
        temperature: torch.Tensor | None,
        limits: torch.Tensor | None,
        keys: torch.Tensor | None,
    ) -> torch.Tensor:
        assert logits.is_contiguous()
        num_rows, vocab_size = len(logits if rows is None else rows), logits.shape[1]
        num_blocks = triton.cdiv(vocab_size, BLOCK)
        wanted = min(num_blocks, MAX_PARTS, max(1, 4 * self.gpu.num_sms // max(1, num_rows)))
        part_size = triton.cdiv(num_blocks, wanted) * BLOCK
        num_parts = triton.cdiv(vocab_size, part_size)
        highest = torch.empty((num_rows, num_parts), dtype=torch.float32, device=logits.device)
        tokens = torch.empty((num_rows, num_parts), dtype=torch.int32, device=logits.device)
        part_kernel[(num_rows, num_parts)](
            logits,
            rows,
            temperature,
            limits,
            keys,
            highest,
            tokens,
            vocab_size,
            part_size,
            HAS_ROWS=rows is not None,
            DRAWS=keys is not None,
            HAS_LIMITS=limits is not None,
            BLOCK=BLOCK,
        )
        out = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
        merge_kernel[(num_rows,)](highest, tokens, out, num_parts, MAX_PARTS=MAX_PARTS, num_warps=1)
        return out
