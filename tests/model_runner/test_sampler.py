"""The sampler against a float64 reference, and its promise that a token depends on (seed, position) alone."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from kernels.gumbel import gumbel_noise, hash_bits, uniforms
from kernels.thresholds import Filters, thresholds
from model_runner.row_keys import row_keys
from protos.messages import Sampling
from tests.model_runner.rows import VOCAB, Rows, check_frequencies, edited_twin, kept_in_float64, logits_of, mask_of

if TYPE_CHECKING:
    from collections.abc import Sequence

# 54: masks ------------------------------------------------------------------------------------


FILTERS = [
    (top_k, top_p, min_p)
    for top_k in (0, 1, 40, 1500, VOCAB, VOCAB + 7)
    for top_p in (1.0, 0.9, 0.3, 1e-6)
    for min_p in (0.0, 0.02, 1.0)
]


def filters_of(top_k: Sequence[int], top_p: Sequence[float], min_p: Sequence[float]) -> Filters:
    wide = torch.tensor([top_p, min_p], dtype=torch.float64)
    return Filters(torch.tensor(top_k), wide[0], wide[1].log())


def check_masks(logits: torch.Tensor, num_candidates: int) -> None:
    """All rows together, where the widest filter decides how they are computed, and each alone."""
    filters = filters_of(*zip(*FILTERS, strict=True))
    together = thresholds(logits, filters, num_candidates)
    for row, parameters in enumerate(FILTERS):
        expected = kept_in_float64(logits[row].numpy(), *parameters)
        alone = thresholds(logits[row : row + 1], filters[row : row + 1], num_candidates)
        for limit in (together[row], alone):
            kept = (logits[row] >= limit).numpy()
            assert np.array_equal(kept, expected), (parameters, int(kept.sum()), int(expected.sum()))


@pytest.mark.parametrize("num_candidates", [16, 1024, VOCAB])
@pytest.mark.parametrize("scale", [0.01, 1.0, 8.0])
def test_54_masks_equal_a_float64_reference_on_random_logits(scale: float, num_candidates: int):
    check_masks(logits_of(len(FILTERS), scale=scale), num_candidates)


@pytest.mark.parametrize("num_candidates", [16, 1024])
def test_54_masks_equal_a_float64_reference_with_ties_and_k_over_the_vocabulary(num_candidates: int):
    check_masks((logits_of(len(FILTERS)) * 2).round() / 2, num_candidates)
    check_masks(torch.zeros(len(FILTERS), VOCAB), num_candidates)


def test_54_masks_with_tokens_already_ruled_out():
    logits = logits_of(len(FILTERS))
    logits[:, ::3] = -torch.inf
    check_masks(logits, 64)


def test_54_top_p_that_the_larger_tokens_reach_exactly():
    logits = torch.tensor([[-torch.inf, -1.5, -torch.inf, 0.0]])
    share = 1 / (1 + math.exp(-1.5))
    assert share * (1 + math.exp(-1.5)) == 1.0
    for top_p, kept in ((share, 1), (math.nextafter(share, 1), 2)):
        filters = filters_of([0], [top_p], [0.0])
        assert int((logits >= thresholds(logits, filters)).sum()) == kept


def test_54_a_filter_that_no_row_uses_is_not_computed(monkeypatch: pytest.MonkeyPatch):
    def fail(*arguments: object, **options: object) -> None:
        raise AssertionError("computed")

    monkeypatch.setattr("kernels.reference_sampling.thresholds", fail)
    Rows([Sampling(temperature=1.0, seed=1)] * 3).draw(logits_of(3))
    monkeypatch.setattr("kernels.reference_sampling.gumbel_noise", fail)
    Rows([Sampling()] * 3).draw(logits_of(3))


# 53: seeds ------------------------------------------------------------------------------------


def mixed_samplings(size: int) -> list[Sampling]:
    """Greedy, plain, filtered rows by turns, with seeds of all sizes."""
    kinds = (
        lambda seed: Sampling(seed=seed),
        lambda seed: Sampling(temperature=1.0, seed=seed),
        lambda seed: Sampling(temperature=0.7, top_p=0.9, top_k=50, seed=seed),
        lambda seed: Sampling(temperature=2.5, min_p=0.001, seed=seed),
    )
    return [kinds[row % 4](row * 0x0123456789ABCDEF % (1 << 64)) for row in range(size)]


def test_53_same_seed_same_token_alone_and_in_a_batch_of_64():
    samplings, logits = mixed_samplings(64), logits_of(64)
    positions = [5 + 3 * row for row in range(64)]
    together = Rows(samplings).draw(logits, positions)
    for row in range(64):
        assert Rows(samplings[row : row + 1]).draw(logits[row : row + 1], positions[row]) == [together[row]]


def test_53_same_token_whatever_the_chunks_and_the_order_of_rows():
    samplings, logits = mixed_samplings(40), logits_of(40)
    together = Rows(samplings).draw(logits)
    assert Rows(samplings, chunk_cells=1).draw(logits) == together
    assert Rows(samplings, chunk_cells=1 << 30).draw(logits) == together
    assert Rows(samplings[::-1]).draw(logits.flip(0)) == together[::-1]


def test_53_another_seed_or_position_is_another_draw():
    flat = torch.zeros(1, VOCAB)
    draws = {
        tuple(Rows([Sampling(temperature=1.0, seed=seed)]).draw(flat, position))
        for seed in range(20)
        for position in range(5, 25)
    }
    assert len(draws) > 350


FROZEN_KEYS = [[-12790593, 1210155558], [-114985391, 941092317], [-1616487141, 688258256]]
FROZEN_BITS = [
    [269853274, 334951582, 106593927, -2099418663],
    [110268886, -902402757, -1704164120, -1488068835],
    [1005696419, 1868988992, -1872548262, 1803448644],
]


def test_53_noise_is_the_same_in_every_process():
    """Frozen numbers: a change here changes what every stored seed replays."""
    keys = row_keys(np.array([0, 1, (1 << 64) - 1], np.uint64), np.array([0, 5, 1 << 20]))
    assert keys.view(np.int32).reshape(-1, 2).tolist() == FROZEN_KEYS
    bits = hash_bits(torch.from_numpy(keys), 4)
    assert bits.tolist() == FROZEN_BITS


def test_53_hash_equals_unsigned_arithmetic():
    keys = row_keys(np.arange(50, dtype=np.uint64) << np.uint64(33), np.arange(50))

    def mix(bits: np.ndarray) -> np.ndarray:
        bits = (bits ^ (bits >> np.uint32(16))) * np.uint32(0x85EBCA6B)
        bits = (bits ^ (bits >> np.uint32(13))) * np.uint32(0xC2B2AE35)
        return bits ^ (bits >> np.uint32(16))

    unsigned = keys.view(np.uint32).reshape(-1, 2)
    expected = mix(mix(np.arange(VOCAB, dtype=np.uint32) ^ unsigned[:, :1]) + unsigned[:, 1:])
    bits = hash_bits(torch.from_numpy(keys), VOCAB)
    assert np.array_equal(bits.numpy().view(np.uint32), expected)
    numbers = uniforms(bits).double().numpy()
    assert numbers.min() > 0
    assert numbers.max() < 1
    assert np.abs(numbers / ((expected + 0.5) / 2.0**32) - 1).max() < 2.0**-23


def test_53_uniforms_stay_inside_the_open_interval():
    ends = torch.tensor([0, 1, -1, -2, 2**31 - 1, -(2**31)], dtype=torch.int32)
    numbers = uniforms(ends)
    assert numbers.tolist() == pytest.approx([0.5 * 2**-32, 1.5 * 2**-32, 1 - 2**-24, 1 - 2**-24, 0.5, 0.5])
    assert (-(-torch.log1p(-numbers)).log()).isfinite().all()


# 57, 58, 17 -----------------------------------------------------------------------------------


def test_57_rows_beside_a_row_never_influence_it():
    """Whatever padding leaves in the other rows, NaN included."""
    samplings, logits = mixed_samplings(8), logits_of(8)
    alone = Rows(samplings).draw(logits)
    padded = torch.cat([logits, torch.full((3, VOCAB), torch.nan)])
    assert (
        Rows([*samplings, Sampling(temperature=1.0, top_p=0.5), Sampling(), Sampling(min_p=0.1)]).draw(padded)[:8]
        == alone
    )


def test_58_temperature_0_is_exact_argmax():
    logits = logits_of(16)
    logits[3, [5, 900]] = 50.0
    expected = logits.argmax(-1).tolist()
    assert Rows([Sampling(seed=row) for row in range(16)]).draw(logits) == expected
    mixed = [Sampling(temperature=1.0) if row % 2 else Sampling() for row in range(16)]
    assert Rows(mixed).draw(logits)[::2] == expected[::2]


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 1e-5, 2e-5])
def test_58_tiny_temperatures_do_not_overflow(temperature: float):
    logits = logits_of(6, scale=1000.0)
    sampling = Sampling(temperature=temperature, top_p=0.9, top_k=10, min_p=0.1)
    assert Rows([sampling] * 6).draw(logits) == logits.argmax(-1).tolist()
    assert Rows([Sampling(temperature=temperature)] * 6).draw(logits) == logits.argmax(-1).tolist()


def test_17_below_min_tokens_eos_and_stop_ids_are_never_sampled():
    logits = torch.zeros(4, VOCAB)
    logits[:, [7, 8, 100]] = 30.0
    logits[:, 11] = 20.0
    samplings = [
        Sampling(min_tokens=3, stop_token_ids=(100,)),
        Sampling(min_tokens=3, stop_token_ids=(100,), temperature=1.0),
        Sampling(min_tokens=3, stop_token_ids=(100,), ignore_eos=True),
        Sampling(min_tokens=0, stop_token_ids=(100,)),
    ]
    for position in (5, 6, 7):  # output lengths 0, 1, 2 after a prompt of 5
        assert Rows(samplings).draw(logits, position) == [11, 11, 7, 7]
    drawn = Rows(samplings).draw(logits, 8)
    assert drawn[0] == drawn[2] == drawn[3] == 7
    assert drawn[1] in (7, 8, 100)


# 59 -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sampling",
    [Sampling(temperature=1.0), Sampling(temperature=0.6, top_p=0.9), Sampling(temperature=1.7, top_k=12, min_p=0.05)],
)
def test_59_sampled_frequencies_pass_a_chi_squared_test_over_10_000_draws(sampling: Sampling):
    vocab, draws = 40, 10_000
    logits = logits_of(1, seed=3, scale=1.5, vocab=vocab)
    scaled = (logits[0] / np.float32(sampling.temperature)).numpy()
    kept = kept_in_float64(scaled, sampling.top_k, sampling.top_p, sampling.min_p)
    weights = np.where(kept, np.exp(scaled.astype(np.float64)), 0.0)
    # Half of the draws are positions of one seed, half are seeds at one position.
    samplings = [replace(sampling, seed=11)] * 5000 + [replace(sampling, seed=seed) for seed in range(5000)]
    positions = [*range(5, 5005), *[5] * 5000]
    check_frequencies(Rows(samplings).draw(logits.expand(draws, vocab), positions), weights)


def test_59_frequencies_with_every_edit_and_filter_together():
    vocab, draws = 60, 10_000
    logits = logits_of(1, seed=4, scale=1.5, vocab=vocab)
    likely = logits[0].argsort(descending=True).tolist()
    history = [*likely[:6], *likely[30:33], likely[1], likely[2], likely[2], likely[3]], 9
    allowed = np.ones(vocab, np.bool_)
    allowed[likely[4:40:7]] = False
    sampling = Sampling(
        temperature=1.3,
        top_k=25,
        top_p=0.97,
        min_p=0.002,
        repetition_penalty=1.3,
        frequency_penalty=0.4,
        presence_penalty=0.3,
        logit_bias={likely[8]: 1.5, likely[4]: 50.0},
        allowed_token_ids=tuple(likely[:50]),
        bad_words=((likely[2], likely[3], likely[0]), (likely[9],)),
        min_tokens=9,
        stop_token_ids=(likely[5],),
    )
    scaled = (edited_twin(logits[0].numpy(), sampling, history, allowed) / np.float32(1.3)).astype(np.float32)
    kept = kept_in_float64(scaled, sampling.top_k, sampling.top_p, sampling.min_p)
    weights = np.where(kept, np.exp(scaled.astype(np.float64)), 0.0)
    rows = Rows([replace(sampling, seed=seed) for seed in range(draws)], histories=[history] * draws)
    mask = mask_of(dict.fromkeys(range(draws), allowed))
    check_frequencies(rows.draw(logits.expand(draws, vocab), mask=mask), weights)


def test_59_neighbouring_tokens_positions_and_seeds_are_independent():
    keys = row_keys(np.repeat(np.arange(40, dtype=np.uint64), 40), np.tile(np.arange(40), 40))
    noise = gumbel_noise(torch.from_numpy(keys), 256).double().reshape(40, 40, 256)
    noise -= noise.mean()
    for moved in (noise[1:] * noise[:-1], noise[:, 1:] * noise[:, :-1], noise[..., 1:] * noise[..., :-1]):
        correlation = moved.mean() / noise.square().mean()
        assert abs(correlation) < 4.5 / math.sqrt(moved.numel())
    assert float(noise.square().mean()) == pytest.approx(math.pi**2 / 6, rel=0.02)
