"""RMS norm, rotary embedding and gated activation: each CPU variant against the PyTorch twin."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from kernels.reference import ReferenceOps

if TYPE_CHECKING:
    from kernels.cpu import CpuOps

ONE_ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
SHAPES = [(1, 16), (1, 576), (7, 80), (130, 512), (3, 20)]
dtypes = pytest.mark.parametrize("dtype", list(ONE_ROUNDING))
shapes = pytest.mark.parametrize(("tokens", "size"), SHAPES)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=ONE_ROUNDING[expected.dtype])


@dtypes
@shapes
def test_rms_norm_equals_the_twin(ops: CpuOps, dtype: torch.dtype, tokens: int, size: int):
    x, weight = torch.randn(tokens, size).to(dtype) * 3, torch.randn(size).to(dtype)
    close(ops.rms_norm(x, weight, 1e-5), ReferenceOps().rms_norm(x, weight, 1e-5))
    # Nothing but the definition, in float64.
    wide = x.double()
    close(ops.rms_norm(x, weight, 1e-5), (wide / (wide.square().mean(-1, True) + 1e-5).sqrt() * weight).to(dtype))


@dtypes
@shapes
def test_rms_norm_with_residual_equals_the_twin(ops: CpuOps, dtype: torch.dtype, tokens: int, size: int):
    x, residual, weight = torch.randn(tokens, size).to(dtype), torch.randn(tokens, size).to(dtype), torch.ones(size)
    mine, twin = residual.clone(), residual.clone()
    weight = weight.to(dtype)
    close(ops.rms_norm(x, weight, 1e-5, mine), ReferenceOps().rms_norm(x, weight, 1e-5, twin))
    assert torch.equal(mine, twin)


@dtypes
@pytest.mark.parametrize(("head_dim", "rotated"), [(64, 64), (80, 32), (96, 96), (128, 128), (20, 20)])
def test_rotary_equals_the_twin_and_leaves_its_neighbours(ops: CpuOps, dtype: torch.dtype, head_dim: int, rotated: int):
    merged = torch.randn(33, 8, head_dim).to(dtype)
    angles = torch.rand(33, rotated // 2) * 1000
    mine, twin = merged.clone(), merged.clone()
    ops.rotary(mine[:, :5], angles.cos(), angles.sin())
    ReferenceOps().rotary(twin[:, :5], angles.cos(), angles.sin())
    torch.testing.assert_close(mine, twin, atol=ONE_ROUNDING[dtype] * 4, rtol=0)
    assert torch.equal(mine[:, 5:], merged[:, 5:])
    assert torch.equal(mine[:, :5, rotated:], merged[:, :5, rotated:])


@dtypes
@shapes
def test_silu_mul_equals_the_twin(ops: CpuOps, dtype: torch.dtype, tokens: int, size: int):
    x = torch.randn(tokens, 2 * size).to(dtype) * 20
    close(ops.silu_mul(x), ReferenceOps().silu_mul(x))


def test_silu_mul_at_the_ends_of_the_range(ops: CpuOps):
    gates = torch.tensor([-1e38, -3e38, -200.0, -89.0, 0.0, 89.0, 200.0, 1e38] * 2)
    out = ops.silu_mul(torch.cat([gates, torch.ones(16)])[None])[0]
    assert out[4:8].tolist() == [0.0, 89.0, 200.0, gates[7].item()]
    assert out[:4].abs().max() < 1e-35
    assert ops.silu_mul(torch.full((1, 32), torch.nan)).isnan().all()


def test_halves_convert_as_torch_does(ops: CpuOps):
    """All 65,536 float16 patterns in, and products that round out, through a norm of weight 1 and scale 1."""
    bits = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        x = bits.view(dtype).reshape(-1, 16)
        x = x[x.isfinite().all(-1)].contiguous()
        zero, one = torch.zeros_like(x), torch.full((16,), 1.0, dtype=dtype)
        mine = zero.clone()
        ops.rms_norm(x, one, 1.0, mine)
        assert torch.equal(mine, x + zero)
        scaled = torch.randn_like(x, dtype=torch.float32).to(dtype)
        mine = scaled.clone()
        ops.rms_norm(x, one, 1.0, mine)
        expected = (x.float() + scaled.float()).to(dtype)
        assert torch.equal(mine, expected)
