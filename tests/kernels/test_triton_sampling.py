"""Triton's draws and thresholds against their twins, and against float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from kernels.gumbel import gumbel_noise as twin_noise
from kernels.gumbel import hash_bits
from kernels.reference import ReferenceOps
from kernels.thresholds import thresholds as twin_thresholds
from kernels.triton_sampling import gumbel_noise
from kernels.triton_thresholds import thresholds
from tests.kernels.interpreted import AMPERE, cuda_ops, poisoned_outputs
from tests.kernels.sampling_cases import FILTERS, LOGITS, filters_of, floats, random_keys
from tests.model_runner.rows import check_frequencies, kept_in_float64

OPS, TWIN = cuda_ops(), ReferenceOps()
VOCABULARIES = [1, 1000, 2051]


# draws ----------------------------------------------------------------------------------------


@triton.jit
def noise_kernel(out, keys, SIZE: tl.constexpr):
    token_ids = tl.arange(0, SIZE)
    row = tl.program_id(0)
    tl.store(out + row * SIZE + token_ids, gumbel_noise(token_ids, tl.load(keys + row)))


def noise_of(keys: torch.Tensor) -> torch.Tensor:
    """[rows, 1024]."""
    out = torch.full((len(keys), 1024), torch.nan)
    noise_kernel[(len(keys),)](out, keys, SIZE=1024)
    return out


def test_53_noise_is_that_of_other_devices():
    """From its smallest numbers to its largest: keys that hash to them are looked for."""
    keys = random_keys(4000)
    extreme = torch.cat([bits.argsort()[:2] for bits in (_unsigned(keys), -_unsigned(keys))])
    keys = torch.cat([keys[extreme], keys[:12]])
    torch.testing.assert_close(noise_of(keys), twin_noise(keys, 1024), atol=3e-7, rtol=5e-7, equal_nan=False)


def _unsigned(keys: torch.Tensor) -> torch.Tensor:
    """Of token 0."""
    return hash_bits(keys, 1)[:, 0].long() & 0xFFFFFFFF


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
@pytest.mark.parametrize("filtered", [False, True])
def test_tokens_are_those_of_the_twin(vocab_size: int, filtered: bool):
    torch.manual_seed(vocab_size)
    rows = torch.randperm(16)[:8]
    logits = torch.full((16, vocab_size), torch.nan)
    logits[rows] = torch.randn(8, vocab_size) * 3
    temperature = torch.rand(8, dtype=torch.float64).add(0.1)
    filters = filters_of(FILTERS[1:17:2]) if filtered else None
    keys, before = random_keys(8), logits.clone()
    with poisoned_outputs():
        drawn = OPS.draw(logits, rows, temperature, filters, keys)
        largest = OPS.argmax(logits, rows)
    assert drawn.tolist() == TWIN.draw(logits, rows, temperature, filters, keys).tolist()
    assert largest.tolist() == TWIN.argmax(logits, rows).tolist()
    assert largest.dtype is drawn.dtype is torch.int32
    assert logits.view(torch.int32).equal(before.view(torch.int32))


def test_a_row_draws_the_same_however_it_is_cut():
    logits, keys, temperature = torch.randn(40, 2500), random_keys(40), torch.ones(40, dtype=torch.float64)
    rows = torch.arange(40)
    together = OPS.draw(logits, rows, temperature, None, keys)
    for row in (0, 17, 39):
        alone = slice(row, row + 1)
        for ops in (OPS, cuda_ops(AMPERE)):
            assert ops.draw(logits, rows[alone], temperature[alone], None, keys[alone]) == together[row]


def test_58_of_equal_logits_the_first_wins_and_nothing_is_drawn_from_nothing():
    logits = torch.randn(6, 3000)
    logits[0, [5, 900, 2999]] = 50.0
    logits[1] = 0.0
    logits[2] = -torch.inf
    logits[3, 2999] = torch.nan
    logits[4, 1] = torch.inf
    logits[5] = -torch.inf
    logits[5, 2998] = -3.4e38
    assert OPS.argmax(logits).tolist() == [5, 0, -1, -1, 1, 2998]
    rows, ones = torch.arange(6), torch.ones(6, dtype=torch.float64)
    for filters in (None, filters_of([(2, 0.9, 0.1)] * 6)):
        drawn = OPS.draw(logits, rows, ones, filters, random_keys(6)).tolist()
        assert drawn[2:] == [-1, -1, 1, 2998]
        assert filters is None or drawn[0] in (5, 900, 2999)


def test_59_frequencies_pass_a_chi_squared_test():
    """Of the noise: each 32 tokens of a row are a draw from logits of their own."""
    torch.manual_seed(1)
    logits = torch.randn(32) * 1.5
    drawn = (noise_of(random_keys(120)).view(-1, 32) + logits).argmax(-1)
    assert check_frequencies(drawn.tolist(), logits.double().softmax(-1).numpy()) > 20


# thresholds -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LOGITS)
def test_54_what_is_kept_equals_the_twin_and_float64(kind: str):
    torch.manual_seed(7)
    rows = torch.randperm(len(FILTERS))
    logits = LOGITS[kind]((len(FILTERS), 1537))
    ones = torch.ones(len(FILTERS), dtype=torch.float64)
    with poisoned_outputs():
        limits = thresholds(logits, rows, ones, filters_of(FILTERS))
    twin = twin_thresholds(logits[rows], filters_of(FILTERS))
    for place, (row, parameters) in enumerate(zip(rows.tolist(), FILTERS, strict=True)):
        kept = logits[row] >= limits[place]
        assert kept.equal(logits[row] >= twin[place]), parameters
        assert np.array_equal(kept.numpy(), kept_in_float64(logits[row].numpy(), *parameters)), parameters


def test_54_each_of_a_few_logits_can_be_the_border():
    torch.manual_seed(9)
    logits = torch.randn(80, 9) * torch.tensor([0.1, 1.0, 30.0, 1e-4]).repeat(20)[:, None]
    columns = [(row % 10, 1.0 if row % 3 else (row + 1) / 80, 0.0) for row in range(80)]
    limits = thresholds(logits, torch.arange(80), torch.ones(80, dtype=torch.float64), filters_of(columns))
    for row, parameters in enumerate(columns):
        assert np.array_equal((logits[row] >= limits[row]).numpy(), kept_in_float64(logits[row].numpy(), *parameters))


def test_54_a_share_of_the_largest_that_lies_between_two_floats():
    highest = torch.linspace(-5, 5, 40)
    border = highest.double() + math.log(0.37)
    near = border.float()
    further = [near.nextafter(torch.tensor(end)) for end in (torch.inf, -torch.inf)]
    logits = torch.stack([highest, near, *further], 1)
    ones = torch.ones(40, dtype=torch.float64)
    limits = thresholds(logits, torch.arange(40), ones, filters_of([(0, 1.0, 0.37)] * 40))
    assert (logits >= limits[:, None]).equal(logits.double() >= border[:, None])


def test_54_logits_are_divided_as_by_the_twin():
    torch.manual_seed(8)
    logits, rows = torch.randn(5, 1000) * 4, torch.tensor([4, 2, 0])
    temperature, filters = floats(0.3, 1.7, 0.9), filters_of([(0, 0.8, 0.0), (7, 1.0, 0.0), (0, 1.0, 0.3)])
    ours = OPS.scale_and_filter(logits, rows, temperature, filters)
    assert ours.equal(TWIN.scale_and_filter(logits, rows, temperature, filters))
    assert 0 < ours.isfinite().sum() < 900


def test_54_top_p_that_the_larger_tokens_reach_exactly():
    logits = torch.tensor([[-torch.inf, -1.5, -torch.inf, 0.0]])
    share = 1 / (1 + math.exp(-1.5))
    for top_p, kept in ((share, 1), (math.nextafter(share, 1), 2)):
        limits = thresholds(logits, torch.zeros(1, dtype=torch.int64), floats(1.0), filters_of([(0, top_p, 0.0)]))
        assert int((logits >= limits).sum()) == kept


def test_54_what_is_not_a_number_ends_no_search():
    logits = torch.randn(4, 300)
    logits[0, 5], logits[1], logits[2], logits[3, 9] = torch.nan, torch.nan, -torch.inf, torch.inf
    rows, ones = torch.arange(4), torch.ones(4, dtype=torch.float64)
    limits = thresholds(logits, rows, ones, filters_of([(299, 0.9, 0.01)] * 4))
    assert not limits.isnan().any()
    assert (logits >= limits[:, None]).sum(1).tolist()[2:] == [300, 1]
