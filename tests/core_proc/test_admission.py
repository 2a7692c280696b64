"""Pausing, freezing and resuming."""

from __future__ import annotations

import pytest

from core_proc.request import State
from protos.messages import FinishReason
from tests.core_proc.harness import Harness

DEPTHS = [1, 2, 3]


@pytest.mark.parametrize("depth", DEPTHS)
def test_paused_engine_finishes_what_runs_and_starts_nothing(depth: int) -> None:
    harness = Harness(depth=depth, budget=8)
    running = [harness.add(range(12), 4), harness.add([5], 6)]
    while any(stream.state is State.WAITING for stream in running):
        harness.step()
    harness.scheduler.admission = "paused"
    waiting = harness.add([6], 3)
    harness.run_until_idle()
    assert [stream.reason for stream in running] == [FinishReason.MAX_TOKENS] * 2
    assert not waiting.admitted
    assert not harness.scheduler.has_work
    harness.scheduler.admission = "open"
    assert harness.scheduler.has_work
    harness.run_to_end()
    assert waiting.token_ids == waiting.expected(3)


@pytest.mark.parametrize("depth", DEPTHS)
def test_frozen_engine_moves_nothing_and_resumes_with_the_same_tokens(depth: int) -> None:
    harness = Harness(depth=depth, budget=8)
    streams = [harness.add(range(30), 4), harness.add([5], 6), harness.add([6], 3)]
    harness.step()
    harness.step()
    harness.scheduler.admission = "frozen"
    assert harness.issue() is None
    harness.run_until_idle()  # what is in flight comes back
    assert [stream.reason for stream in streams] == [None] * 3
    before = [(list(stream.token_ids), stream.state) for stream in streams]
    assert not harness.scheduler.has_work
    assert not harness.step()
    assert before == [(stream.token_ids, stream.state) for stream in streams]
    harness.scheduler.admission = "open"
    harness.run_to_end()
    assert [stream.token_ids for stream in streams] == [stream.expected(stream.max_tokens) for stream in streams]


def test_request_preempted_while_paused_is_finished() -> None:
    harness = Harness()
    stream = harness.add(range(6), 5)
    harness.step()
    harness.scheduler.admission = "paused"
    harness.preempt(stream)
    harness.run_to_end()
    assert stream.reason is FinishReason.MAX_TOKENS


def test_request_preempted_while_paused_is_finished_though_a_better_one_waits() -> None:
    harness = Harness(max_num_seqs=1)
    preempted = harness.add(range(6), 5)
    harness.step()
    urgent = harness.add([1], 2, priority=-1)
    harness.scheduler.admission = "paused"
    harness.preempt(preempted)
    assert harness.scheduler.has_work
    harness.run_until_idle()
    assert preempted.reason is FinishReason.MAX_TOKENS
    assert not urgent.admitted
    harness.scheduler.admission = "open"
    harness.run_to_end()


@pytest.mark.parametrize("admission", ["paused", "frozen"])
def test_abort_works_while_nothing_moves(admission: str) -> None:
    harness = Harness(depth=2)
    running = harness.add(range(6), 5)
    harness.step()
    harness.scheduler.admission = "frozen" if admission == "frozen" else "paused"
    waiting = harness.add([1])
    harness.abort(running, waiting)
    harness.run_to_end()
    assert running.reason is waiting.reason is FinishReason.ABORTED
