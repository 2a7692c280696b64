"""Activations in Triton: elementwise, float32 inside, rounded once.

Hyperbolic tangents are written with exp, which every version of Triton has; near 0, where that would
leave few digits, with their series.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.reference import ReferenceOps

_SILU, _GELU = 0, 1
BLOCK = 1024
"""Numbers that a program takes."""


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _gelu(x):
    # (1 + tanh(y)) / 2 is sigmoid(2 y), which has all its digits far below 0 too.
    return x * _sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def tanh(x):
    """To a few units in the last place; NaN stays."""
    size = tl.abs(x)
    decay = tl.exp(-2.0 * size)
    large = (1.0 - decay) / (1.0 + decay)
    square = x * x
    series = 62.0 / 2835 - square * (1382.0 / 155925)
    series = 1.0 - square * (1.0 / 3 - square * (2.0 / 15 - square * (17.0 / 315 - square * series)))
    return tl.where(size < 0.25, x * series, tl.where(x < 0, -large, large))


@triton.jit
def gated_kernel(x, out, x_stride, size, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(x + token * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + token * x_stride + size + column, mask=inside, other=0.0).to(tl.float32)
    activated = gate * _sigmoid(gate) if ACTIVATION == 0 else _gelu(gate)
    tl.store(out + token * size + column, (activated * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def gelu_kernel(x, out, count, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    numbers = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, _gelu(numbers).to(out.dtype.element_ty), mask=inside)


@triton.jit
def softcap_kernel(x, count, cap, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    numbers = tl.load(x + place, mask=inside, other=0.0)
    tl.store(x + place, cap * tanh(numbers / cap), mask=inside)


class TritonActivation(ReferenceOps):
    """Of contiguous tensors, but rows before a gate may lie apart."""

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        return _gated(x, _SILU)

    def gelu_mul(self, x: torch.Tensor) -> torch.Tensor:
        return _gated(x, _GELU)

    def gelu(self, x: torch.Tensor) -> torch.Tensor:
        assert x.is_contiguous()
        out = torch.empty_like(x)
        gelu_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, out, x.numel(), BLOCK=BLOCK)
        return out

    def softcap(self, x: torch.Tensor, cap: float) -> None:
        assert x.is_contiguous()
        assert x.dtype is torch.float32
        softcap_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, x.numel(), cap, BLOCK=BLOCK)


def _gated(x: torch.Tensor, activation: int) -> torch.Tensor:
    tokens, size = x.shape[0], x.shape[1] // 2
    assert x.stride(1) == 1
    out = torch.empty((tokens, size), dtype=x.dtype, device=x.device)
    grid = tokens, triton.cdiv(size, BLOCK)
    gated_kernel[grid](x, out, x.stride(0), size, ACTIVATION=activation, BLOCK=BLOCK)
    return out
