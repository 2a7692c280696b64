"""Draws and thresholds of each CPU variant against their twins, and against float64."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from kernels.gumbel import gumbel_noise, hash_bits
from kernels.reference import ReferenceOps
from tests.kernels.conftest import cpu_ops
from tests.kernels.sampling_cases import FILTERS, LOGITS, filters_of, floats, random_keys
from tests.model_runner.rows import check_frequencies, kept_in_float64

if TYPE_CHECKING:
    from kernels.cpu import CpuOps

TWIN = ReferenceOps()


def kept(ops: CpuOps, logits: torch.Tensor, columns: list[tuple[int, float, float]]) -> torch.Tensor:
    """Which of the logits the filters leave."""
    rows, ones = torch.arange(len(logits)), torch.ones(len(logits), dtype=torch.float64)
    return ops.scale_and_filter(logits, rows, ones, filters_of(columns)) > -torch.inf


@pytest.mark.parametrize("vocab_size", [1, 15, 1000, 2051, 49_152])
@pytest.mark.parametrize("filtered", [False, True])
def test_tokens_are_those_of_the_twin(ops: CpuOps, vocab_size: int, filtered: bool):
    rows = torch.randperm(32)[:17]
    logits = torch.full((32, vocab_size), torch.nan)
    logits[rows] = torch.randn(17, vocab_size) * 3
    temperature = torch.rand(17, dtype=torch.float64).add(0.1)
    filters = filters_of(FILTERS[:17]) if filtered else None
    keys, before = random_keys(17), logits.clone()
    drawn = ops.draw(logits, rows, temperature, filters, keys)
    assert drawn.dtype is torch.int32
    assert drawn.tolist() == TWIN.draw(logits, rows, temperature, filters, keys).tolist()
    assert logits.view(torch.int32).equal(before.view(torch.int32))


def test_noise_is_the_twins_at_its_ends_too(ops: CpuOps):
    """Two logits that differ by hardly more than their noise does; keys that hash to the extremes are sought."""
    keys = random_keys(400_000)
    numbers = hash_bits(keys, 2).long() & 0xFFFFFFFF
    extreme = torch.cat([numbers[:, token].argsort(descending=end)[:40] for token in (0, 1) for end in (False, True)])
    keys = torch.cat([keys[extreme], keys[:400]])
    first, second = gumbel_noise(keys, 2).unbind(1)
    rows, ones = torch.arange(len(keys)), torch.ones(len(keys), dtype=torch.float64)
    for token, margin in ((0, 2e-5), (1, -2e-5)):
        logits = torch.stack([second - first + margin, torch.zeros(len(keys))], 1)
        assert ops.draw(logits, rows, ones, None, keys).tolist() == [token] * len(keys)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_row_draws_the_same_alone_and_with_any_number_of_threads(variant: str, threads: int):
    ops = cpu_ops(variant, threads)
    logits, keys = torch.randn(40, 2500), random_keys(40)
    temperature = torch.ones(40, dtype=torch.float64)
    filters = filters_of([(50, 0.9, 0.01)] * 40)
    together = ops.draw(logits, torch.arange(40), temperature, filters, keys)
    for row in (0, 17, 39):
        alone = slice(row, row + 1)
        assert ops.draw(logits, torch.tensor([row]), temperature[alone], filters[alone], keys[alone]) == together[row]


def test_58_of_equal_logits_the_first_wins_and_nothing_is_drawn_from_nothing(ops: CpuOps):
    logits = torch.full((6, 3000), -torch.inf)
    logits[0, [5, 900, 2999]] = torch.inf
    logits[1] = torch.randn(3000)
    logits[1, 2999] = torch.nan
    logits[2] = torch.nan
    logits[4, 1] = torch.inf
    logits[5, 2998] = -3.4e38
    rows, ones = torch.arange(6), torch.ones(6, dtype=torch.float64)
    for filters in (None, filters_of([(2, 0.9, 0.1)] * 6)):
        assert ops.draw(logits, rows, ones, filters, random_keys(6)).tolist() == [5, -1, -1, -1, 1, 2998]


def test_59_frequencies_pass_a_chi_squared_test(ops: CpuOps):
    logits = torch.randn(32) * 1.5
    count = 4000
    ones = torch.ones(count, dtype=torch.float64)
    drawn = ops.draw(logits.expand(count, -1).contiguous(), torch.arange(count), ones, None, random_keys(count))
    assert check_frequencies(drawn.tolist(), logits.double().softmax(-1).numpy()) > 20


@pytest.mark.parametrize("kind", LOGITS)
def test_54_what_is_kept_equals_the_twin_and_float64(ops: CpuOps, kind: str):
    logits = LOGITS[kind]((len(FILTERS), 1537))
    ours, twin = kept(ops, logits, FILTERS), kept(TWIN, logits, FILTERS)
    for row, parameters in enumerate(FILTERS):
        assert ours[row].equal(twin[row]), parameters
        expected = kept_in_float64(logits[row].numpy(), *parameters) & (logits[row] > -torch.inf).numpy()
        assert np.array_equal(ours[row].numpy(), expected), parameters


def test_54_of_a_whole_vocabulary_what_is_kept_equals_the_twin(ops: CpuOps):
    """Wide and narrow: within reach of the first look, beyond it, and beyond what top-p needs."""
    logits = torch.cat([torch.randn(len(FILTERS), 49_152) * spread for spread in (0.3, 1.0, 2.5, 6.0)])
    assert kept(ops, logits, FILTERS * 4).equal(kept(TWIN, logits, FILTERS * 4))


def test_54_each_of_a_few_logits_can_be_the_border(ops: CpuOps):
    logits = torch.randn(80, 9) * torch.tensor([0.1, 1.0, 30.0, 1e-4]).repeat(20)[:, None]
    columns = [(row % 10, 1.0 if row % 3 else (row + 1) / 80, 0.0) for row in range(80)]
    ours = kept(ops, logits, columns)
    for row, parameters in enumerate(columns):
        assert np.array_equal(ours[row].numpy(), kept_in_float64(logits[row].numpy(), *parameters))


def test_54_a_share_of_the_largest_that_lies_between_two_floats(ops: CpuOps):
    highest = torch.linspace(-5, 5, 40)
    border = highest.double() + math.log(0.37)
    near = border.float()
    further = [near.nextafter(torch.tensor(end)) for end in (torch.inf, -torch.inf)]
    logits = torch.stack([highest, near, *further], 1)
    assert kept(ops, logits, [(0, 1.0, 0.37)] * 40).equal(logits.double() >= border[:, None])


def test_54_logits_are_divided_as_by_the_twin(ops: CpuOps):
    logits, rows = torch.randn(5, 1000) * 4, torch.tensor([4, 2, 0])
    temperature, filters = floats(0.3, 1.7, 0.9), filters_of([(0, 0.8, 0.0), (7, 1.0, 0.0), (0, 1.0, 0.3)])
    ours = ops.scale_and_filter(logits, rows, temperature, filters)
    assert ours.equal(TWIN.scale_and_filter(logits, rows, temperature, filters))
    assert 0 < ours.isfinite().sum() < 900


def test_54_top_p_that_the_larger_tokens_reach_exactly(ops: CpuOps):
    logits = torch.tensor([[-torch.inf, -1.5, -torch.inf, 0.0]])
    share = 1 / (1 + math.exp(-1.5))
    for top_p, count in ((share, 1), (math.nextafter(share, 1), 2)):
        assert int(kept(ops, logits, [(0, top_p, 0.0)]).sum()) == count


def test_54_what_is_not_a_number_ends_no_search(ops: CpuOps):
    logits = torch.randn(4, 300)
    logits[0, 5], logits[1], logits[2], logits[3, 9] = torch.nan, torch.nan, -torch.inf, torch.inf
    assert kept(ops, logits, [(299, 0.9, 0.01)] * 4).sum(1).tolist()[2:] == [0, 1]


def test_54_where_one_is_infinite_the_largest_alone_are_kept(ops: CpuOps):
    logits = torch.randn(3, 300)
    logits[0, 7] = logits[1, [3, 200]] = logits[2, 299] = torch.inf
    assert kept(ops, logits, [(0, 0.9, 0.0), (0, 0.5, 0.0), (5, 0.9, 0.0)]).equal(logits == torch.inf)
