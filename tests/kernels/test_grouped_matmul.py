"""Grouped matrix product: each segment of rows times its own matrix."""

from __future__ import annotations

import pytest
import torch

from kernels.reference import ReferenceOps
from tests.kernels.interpreted import cuda_ops

COUNTS = [[3, 0, 1, 5], [0, 0, 9, 0], [9, 0, 0, 0], [0, 0, 0, 9], [0, 0, 0, 0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", COUNTS)
def test_segments_are_multiplied_by_their_own_matrices(counts: list[int], dtype: torch.dtype):
    torch.manual_seed(0)
    x, weights = torch.randn(sum(counts), 20).to(dtype), torch.randn(4, 7, 20).to(dtype)
    ours = ReferenceOps().grouped_matmul(x, weights, torch.tensor(counts).cumsum(0))
    groups = torch.arange(4).repeat_interleave(torch.tensor(counts))
    exact = torch.einsum("ri,roi->ro", x.double(), weights[groups].double())
    assert ours.dtype == dtype
    torch.testing.assert_close(ours.double(), exact, atol=1e-5, rtol=1e-5 if dtype is torch.float32 else 1e-2)


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("in_size", "out_size"), [(32, 48), (30, 48), (32, 18)])
def test_the_gpu_form_is_the_reference(counts: list[int], dtype: torch.dtype, in_size: int, out_size: int):
    torch.manual_seed(0)
    x, weights = torch.randn(sum(counts), in_size).to(dtype), torch.randn(len(counts), out_size, in_size).to(dtype)
    ends = torch.tensor(counts).cumsum(0)
    ours = cuda_ops().grouped_matmul(x, weights, ends)
    assert (ours.shape, ours.dtype) == ((sum(counts), out_size), dtype)
    torch.testing.assert_close(ours, ReferenceOps().grouped_matmul(x, weights, ends))


def test_the_host_waits_for_no_value_of_the_gpu():
    """A meta tensor has none."""
    x, weights = (torch.empty(size, dtype=torch.bfloat16, device="meta") for size in ((6, 32), (3, 16, 32)))
    ends = torch.empty(3, dtype=torch.int64, device="meta")
    assert cuda_ops().grouped_matmul(x, weights, ends).shape == (6, 16)
