"""Norms in Triton: a program holds a row in registers, reads it once and writes it once.

Sums are float32 and in one order for each size, whatever the number of rows. A sum with the residual is rounded to the
storage type before it is normed, as by the twins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from kernels.reference import ReferenceOps

if TYPE_CHECKING:
    from collections.abc import Callable

TILE_HEADS = 8
"""Heads of a token that one program norms."""


@triton.jit
def _summed_row(x, residual, SIZE: tl.constexpr, PADDED_SIZE: tl.constexpr, HAS_RESIDUAL: tl.constexpr):
    """The row at x in float32, zeros behind its end; with a residual, their sum, which is stored there."""
    column = tl.arange(0, PADDED_SIZE)
    inside = column < SIZE
    row = tl.load(x + column, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        before = tl.load(residual + column, mask=inside, other=0.0)
        row = (before.to(tl.float32) + row.to(tl.float32)).to(before.dtype)
        tl.store(residual + column, row, mask=inside)
    return row.to(tl.float32)


@triton.jit
def rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    x_stride,
    residual_stride,
    eps,
    SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row = _summed_row(x + token * x_stride, residual + token * residual_stride, SIZE, PADDED_SIZE, HAS_RESIDUAL)
    scale = 1.0 / tl.sqrt(tl.sum(row * row) / SIZE + eps)
    column = tl.arange(0, PADDED_SIZE)
    inside = column < SIZE
    weights = tl.load(weight + column, mask=inside, other=0.0)
    tl.store(out + token * SIZE + column, (row * scale * weights).to(out.dtype.element_ty), mask=inside)


@triton.jit
def layer_norm_kernel(
    x,
    residual,
    weight,
    bias,
    out,
    x_stride,
    residual_stride,
    eps,
    SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row = _summed_row(x + token * x_stride, residual + token * residual_stride, SIZE, PADDED_SIZE, HAS_RESIDUAL)
    column = tl.arange(0, PADDED_SIZE)
    inside = column < SIZE
    centred = tl.where(inside, row - tl.sum(row) / SIZE, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(centred * centred) / SIZE + eps)
    weights = tl.load(weight + column, mask=inside, other=0.0)
    biases = tl.load(bias + column, mask=inside, other=0.0)
    normed = centred * scale * weights + biases
    tl.store(out + token * SIZE + column, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def norm_heads_kernel(
    x,
    weight,
    token_stride,
    head_stride,
    eps,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    head = tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS)
    column = tl.arange(0, PADDED_DIM)
    inside = (head < HEADS)[:, None] & (column < HEAD_DIM)[None, :]
    start = x + tl.program_id(0).to(tl.int64) * token_stride
    numbers = start + head[:, None] * head_stride + column[None, :]
    rows = tl.load(numbers, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(rows * rows, 1) / HEAD_DIM + eps)
    weights = tl.load(weight + column, mask=column < HEAD_DIM, other=0.0)
    normed = rows * scale[:, None] * weights[None, :]
    tl.store(numbers, normed.to(x.dtype.element_ty), mask=inside)


class TritonNorm(ReferenceOps):
    """Rows may lie apart; their numbers lie side by side."""

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        return _norm_rows(rms_norm_kernel, x, (weight,), eps, residual)

    def layer_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        eps: float,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return _norm_rows(layer_norm_kernel, x, (weight, bias), eps, residual)

    def norm_heads(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        tokens, heads, head_dim = x.shape
        assert x.stride(2) == 1
        assert weight.dtype is torch.float32
        norm_heads_kernel[(tokens, triton.cdiv(heads, TILE_HEADS))](
            x,
            weight,
            x.stride(0),
            x.stride(1),
            eps,
            HEADS=heads,
            HEAD_DIM=head_dim,
            TILE_HEADS=TILE_HEADS,
            PADDED_DIM=triton.next_power_of_2(head_dim),
        )


def _norm_rows(
    kernel: Callable[..., Any],
    x: torch.Tensor,
    weights: tuple[torch.Tensor, ...],
    eps: float,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    tokens, size = x.shape
    summed = x if residual is None else residual
    assert x.stride(1) == summed.stride(1) == 1
    assert all(weight.dtype is torch.float32 for weight in weights)
    out = torch.empty((tokens, size), dtype=x.dtype, device=x.device)
    padded_size = triton.next_power_of_2(size)
    kernel[(tokens,)](
        x,
        summed,
        *weights,
        out,
        x.stride(0),
        summed.stride(0),
        eps,
        SIZE=size,
        PADDED_SIZE=padded_size,
        HAS_RESIDUAL=residual is not None,
        # At most 32 numbers a thread, up to rows of 16,384.
        num_warps=min(16, max(1, padded_size // 512)),
    )
    return out
