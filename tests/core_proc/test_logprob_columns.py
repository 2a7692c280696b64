"""Log-probabilities on their way from a step to a front end. The harness compares every row of them."""

from __future__ import annotations

import numpy as np
import pytest

from core_proc.logprobs import select_tokens, to_columns
from protos.step import Logprobs
from tests.core_proc.harness import Harness, logprob_rows


def make(index: list[int], widths: list[int]) -> Logprobs:
    """Row i tells -i, rank i + 1 and candidates that count on from row to row."""
    n, total = len(index), sum(widths)
    return Logprobs(
        index=np.array(index, np.int32),
        logprobs=-np.arange(n, dtype=np.float32),
        ranks=np.arange(1, n + 1, dtype=np.int32),
        widths=np.array(widths, np.int32),
        top_ids=np.arange(total, dtype=np.int32),
        top_logprobs=-np.arange(total, dtype=np.float32),
    )


def test_selection_keeps_the_rows_of_the_chosen_tokens_and_numbers_them_anew() -> None:
    chosen = np.array([True, False, True, False, True])
    selected = select_tokens(make([1, 2, 4], [2, 0, 3]), chosen)
    assert selected is not None
    assert selected.index.tolist() == [1, 2]
    assert selected.logprobs.tolist() == [-1, -2]
    assert selected.widths.tolist() == [0, 3]
    assert selected.top_ids.tolist() == [2, 3, 4]
    assert select_tokens(None, chosen) is None


def test_dropping_a_token_without_logprobs_renumbers_those_behind_it() -> None:
    selected = select_tokens(make([2], [1]), np.array([False, True, True]))
    assert selected is not None
    assert selected.index.tolist() == [1]


def test_parts_are_joined_behind_one_another() -> None:
    columns = to_columns([(0, make([1], [2])), (3, make([0, 2], [0, 1]))])
    assert columns is not None
    rows = logprob_rows(columns)
    assert [(index, row.logprob, row.rank) for index, row in rows] == [(1, 0, 1), (3, 0, 1), (5, -1, 2)]
    assert [row.top for _, row in rows] == [[(0, 0), (1, -1)], [], [(0, 0)]]
    assert to_columns([]) is None


@pytest.mark.parametrize("depth", [1, 2])
def test_each_token_of_those_who_ask_is_told_once(depth: int) -> None:
    harness = Harness(depth=depth)
    streams = [harness.add(range(2, 10), 6, client=i % 2, logprobs=[None, 0, 2][i % 3]) for i in range(6)]
    harness.step()
    harness.preempt(streams[1])
    harness.preempt(streams[2])
    harness.run_to_end()
    assert [len(stream.logprobs) for stream in streams] == [0, 6, 6, 0, 6, 6]


@pytest.mark.parametrize("depth", [1, 2])
def test_prompt_is_told_once_in_order_though_chunked_and_preempted(depth: int) -> None:
    harness = Harness(budget=16, depth=depth)
    stream = harness.add(range(2, 42), prompt_logprobs=1)
    harness.issue()
    if depth == 2:
        harness.issue()
    harness.land()
    harness.preempt(stream)
    harness.run_to_end()
    assert stream.prompt_logprobs == list(range(1, 40))


def test_prompt_logprobs_do_not_read_the_cache_but_fill_it() -> None:
    harness = Harness()
    harness.add(range(2, 42))
    harness.run_to_end()
    asking = harness.add(range(2, 42), prompt_logprobs=0)
    harness.run_to_end()
    assert asking.admitted[0].cached_tokens == 0
    other = Harness()
    other.add(range(2, 42), prompt_logprobs=0)
    other.run_to_end()
    plain = other.add(range(2, 42))
    other.run_to_end()
    assert plain.admitted[0].cached_tokens == 36


def test_prompt_that_is_told_already_is_read_from_the_cache_after_a_preemption() -> None:
    harness = Harness()
    stream = harness.add(range(2, 42), 8, prompt_logprobs=0)
    while len(stream.token_ids) < 2:
        harness.step()
    harness.preempt(stream)
    step = harness.issue()
    assert step is not None
    assert step.starts.tolist() == [40]
    harness.run_to_end()


def test_prompt_of_a_request_that_is_over_is_not_told() -> None:
    harness = Harness(budget=16, depth=2)
    stream = harness.add(range(2, 42), prompt_logprobs=0)
    harness.issue()
    harness.abort(stream)
    harness.land()
    assert stream.prompt_logprobs == []
