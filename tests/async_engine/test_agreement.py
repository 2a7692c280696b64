"""What the comparison with float32 counts, on outputs made up for it."""

from __future__ import annotations

import dataclasses

import pytest

from tests.bench.agreement import Divergence, Sample, compare, divergences

EXACT = Sample(
    texts=[[1, 2, 3, 4], [5, 6, 7, 8]], gaps=[[1.0, 0.5, 0.01, 2.0]] * 2, logprobs=[-1.0, -2.0], perplexity=10.0
)


def test_equal_outputs_agree() -> None:
    agreement = compare(EXACT, EXACT)
    assert (agreement.same_texts, agreement.same_tokens, agreement.widest_gap) == (1.0, 1.0, 0.0)
    assert agreement.is_enough


def test_the_first_difference_counts_with_the_gap_it_has_in_float32() -> None:
    ours = dataclasses.replace(EXACT, texts=[[1, 2, 9, 4], [5, 6, 7, 8]], gaps=[[0.0] * 4] * 2)
    assert divergences(ours, EXACT) == [Divergence(prompt=0, token=2, gap=0.01)]
    agreement = compare(ours, EXACT)
    assert (agreement.same_texts, agreement.same_tokens, agreement.widest_gap) == (0.5, 0.75, 0.01)


@pytest.mark.parametrize(("perplexity", "is_enough"), [(10.009, True), (10.011, False), (9.989, False)])
def test_perplexity_may_change_by_a_thousandth(perplexity: float, is_enough: bool) -> None:
    agreement = compare(dataclasses.replace(EXACT, logprobs=[-1.25, -2.0], perplexity=perplexity), EXACT)
    assert agreement.is_enough is is_enough
    assert (agreement.mean_logprob_error, agreement.worst_logprob_error) == (0.125, 0.25)


def test_a_wide_gap_is_not_enough_however_rare() -> None:
    exact = dataclasses.replace(EXACT, texts=EXACT.texts * 20, gaps=[[0.03] * 4] * 40)
    ours = dataclasses.replace(exact, texts=[[1, 2, 3, 9], *exact.texts[1:]])
    agreement = compare(ours, exact)
    assert agreement.same_texts > 0.95
    assert not agreement.is_enough
