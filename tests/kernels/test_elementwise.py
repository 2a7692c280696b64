"""Norms, rotary embedding, activations and capped logits: each CPU variant against the PyTorch twin."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F

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
    x, weight = torch.randn(tokens, size).to(dtype) * 3, torch.randn(size)
    close(ops.rms_norm(x, weight, 1e-5), ReferenceOps().rms_norm(x, weight, 1e-5))
    # Nothing but the definition, in float64.
    wide = x.double()
    close(ops.rms_norm(x, weight, 1e-5), (wide / (wide.square().mean(-1, True) + 1e-5).sqrt() * weight).to(dtype))


@dtypes
@shapes
def test_rms_norm_with_residual_equals_the_twin(ops: CpuOps, dtype: torch.dtype, tokens: int, size: int):
    x, residual, weight = torch.randn(tokens, size).to(dtype), torch.randn(tokens, size).to(dtype), torch.ones(size)
    mine, twin = residual.clone(), residual.clone()
    close(ops.rms_norm(x, weight, 1e-5, mine), ReferenceOps().rms_norm(x, weight, 1e-5, twin))
    assert torch.equal(mine, twin)


@dtypes
@shapes
def test_layer_norm_equals_the_twin(ops: CpuOps, dtype: torch.dtype, tokens: int, size: int):
    x, weight, bias = (torch.randn(tokens, size) * 3 + 1).to(dtype), torch.randn(size), torch.randn(size)
    ours, twin = ops.layer_norm(x, weight, bias, 1e-5), ReferenceOps().layer_norm(x, weight, bias, 1e-5)
    torch.testing.assert_close(ours, twin, atol=2e-6, rtol=ONE_ROUNDING[dtype])
    # Nothing but the definition, in float64.
    centred = x.double() - x.double().mean(-1, True)
    expected = (centred / (centred.square().mean(-1, True) + 1e-5).sqrt() * weight + bias).to(dtype)
    torch.testing.assert_close(ours, expected, atol=2e-6, rtol=ONE_ROUNDING[dtype])


@dtypes
@shapes
def test_layer_norm_with_residual_equals_the_twin(ops: CpuOps, dtype: torch.dtype, tokens: int, size: int):
    x, residual = torch.randn(tokens, size).to(dtype), torch.randn(tokens, size).to(dtype)
    mine, twin = residual.clone(), residual.clone()
    ours = ops.layer_norm(x, torch.ones(size), torch.ones(size), 1e-5, mine)
    theirs = ReferenceOps().layer_norm(x, torch.ones(size), torch.ones(size), 1e-5, twin)
    torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=ONE_ROUNDING[dtype])
    assert torch.equal(mine, twin)


@dtypes
@pytest.mark.parametrize("head_dim", [16, 80, 256, 20])
def test_norm_of_heads_equals_the_twin_and_leaves_its_neighbours(ops: CpuOps, dtype: torch.dtype, head_dim: int):
    merged, weight = (torch.randn(33, 8, head_dim) * 3).to(dtype), torch.randn(head_dim)
    mine, twin = merged.clone(), merged.clone()
    ops.norm_heads(mine[:, 2:5], weight, 0.01)
    ReferenceOps().norm_heads(twin[:, 2:5], weight, 0.01)
    close(mine, twin)
    assert torch.equal(mine[:, :2], merged[:, :2])
    assert torch.equal(mine[:, 5:], merged[:, 5:])
    wide = merged[:, 2:5].double()
    close(mine[:, 2:5], (wide / (wide.square().mean(-1, True) + 0.01).sqrt() * weight).to(dtype))


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


@dtypes
@shapes
def test_gelu_mul_equals_its_definition(ops: CpuOps, dtype: torch.dtype, tokens: int, size: int):
    """In float64: far below 0 the twin's own 1 + tanh has no digits left."""
    x = torch.randn(tokens, 2 * size).to(dtype) * 5
    gate, up = x.double().chunk(2, -1)
    close(ops.gelu_mul(x), (F.gelu(gate, approximate="tanh") * up).to(dtype))
    torch.testing.assert_close(ops.gelu_mul(x), ReferenceOps().gelu_mul(x), atol=1e-5, rtol=ONE_ROUNDING[dtype])


@dtypes
@shapes
def test_gelu_equals_its_definition(ops: CpuOps, dtype: torch.dtype, tokens: int, size: int):
    x = torch.randn(tokens, size).to(dtype) * 5
    close(ops.gelu(x), F.gelu(x.double(), approximate="tanh").to(dtype))


@shapes
def test_softcap_equals_its_definition(ops: CpuOps, tokens: int, size: int):
    x = torch.randn(tokens, size) * 10 ** torch.randint(-3, 3, (tokens, size))
    expected = 7 * (x.double() / 7).tanh()
    ops.softcap(x, 7.0)
    torch.testing.assert_close(x.double(), expected, atol=0, rtol=4e-7)


def test_softcap_at_the_ends_of_the_range(ops: CpuOps):
    x = torch.tensor([-torch.inf, -1e38, -60.0, -1e-30, 0.0, 60.0, 1e38, torch.inf, *[torch.nan] * 8])
    ops.softcap(x, 3.0)
    assert x[:8].tolist() == [-3.0, -3.0, -3.0, pytest.approx(-1e-30), 0.0, 3.0, 3.0, 3.0]
    assert x[8:].isnan().all()


def test_gelu_mul_at_the_ends_of_the_range(ops: CpuOps):
    gates = torch.tensor([-1e38, -3e5, -200.0, -15.0, 0.0, 89.0, 200.0, 1e38] * 2)
    out = ops.gelu_mul(torch.cat([gates, torch.ones(16)])[None])[0]
    assert out[4:8].tolist() == [0.0, 89.0, 200.0, gates[7].item()]
    assert out[:4].abs().max() < 1e-35
    assert ops.gelu_mul(torch.full((1, 32), torch.nan)).isnan().all()


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
        zero, one = torch.zeros_like(x), torch.ones(16)
        mine = zero.clone()
        ops.rms_norm(x, one, 1.0, mine)
        assert torch.equal(mine, x + zero)
        scaled = torch.randn_like(x, dtype=torch.float32).to(dtype)
        mine = scaled.clone()
        ops.rms_norm(x, one, 1.0, mine)
        expected = (x.float() + scaled.float()).to(dtype)
        assert torch.equal(mine, expected)


@pytest.mark.parametrize("size", [3, 64, 3000, 49152, 50257])
def test_the_largest_of_each_row_is_the_twins(ops: CpuOps, size: int):
    logits = torch.randn(40, size)
    assert ops.argmax(logits).equal(ReferenceOps().argmax(logits))
    some = torch.tensor([39, 0, 7])
    assert ops.argmax(logits, some).equal(ReferenceOps().argmax(logits, some))


@pytest.mark.parametrize("size", [5, 64, 3000])
def test_58_of_equal_numbers_the_first_is_the_largest_and_none_where_one_is_not_a_number(ops: CpuOps, size: int):
    logits = torch.randn(7, size)
    logits[0, [1, 3, size - 1]] = 50.0
    logits[1] = 0.0
    logits[2] = -torch.inf
    logits[3, size - 1] = torch.nan
    logits[4, 0] = torch.nan
    logits[5, 1] = torch.inf
    logits[6] = -torch.inf
    logits[6, size - 2] = -3.4e38
    largest = ops.argmax(logits)
    assert largest.dtype is torch.int32
    assert largest.tolist() == [1, 0, -1, -1, -1, 1, size - 2]
