"""A step that fails ends the requests it computed, and nothing false is left for others."""

from __future__ import annotations

import pytest

from core_proc.request import State
from protos.messages import FinishReason
from tests.core_proc.harness import Harness, Stream


def cached_tokens(harness: Harness, prompt: list[int]) -> int:
    """What a new request with this prompt finds. The harness compares its tokens, too."""
    stream = harness.add(prompt)
    harness.run_to_end()
    (admitted,) = stream.admitted
    return admitted.cached_tokens


def test_failed_step_ends_its_requests_and_no_others() -> None:
    harness = Harness(budget=4, prefill_cap=4)
    first, second = harness.add(range(4), 5), harness.add(range(20, 24), 5)
    harness.issue()
    assert list(harness.scheduled) == [first.handle]
    harness.land(fail=True)
    assert first.reason is FinishReason.ERROR
    assert first.finished is not None
    assert first.finished.message
    harness.run_to_end()
    assert second.token_ids == second.expected(5)


def test_request_that_did_not_compute_in_the_failed_step_goes_on_in_its_row() -> None:
    harness = Harness(budget=2)
    streams = [harness.add([n], 6) for n in range(3)]
    harness.step()
    harness.step()
    running = [stream for stream in streams if stream.state is State.RUNNING]
    harness.issue()
    failing = set(harness.scheduled)
    harness.land(fail=True)
    for stream in streams:
        assert (stream.reason is FinishReason.ERROR) == (stream.handle in failing)
    assert len(running) > len([stream for stream in running if stream.reason is None])
    harness.run_to_end()


def test_prompt_blocks_of_a_failed_step_are_withdrawn() -> None:
    harness = Harness()
    harness.add(range(12))
    harness.issue()
    assert len(harness.pool._block_of) == 3
    harness.land(fail=True)
    assert not harness.pool._block_of
    assert cached_tokens(harness, [*range(12)]) == 0


def test_blocks_of_earlier_steps_stay_published() -> None:
    harness = Harness(budget=8)
    harness.add(range(20))
    harness.step()
    harness.issue()
    harness.land(fail=True)
    assert cached_tokens(harness, [*range(20)]) == 8


def completing_a_block(harness: Harness) -> Stream:
    """A request whose step in flight computes the last token of its second block."""
    stream = harness.add(range(5), 30)
    for _ in range(3):
        harness.issue()
        harness.land()
    harness.issue()
    assert harness.table.rows.computed[stream.request.row] == 8
    return stream


def whole(stream: Stream) -> list[int]:
    """Its prompt and output, as another request's prompt."""
    return [*stream.prompt, *stream.expected(20)]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_block_that_a_failed_decoding_step_was_to_complete_is_not_published(depth: int) -> None:
    harness = Harness(depth=depth)
    stream = completing_a_block(harness)
    for _ in range(depth - 1):
        harness.issue()  # the next one takes a third block, and publishes the second
    harness.land(fail=True)
    assert stream.reason is FinishReason.ERROR
    assert cached_tokens(harness, whole(stream)) == 4


@pytest.mark.parametrize("end", ["abort", "preempt"])
@pytest.mark.parametrize("when", ["in flight", "at its end"])
def test_block_of_a_request_that_left_before_the_step_failed_is_not_published(end: str, when: str) -> None:
    harness = Harness()
    stream = completing_a_block(harness)

    def leave() -> None:
        harness.abort(stream) if end == "abort" else harness.preempt(stream)

    if when == "in flight":
        leave()
        harness.land(fail=True)
    else:
        harness.land(fail=True, before_update=leave)
    harness.run_to_end()
    if end == "abort":
        assert cached_tokens(harness, whole(stream)) == 4
    else:
        assert stream.token_ids == stream.expected(30)


def test_request_that_shared_blocks_of_a_failed_step_starts_over() -> None:
    harness = Harness(depth=2, prefill_cap=64)
    failing = harness.add(range(12), 5)
    harness.issue()
    sharing = harness.add([*range(12), 50, 51], 5)
    harness.issue()
    assert harness.scheduled[sharing.handle] == 2
    harness.land(fail=True)
    assert failing.reason is FinishReason.ERROR
    assert sharing.state is State.WAITING
    harness.run_to_end()
    assert sharing.token_ids == sharing.expected(5)


def test_blocks_built_on_those_of_a_failed_step_are_withdrawn_with_them() -> None:
    harness = Harness(depth=2, prefill_cap=64)
    harness.add(range(8), 1)
    harness.issue()
    sharing = harness.add(range(16), 1)
    harness.issue()
    assert harness.scheduled[sharing.handle] == 8
    harness.land(fail=True)
    harness.abort(sharing)
    harness.land()
    assert cached_tokens(harness, [*range(9)]) == 0
    assert cached_tokens(harness, [*range(17)]) == 8, "the beginning was computed again, the rest was not"


def test_tokens_that_a_preempted_request_drew_after_a_failed_chunk_are_dropped() -> None:
    harness = Harness(depth=3, budget=8)
    stream = harness.add(range(16), 5)
    harness.issue()
    harness.issue()  # draws from what both wrote
    harness.preempt(stream)
    harness.land(fail=True)
    harness.land()
    assert stream.token_ids == []
    harness.run_to_end()
    assert stream.token_ids == stream.expected(5)


def test_tokens_that_a_preempted_request_drew_from_shared_false_blocks_are_dropped() -> None:
    harness = Harness(depth=3, prefill_cap=64)
    harness.add(range(12), 5)
    harness.issue()
    sharing = harness.add([*range(12), 50, 51], 5)
    harness.issue()
    harness.preempt(sharing)
    harness.land(fail=True)
    harness.land()
    assert sharing.token_ids == []
    harness.run_to_end()
    assert sharing.token_ids == sharing.expected(5)


def test_every_step_failing_ends_every_request_and_holds_nothing() -> None:
    harness = Harness(depth=3)
    streams = [harness.add(range(n, n + 6), 5) for n in range(5)]
    while harness.live:
        while len(harness.in_flight) < 3 and harness.issue():
            pass
        harness.land(fail=True)
    while harness.in_flight:
        harness.land(fail=True)
    assert {stream.reason for stream in streams} == {FinishReason.ERROR}
    harness.assert_empty()
    assert not harness.pool._block_of
