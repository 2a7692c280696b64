"""What is told about requests and the engine: times, counts, gauges."""

from __future__ import annotations

import pytest

from protos.messages import FinishReason
from tests.core_proc.harness import Harness


def step(harness: Harness, seconds: float) -> None:
    harness.issue()
    harness.clock.now += seconds
    harness.land()


@pytest.mark.parametrize("preempted", [False, True])
def test_times_add_up_from_arrival_to_end(preempted: bool) -> None:
    harness = Harness(budget=4)
    harness.clock.now = 100.0
    stream = harness.add(range(7), 3)
    harness.clock.now += 5.0
    step(harness, 1.0)
    step(harness, 1.0)
    if preempted:
        harness.preempt(stream)
    step(harness, 0.5)
    step(harness, 0.5)
    assert stream.admitted[0].queue_seconds == 5.0
    assert stream.finished is not None
    finished = stream.finished
    assert (finished.queue_seconds, finished.prefill_seconds, finished.decode_seconds) == (5.0, 2.0, 1.0)
    assert finished.preemptions == int(preempted)


def test_times_of_a_request_that_never_got_so_far_are_zero() -> None:
    harness = Harness(budget=4, max_num_seqs=1)
    prefilling = harness.add(range(7), 3)
    harness.clock.now = 1.0
    waiting = harness.add([1])
    step(harness, 2.0)
    harness.abort(prefilling, waiting)
    first, second = prefilling.finished, waiting.finished
    assert first is not None
    assert second is not None
    assert (first.queue_seconds, first.prefill_seconds, first.decode_seconds) == (1.0, 2.0, 0.0)
    assert (second.queue_seconds, second.prefill_seconds, second.decode_seconds) == (2.0, 0.0, 0.0)


def test_late_token_of_a_preempted_request_ends_its_prefill_time() -> None:
    harness = Harness(depth=2)
    stream = harness.add(range(7), 2)
    harness.issue()
    harness.preempt(stream)
    harness.clock.now = 3.0
    harness.land()
    harness.clock.now = 5.0
    harness.run_to_end()
    assert stream.finished is not None
    assert (stream.finished.prefill_seconds, stream.finished.decode_seconds) == (3.0, 2.0)


def test_stats_are_gauges_of_now_and_totals_since_start() -> None:
    harness = Harness(num_blocks=11, max_num_seqs=2)
    first = harness.add(range(9), 3)
    harness.run_to_end()
    again, other, waiting = harness.add(range(9), 9), harness.add([1], 9), harness.add([2], 9)
    harness.step()
    harness.step()
    stats = harness.scheduler.stats(steps_in_flight=1)
    assert (stats.running, stats.waiting, stats.steps_in_flight) == (2, 1, 1)
    assert stats.kv_usage == pytest.approx(4 / 10)
    assert (stats.prompt_tokens, stats.output_tokens) == (9 + 9 + 1, 3 + 4)
    assert (stats.prefix_queries, stats.prefix_hits) == (9 + 9 + 1, 8)
    assert (stats.steps, stats.preemptions, stats.aborted_tokens) == (5, 0, 0)
    harness.preempt(other)
    harness.abort(again, waiting)
    stats = harness.scheduler.stats(steps_in_flight=0)
    # Of the ten tokens of `again`, eight came from the cache.
    assert (stats.preemptions, stats.aborted_tokens) == (1, 2)
    harness.run_to_end()
    stats = harness.scheduler.stats(steps_in_flight=0)
    assert (stats.running, stats.waiting, stats.kv_usage) == (0, 0, 0.0)
    assert stats.output_tokens == 3 + 2 + 9
    assert first.reason is other.reason is FinishReason.MAX_TOKENS


def test_request_that_a_stop_string_completed_was_not_given_up() -> None:
    harness = Harness()
    stream = harness.add(range(9), 9)
    harness.step()
    harness.scheduler.abort(stream.client, [stream.handle], stopped=True)
    harness.check()
    assert stream.reason is FinishReason.STOP_STRING
    assert harness.scheduler.stats(0).aborted_tokens == 0


def test_late_first_token_of_a_preempted_request_ends_its_prefill() -> None:
    harness = Harness(depth=2)
    stream = harness.add(range(9), 9)
    harness.issue()
    harness.preempt(stream)
    harness.clock.now = 3.0
    harness.land()
    harness.clock.now = 5.0
    harness.abort(stream)
    assert stream.finished is not None
    assert (stream.finished.prefill_seconds, stream.finished.decode_seconds) == (3.0, 2.0)
