"""Requests that run out of time, and those that surely will."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from core_proc.request import State
from protos.messages import FinishReason
from tests.core_proc.harness import Harness, Stream

REASONS = {
    "deadline": FinishReason.DEADLINE,
    "time_limit": FinishReason.TIME_LIMIT,
    "queue_timeout": FinishReason.QUEUE_TIMEOUT,
}


def pass_time(harness: Harness, seconds: float) -> None:
    harness.clock.now += seconds
    harness.scheduler.expire(harness.clock.now)
    harness.check()


def waiting(harness: Harness, **timer: Any) -> Stream:
    harness.add([1], 50)
    harness.step()
    return harness.add([2], **timer)


def in_chunked_prefill(harness: Harness, **timer: Any) -> Stream:
    stream = harness.add(range(30), **timer)
    harness.step()
    assert not stream.token_ids
    return stream


def running(harness: Harness, **timer: Any) -> Stream:
    stream = harness.add([1], 50, **timer)
    for _ in range(3):
        harness.step()
    return stream


def in_flight(harness: Harness, **timer: Any) -> Stream:
    stream = running(harness, **timer)
    harness.issue()
    return stream


def preempted(harness: Harness, **timer: Any) -> Stream:
    stream = running(harness, **timer)
    harness.preempt(stream)
    return stream


SITUATIONS = [waiting, in_chunked_prefill, running, in_flight, preempted]


@pytest.mark.parametrize("timer", ["deadline", "time_limit"])
@pytest.mark.parametrize("situation", SITUATIONS)
def test_time_that_is_up_ends_a_request_wherever_it_is(situation: Any, timer: str) -> None:
    harness = Harness(budget=4, max_num_seqs=1)
    stream: Stream = situation(harness, **{timer: 5.0})
    pass_time(harness, 4.9)
    assert stream.reason is None
    pass_time(harness, 0.1)
    assert stream.reason is REASONS[timer]
    num_tokens = len(stream.token_ids)
    harness.run_to_end()
    assert len(stream.token_ids) == num_tokens


def test_failures_say_what_happened_and_a_time_limit_is_none() -> None:
    harness = Harness(max_num_seqs=1)
    harness.add([1], 50)
    harness.step()
    limits: list[dict[str, Any]] = [{timer: 1.0} for timer in REASONS]
    streams = {timer: harness.add([2], **limit) for timer, limit in zip(REASONS, limits, strict=True)}
    pass_time(harness, 1.0)
    messages = {timer: stream.finished.message for timer, stream in streams.items() if stream.finished}
    assert messages == {
        "deadline": "the deadline has passed",
        "time_limit": "",
        "queue_timeout": "not admitted within the queue timeout",
    }
    assert [stream.reason for stream in streams.values()] == list(REASONS.values())
    harness.run_to_end()


def test_queue_timeout_ends_only_requests_that_were_never_admitted() -> None:
    harness = Harness(max_num_seqs=1)
    admitted = harness.add([1], 8, queue_timeout=2.0)
    harness.step()
    never = harness.add([2], 8, queue_timeout=2.0)
    harness.preempt(admitted)
    pass_time(harness, 2.0)
    assert never.reason is FinishReason.QUEUE_TIMEOUT
    harness.run_to_end()
    assert admitted.reason is FinishReason.MAX_TOKENS


def test_scheduling_notices_time_by_itself() -> None:
    harness = Harness()
    stream = harness.add([1], 8, deadline=1.0)
    harness.clock.now = 1.0
    assert harness.issue() is None
    assert stream.reason is FinishReason.DEADLINE
    assert stream.admitted == []


def test_time_passes_while_frozen() -> None:
    harness = Harness()
    stream = harness.add([1], 8, time_limit=1.0)
    harness.scheduler.admission = "frozen"
    harness.clock.now = 1.0
    harness.issue()
    assert stream.reason is FinishReason.TIME_LIMIT


def test_earliest_timer_of_a_request_wins() -> None:
    harness = Harness()
    stream = harness.add([1], 8, deadline=3.0, time_limit=2.0, queue_timeout=2.5)
    pass_time(harness, 9.0)
    assert stream.reason is FinishReason.TIME_LIMIT


def test_seconds_to_the_next_timer() -> None:
    harness = Harness()
    assert harness.scheduler.seconds_to_timer is None
    late, early = harness.add([1], deadline=9.0), harness.add([2], deadline=4.0)
    harness.clock.now = 1.0
    assert harness.scheduler.seconds_to_timer == 3.0
    harness.clock.now = 5.0
    assert harness.scheduler.seconds_to_timer == 0.0
    harness.abort(early)
    assert harness.scheduler.seconds_to_timer == 4.0
    harness.abort(late)
    assert harness.scheduler.seconds_to_timer is None


@pytest.mark.parametrize("seconds", [1e10, 1e300, float("inf")])
def test_timer_in_the_far_future_is_no_longer_than_a_lock_can_wait(seconds: float) -> None:
    harness = Harness()
    stream = harness.add([1], time_limit=seconds)
    left = harness.scheduler.seconds_to_timer
    assert left is not None
    assert 60 < left <= threading.TIMEOUT_MAX
    harness.abort(stream)


def test_ended_requests_are_not_kept_until_their_deadline() -> None:
    harness = Harness()
    for _ in range(1000):
        harness.add([1], 1, deadline=3600.0, time_limit=1800.0)
        harness.step()
    assert len(harness.table.timers) < 200
    last = harness.add([1], 50, deadline=3600.0)
    harness.step()
    pass_time(harness, 3600.0)
    assert last.reason is FinishReason.DEADLINE


class TestDeadlineThatCannotBeMet:
    """At 100 prompt tokens a second."""

    @staticmethod
    def step(harness: Harness) -> None:
        """One step of the device."""
        harness.clock.now += harness.in_flight[0].output.num_tokens / 100
        harness.land()

    def measured(self, depth: int = 1) -> Harness:
        harness = Harness(num_blocks=400, budget=100, prefill_cap=100, depth=depth)
        harness.add([1] * 400, 1)
        while harness.live:
            while len(harness.in_flight) < depth and harness.issue():
                pass
            self.step(harness)
        return harness

    @pytest.mark.parametrize("depth", [1, 2, 3])
    def test_is_shed_before_it_costs_prefill(self, depth: int) -> None:
        harness = self.measured(depth)
        hopeless, feasible = harness.add(range(240), deadline=2.3), harness.add([5, *range(200)], deadline=2.1)
        harness.issue()
        assert hopeless.reason is FinishReason.SHED
        assert hopeless.finished is not None
        assert "would miss its deadline" in hopeless.finished.message
        assert hopeless.finished.retry_after == pytest.approx(0.1, abs=0.05)
        assert not hopeless.admitted
        assert feasible.state is State.RUNNING
        harness.run_to_end()

    def test_counts_only_what_is_not_cached(self) -> None:
        harness = self.measured()
        stream = harness.add([1] * 440, deadline=0.5)
        harness.issue()
        assert stream.state is State.RUNNING
        harness.run_to_end()

    def test_is_not_assumed_before_anything_was_measured(self) -> None:
        harness = Harness()
        stream = harness.add(range(100), deadline=1e-9)
        harness.issue()
        assert stream.state is State.RUNNING
        harness.land()

    def test_is_not_concluded_from_steps_that_only_decode(self) -> None:
        harness = Harness(num_blocks=800, budget=200, prefill_cap=200, max_num_seqs=100)
        harness.add([1] * 200, 1)
        harness.issue()
        self.step(harness)
        for number in range(99):
            harness.add([number], 60)
        harness.issue()
        harness.land()
        for _ in range(12):  # 99 tokens a step in 2 seconds: slow, as decoding is
            harness.issue()
            harness.clock.now += 2.0
            harness.land()
        stream = harness.add([5, *range(150)], deadline=1.6)
        harness.issue()
        assert stream.state is State.RUNNING
        harness.abort(*harness.live.values())
        harness.run_to_end()
