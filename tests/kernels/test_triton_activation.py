"""Triton's activations and capped logits against their twins, and at the ends of the range."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kernels.reference import ReferenceOps
from tests.kernels.interpreted import TOLERANCE, assert_equals_twin, cuda_ops, poisoned_outputs

# Where a GPU's exp of a large number is inf, NumPy says so as well.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
OPS, TWIN = cuda_ops(), ReferenceOps()
shapes = pytest.mark.parametrize(("tokens", "size"), [(1, 16), (5, 80), (3, 2049), (0, 64)])
dtypes = pytest.mark.parametrize("dtype", list(TOLERANCE))


@dtypes
@shapes
def test_gates_are_those_of_the_twin(tokens: int, size: int, dtype: torch.dtype):
    torch.manual_seed(size)
    wide = torch.full((tokens, 2 * size + 1), torch.nan)
    wide[:, :-1] = torch.randn(tokens, 2 * size) * 8
    x = wide.to(dtype)[:, :-1]
    with poisoned_outputs():
        silu, gelu = OPS.silu_mul(x), OPS.gelu_mul(x)
    assert_equals_twin(silu, TWIN.silu_mul(x))
    assert_equals_twin(gelu, TWIN.gelu_mul(x))


@dtypes
@shapes
def test_gelu_is_its_definition(tokens: int, size: int, dtype: torch.dtype):
    """In float64: far below 0 the twin's own 1 + tanh has no digits left."""
    torch.manual_seed(size)
    x = (torch.randn(tokens, size) * 5).to(dtype)
    with poisoned_outputs():
        ours = OPS.gelu(x)
    expected = F.gelu(x.double(), approximate="tanh").to(dtype)
    torch.testing.assert_close(ours, expected, atol=1e-7, rtol=TOLERANCE[dtype], equal_nan=False)


@shapes
def test_capped_logits_have_all_their_digits(tokens: int, size: int):
    torch.manual_seed(size)
    x = torch.randn(tokens, size) * 10.0 ** torch.randint(-4, 3, (tokens, size))
    expected = (7 * (x.double() / 7).tanh()).float()
    OPS.softcap(x, 7.0)
    torch.testing.assert_close(x, expected, atol=0, rtol=5e-7, equal_nan=False)


def test_the_ends_of_the_range():
    ends = torch.tensor([-torch.inf, -1e38, -60.0, -1e-30, 0.0, 60.0, 1e38, torch.inf, torch.nan])
    capped = ends.clone()
    OPS.softcap(capped, 3.0)
    assert capped[:8].tolist() == [-3.0, -3.0, -3.0, pytest.approx(-1e-30), 0.0, 3.0, 3.0, 3.0]
    assert capped[8].isnan()
    gates = ends[1:7]
    for out in (OPS.silu_mul(torch.cat([gates, torch.ones(6)])[None])[0], OPS.gelu(gates)):
        assert out.tolist() == pytest.approx([0.0, 0.0, -5e-31, 0.0, 60.0, 1e38], rel=1e-6, abs=1e-20)
    assert OPS.gelu_mul(torch.full((1, 8), torch.nan)).isnan().all()
