"""How a request ends by itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from core_proc.intake import repeats
from protos.messages import FinishReason, Repetition
from tests.core_proc.harness import Harness
from tests.fakes import EOS

STOP = 1


def end_of(harness: Harness, **fields: Any) -> tuple[FinishReason | None, int, int]:
    """(reason, stop token, output tokens) of a request run to its end."""
    stream = harness.add(range(6), **fields)
    harness.run_to_end()
    assert stream.finished is not None
    return stream.reason, stream.finished.stop_token_id, len(stream.token_ids)


def test_one_token_finishes_in_the_step_of_the_last_prefill_chunk() -> None:
    harness = Harness(budget=4)
    stream = harness.add(range(10), 1)
    for _ in range(3):
        assert stream.reason is None
        harness.step()
    assert stream.reason is FinishReason.MAX_TOKENS
    assert not harness.step()
    harness.assert_empty()


@pytest.mark.parametrize("depth", [1, 2, 3])
class TestOrderOfEnds:
    def test_end_of_sequence_comes_before_a_stop_id_and_before_length(self, depth: int) -> None:
        fields = {"forced": {2: EOS}, "stop_token_ids": (EOS,), "max_tokens": 3}
        assert end_of(Harness(depth=depth), **fields) == (FinishReason.EOS, EOS, 3)

    def test_stop_id_comes_before_length(self, depth: int) -> None:
        fields = {"forced": {2: STOP}, "stop_token_ids": (9, STOP), "max_tokens": 3}
        assert end_of(Harness(depth=depth), **fields) == (FinishReason.STOP_TOKEN, STOP, 3)

    def test_length_ends_without_a_stop_token(self, depth: int) -> None:
        fields = {"forced": {1: STOP}, "stop_token_ids": (9,), "max_tokens": 3}
        assert end_of(Harness(depth=depth), **fields) == (FinishReason.MAX_TOKENS, -1, 3)

    def test_length_by_request_comes_before_length_by_context(self, depth: int) -> None:
        assert end_of(Harness(depth=depth, num_blocks=3), max_tokens=2) == (FinishReason.MAX_TOKENS, -1, 2)
        assert end_of(Harness(depth=depth, num_blocks=3), max_tokens=3) == (FinishReason.CONTEXT_FULL, -1, 2)

    def test_tokens_after_the_end_are_dropped(self, depth: int) -> None:
        harness = Harness(depth=depth)
        ended = harness.add(range(6), 20, forced={3: EOS})
        other = harness.add([9], 8)
        harness.run_to_end()
        assert ended.token_ids == ended.expected(4)
        assert other.token_ids == other.expected(8)


def test_ignored_end_of_sequence_is_a_token_like_others() -> None:
    forced = {1: EOS, 2: EOS}
    assert end_of(Harness(), forced=forced, ignore_eos=True, max_tokens=5) == (FinishReason.MAX_TOKENS, -1, 5)


def test_stop_ids_still_end_when_the_end_of_sequence_is_ignored() -> None:
    fields = {"forced": {1: EOS, 3: STOP}, "ignore_eos": True, "stop_token_ids": (STOP,), "max_tokens": 9}
    assert end_of(Harness(), **fields) == (FinishReason.STOP_TOKEN, STOP, 4)
    fields = {"forced": {1: EOS}, "ignore_eos": True, "stop_token_ids": (EOS,), "max_tokens": 9}
    assert end_of(Harness(), **fields) == (FinishReason.STOP_TOKEN, EOS, 2)


@pytest.mark.parametrize("end", [EOS, STOP])
def test_no_end_is_drawn_below_min_tokens(end: int) -> None:
    fields = {"forced": {0: end, 1: end, 3: end, 5: end}, "stop_token_ids": (STOP,), "min_tokens": 4, "max_tokens": 9}
    assert end_of(Harness(), **fields)[2] == 6


def test_min_tokens_counts_output_made_before_a_preemption() -> None:
    harness = Harness()
    stream = harness.add(range(6), 9, forced={3: EOS, 4: EOS}, min_tokens=4)
    harness.step()
    harness.step()
    harness.preempt(stream)
    harness.run_to_end()
    assert (stream.reason, len(stream.token_ids)) == (FinishReason.EOS, 5)


def test_length_ends_even_below_min_tokens() -> None:
    assert end_of(Harness(), min_tokens=50, max_tokens=3) == (FinishReason.MAX_TOKENS, -1, 3)
    assert end_of(Harness(num_blocks=3), min_tokens=50, max_tokens=60) == (FinishReason.CONTEXT_FULL, -1, 2)


@pytest.mark.parametrize(
    ("output", "ends"),
    [
        ([5, 5, 5], True),
        ([1, 5, 5], False),
        ([5, 5], False),
        ([1, 2, 1, 2, 1, 2], True),
        ([9, 1, 2, 1, 2, 1, 2], True),
        ([2, 1, 2, 1, 2], False),
        ([1, 2, 3, 1, 2, 3, 1, 2, 3], False),
        ([], False),
    ],
)
def test_repetition_of_a_pattern_of_one_or_two_tokens_three_times(output: list[int], ends: bool) -> None:
    assert repeats(np.array(output, np.int32), Repetition(min_size=1, max_size=2, count=3)) is ends


def test_shorter_patterns_than_asked_for_do_not_end_a_request() -> None:
    assert not repeats(np.array([5] * 5, np.int32), Repetition(min_size=2, max_size=2, count=3))
    assert repeats(np.array([5] * 6, np.int32), Repetition(min_size=2, max_size=2, count=3))


def test_repetition_ends_a_request_and_looks_at_its_output_alone() -> None:
    harness = Harness()
    stream = harness.add([7, 7, 7], 9, forced={0: 7, 1: 7, 2: 7}, repetition=Repetition(1, 1, 3))
    harness.run_to_end()
    assert stream.reason is FinishReason.REPETITION
    assert stream.token_ids == [7, 7, 7]
