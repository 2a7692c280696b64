"""Products with matrices of few rows, added to some rows: each CPU variant against the PyTorch twin."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from kernels.low_rank import LowRank, LowRankPart
from kernels.reference import ReferenceOps

if TYPE_CHECKING:
    from kernels.cpu import CpuOps
    from kernels.low_rank import Tokens

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
TOKENS: list[Tokens] = [slice(0, 9), slice(2, 3), slice(3, 3), torch.tensor([7, 1, 4]), torch.tensor([8])]


def factors(ins: int, *outs: int, ranks: tuple[int, ...]) -> LowRank:
    """Parts beside each other, but for a gap behind the first."""
    parts, first = [], 0
    for size, rank in zip(outs, ranks, strict=True):
        parts.append(LowRankPart(first, torch.randn(rank, ins) * ins**-0.5, torch.randn(rank, size)))
        first += size + (32 if first == 0 else 0)
    return LowRank(parts)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("tokens", TOKENS, ids=str)
@pytest.mark.parametrize(
    ("ins", "outs", "ranks"), [(64, (96,), (4,)), (576, (592, 64, 16), (9, 1, 6)), (20, (32, 12), (3, 3))]
)
def test_equals_the_twin_and_the_definition(
    ops: CpuOps, dtype: torch.dtype, tokens: Tokens, ins: int, outs: tuple[int, ...], ranks: tuple[int, ...]
):
    torch.manual_seed(0)
    low_rank = factors(ins, *outs, ranks=ranks)
    x, before = torch.randn(9, ins).to(dtype), torch.randn(9, sum(outs) + 32).to(dtype)
    expected = before.double()
    for first, a, b in low_rank.parts:
        expected[tokens, first : first + b.shape[1]] += x[tokens].double() @ a.T.double() @ b.double()
    for one in (ops, ReferenceOps()):
        out = before.clone()
        one.add_low_rank(out, x, low_rank, tokens)
        torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=TOLERANCE[dtype])
        others = torch.ones(9, dtype=torch.bool)
        others[tokens] = False
        assert torch.equal(out[others], before[others])


def test_a_row_has_the_same_bits_whatever_is_beside_it(ops: CpuOps):
    torch.manual_seed(0)
    low_rank = factors(576, 192, 64, ranks=(7, 16))
    x, before = torch.randn(300, 576), torch.randn(300, 320)
    together = before.clone()
    ops.add_low_rank(together, x, low_rank, slice(0, 300))
    for few in (torch.tensor([299, 4]), slice(17, 18), torch.tensor([0, *range(2, 150, 3)])):
        out = before.clone()
        ops.add_low_rank(out, x, low_rank, few)
        assert torch.equal(out[few], together[few])


def test_the_largest_rank_that_a_config_allows(ops: CpuOps):
    low_rank = factors(16, 16, ranks=(512,))
    x, out = torch.randn(2, 16), torch.zeros(2, 48)
    ops.add_low_rank(out, x, low_rank, slice(0, 2))
    expected = torch.zeros(2, 48)
    ReferenceOps().add_low_rank(expected, x, low_rank, slice(0, 2))
    torch.testing.assert_close(out, expected, atol=1e-3, rtol=1e-4)


def test_the_host_waits_for_no_value_of_the_gpu():
    """A meta tensor has none."""
    parts = [LowRankPart(0, torch.empty(4, 32, device="meta"), torch.empty(4, 16, device="meta"))]
    x, out = (torch.empty(6, size, dtype=torch.bfloat16, device="meta") for size in (32, 16))
    for tokens in (slice(1, 4), torch.empty(3, dtype=torch.int64, device="meta")):
        ReferenceOps().add_low_rank(out, x, LowRank(parts), tokens)
