"""A request may be aborted at any moment, and leaves nothing behind."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from core_proc.request import State
from protos.messages import FinishReason
from tests.core_proc.harness import Harness, Stream
from tests.fakes import EOS

if TYPE_CHECKING:
    from collections.abc import Callable


def waiting(harness: Harness) -> Stream:
    for number in range(2):
        harness.add([number], 8)
    harness.issue()
    stream = harness.add(range(9))
    assert stream.state is State.WAITING
    return stream


def in_chunked_prefill(harness: Harness) -> Stream:
    stream = harness.add(range(30))
    harness.issue()
    assert harness.scheduled[stream.handle] < 30
    return stream


def decoding(harness: Harness) -> Stream:
    stream = harness.add(range(6), 9)
    for _ in range(5):
        harness.step()
    assert stream.token_ids
    return stream


def preempted(harness: Harness) -> Stream:
    stream = decoding(harness)
    harness.preempt(stream)
    return stream


def resumed(harness: Harness) -> Stream:
    stream = preempted(harness)
    while stream.state is State.WAITING:
        harness.step()
    return stream


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("situation", [waiting, in_chunked_prefill, decoding, preempted, resumed])
def test_abort_leaves_nothing_behind(situation: Callable[[Harness], Stream], depth: int) -> None:
    harness = Harness(budget=8, max_num_seqs=2, depth=depth)
    stream = situation(harness)
    other = harness.add([1, 2, 3], 3)
    num_tokens = len(stream.token_ids)
    harness.abort(stream)
    assert stream.reason is FinishReason.ABORTED
    harness.abort(stream, stream)  # unknown by now, and unknown again
    harness.run_to_end()
    assert len(stream.token_ids) == num_tokens
    assert other.reason is FinishReason.MAX_TOKENS


def test_abort_of_an_unknown_request_is_ignored() -> None:
    harness = Harness()
    stream = harness.add(range(6))
    harness.scheduler.abort(0, [stream.handle + 1, -1])
    harness.scheduler.abort(1, [stream.handle])
    harness.run_to_end()
    assert stream.reason is FinishReason.MAX_TOKENS


def test_abort_from_the_middle_of_the_queue_keeps_the_order() -> None:
    harness = Harness(max_num_seqs=1)
    streams = [harness.add([n], 1, priority=n % 2) for n in range(6)]
    harness.abort(streams[2], streams[1])
    harness.run_to_end()
    ends = [step.new_rows[0].token_ids[0] for step in harness.worker.steps]
    assert ends == [0, 4, 3, 5]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("forced", [{1: EOS}, {}], ids=["end of sequence", "length"])
def test_abort_in_the_step_that_would_finish_is_reported_once_as_an_abort(depth: int, forced: dict[int, int]) -> None:
    harness = Harness(depth=depth)
    stream = harness.add(range(6), 2, forced=forced)
    harness.issue()
    harness.land()
    harness.issue()
    harness.land(before_update=lambda: harness.abort(stream))
    assert stream.reason is FinishReason.ABORTED  # a second report would find no live stream
    assert len(stream.token_ids) == 1
    harness.run_to_end()


def test_blocks_of_an_aborted_request_are_reused_only_when_its_last_step_is_back() -> None:
    harness = Harness(num_blocks=7, depth=3)
    aborted = harness.add(range(20), 4)
    harness.issue()
    harness.issue()
    harness.abort(aborted)
    free = harness.pool.num_free
    other = harness.add(range(100, 120), 1)
    assert harness.issue() is None, "it would need the blocks that two steps in flight still touch"
    harness.land()
    assert harness.pool.num_free == free
    assert harness.issue() is None
    harness.land()
    assert harness.pool.num_free == 6
    assert harness.issue() is not None
    assert list(harness.scheduled) == [other.handle]
    harness.run_to_end()


def test_running_request_waits_for_blocks_in_flight_instead_of_preempting() -> None:
    harness = Harness(num_blocks=6, depth=2)
    growing, aborted = harness.add(range(7), 9), harness.add(range(20, 31), 4)
    harness.issue()
    harness.issue()  # takes the last free block
    harness.abort(aborted)
    harness.land()
    while harness.pool.num_free:
        harness.step()
    harness.run_to_end()
    assert growing.finished is not None
    assert growing.finished.preemptions == 0


def test_row_of_an_aborted_request_is_reused_at_once_and_late_tokens_are_nobodys() -> None:
    harness = Harness(max_num_seqs=1, depth=2)
    aborted = harness.add(range(6), 9)
    harness.issue()
    harness.abort(aborted)
    follower = harness.add(range(50, 56), 3)
    harness.issue()
    assert harness.worker.steps[-1].rows.tolist() == [0]
    harness.run_to_end()
    assert aborted.token_ids == []
    assert follower.token_ids == follower.expected(3)


def test_equal_handles_of_two_clients_do_not_meet() -> None:
    harness = Harness()
    ours, theirs = harness.add(range(6), 5, handle=7), harness.add(range(20, 26), 5, handle=7, client=1)
    harness.step()
    harness.step()
    harness.abort(ours)
    assert theirs.reason is None
    harness.run_to_end()
    assert theirs.token_ids == theirs.expected(5)
    assert len(ours.token_ids) == 2
