"""Triton's norms against their twins."""

from __future__ import annotations

import pytest
import torch

from kernels.reference import ReferenceOps
from tests.kernels.interpreted import TOLERANCE, assert_equals_twin, cuda_ops, poisoned_outputs

OPS, TWIN = cuda_ops(), ReferenceOps()
shapes = pytest.mark.parametrize(("tokens", "size"), [(1, 16), (7, 80), (3, 577), (2, 16384), (0, 64)])
dtypes = pytest.mark.parametrize("dtype", list(TOLERANCE))


def rows_apart(tokens: int, size: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """Rows with NaN behind each, as a part of a wider tensor has them."""
    wide = torch.full((tokens, size + 3), torch.nan)
    wide[:, :size] = torch.randn(tokens, size) * scale
    return wide.to(dtype)[:, :size]


@dtypes
@shapes
def test_rows_are_normed_as_by_the_twin(tokens: int, size: int, dtype: torch.dtype):
    torch.manual_seed(size)
    x, weight, bias = rows_apart(tokens, size, dtype, 3.0) + 1, torch.randn(size), torch.randn(size)
    with poisoned_outputs():
        rms, layer = OPS.rms_norm(x, weight, 1e-5), OPS.layer_norm(x, weight, bias, 1e-5)
    assert_equals_twin(rms, TWIN.rms_norm(x, weight, 1e-5))
    assert_equals_twin(layer, TWIN.layer_norm(x, weight, bias, 1e-5))


@dtypes
@shapes
def test_the_residual_becomes_the_sum_and_that_is_normed(tokens: int, size: int, dtype: torch.dtype):
    torch.manual_seed(size)
    x, weight, bias = rows_apart(tokens, size, dtype), torch.randn(size), torch.randn(size)
    residual = rows_apart(tokens, size, dtype)
    before = x.clone()
    for name, arguments in (("rms_norm", (weight, 0.1)), ("layer_norm", (weight, bias, 0.1))):
        ours, twin = residual.clone(), residual.clone()
        with poisoned_outputs():
            normed = getattr(OPS, name)(x, *arguments, ours)
        assert_equals_twin(normed, getattr(TWIN, name)(x, *arguments, twin), 2 * TOLERANCE[dtype])
        # The interpreter cuts float32 to bfloat16 where GPUs round.
        assert_equals_twin(ours, twin, TOLERANCE[dtype] / 2 if dtype is torch.bfloat16 else 0.0)
        assert torch.equal(x, before)


@dtypes
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 64), (9, 80), (20, 128), (3, 256)])
def test_heads_are_normed_in_place_and_their_neighbours_stay(heads: int, head_dim: int, dtype: torch.dtype):
    torch.manual_seed(heads)
    merged, weight = (torch.randn(5, heads + 3, head_dim) * 3).to(dtype), torch.randn(head_dim)
    ours, twin = merged.clone(), merged.clone()
    OPS.norm_heads(ours[:, 2 : 2 + heads], weight, 0.01)
    TWIN.norm_heads(twin[:, 2 : 2 + heads], weight, 0.01)
    assert_equals_twin(ours, twin)
    assert torch.equal(ours[:, :2], merged[:, :2])
    assert torch.equal(ours[:, 2 + heads :], merged[:, 2 + heads :])


def test_no_number_spoils_only_its_row():
    x = torch.randn(3, 100)
    x[1, 7] = torch.nan
    for normed in (OPS.rms_norm(x, torch.ones(100), 1e-5), OPS.layer_norm(x, torch.ones(100), torch.ones(100), 1e-5)):
        assert normed.isnan().all(1).tolist() == [False, True, False]
        assert normed[::2].isfinite().all()
