"""Grouped matrix product: each segment of rows times its own matrix."""

from __future__ import annotations

import pytest
import torch

from kernels.reference import ReferenceOps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [[3, 0, 1, 5], [0, 0, 9, 0], [9, 0, 0, 0], [0, 0, 0, 9], [0, 0, 0, 0]])
def test_segments_are_multiplied_by_their_own_matrices(counts: list[int], dtype: torch.dtype):
    torch.manual_seed(0)
    x, weights = torch.randn(sum(counts), 20).to(dtype), torch.randn(4, 7, 20).to(dtype)
    ours = ReferenceOps().grouped_matmul(x, weights, torch.tensor(counts).cumsum(0))
    groups = torch.arange(4).repeat_interleave(torch.tensor(counts))
    exact = torch.einsum("ri,roi->ro", x.double(), weights[groups].double())
    assert ours.dtype == dtype
    torch.testing.assert_close(ours.double(), exact, atol=1e-5, rtol=1e-5 if dtype is torch.float32 else 1e-2)
