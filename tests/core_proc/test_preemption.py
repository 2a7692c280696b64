"""Out of blocks: who gives way, and that it loses nothing."""

from __future__ import annotations

import pytest

from core_proc.request import State
from protos.messages import FinishReason
from tests.core_proc.harness import Harness, Stream


def until_preempted(harness: Harness, streams: list[Stream]) -> Stream:
    """Steps until one of the streams that ran waits again."""
    running = [stream for stream in streams if stream.state is State.RUNNING]
    for _ in range(100):
        harness.step()
        for stream in running:
            if stream.state is State.WAITING:
                return stream
    raise AssertionError("nobody was preempted")


def test_youngest_is_preempted_and_comes_back_before_those_never_admitted() -> None:
    harness = Harness(num_blocks=7, max_num_seqs=2)
    old, young, never = harness.add(range(8), 12), harness.add(range(20, 28), 12), harness.add([1], 1)
    harness.step()
    assert until_preempted(harness, [old, young]) is young
    assert harness.scheduler.table.progress(0, young.handle) == [0, 0]
    assert harness.scheduler.table.progress(0, never.handle) == [1, 0]
    while young.state is State.WAITING:
        assert not never.admitted
        harness.step()
    harness.run_to_end()
    assert young.finished is not None
    assert young.finished.preemptions >= 1
    assert old.finished is not None
    assert old.finished.preemptions == 0


def test_worst_priority_is_preempted_even_if_it_arrived_first() -> None:
    harness = Harness(num_blocks=7)
    worst, best = harness.add(range(8), 12, priority=1), harness.add(range(20, 28), 12, priority=0)
    harness.step()
    assert until_preempted(harness, [worst, best]) is worst
    harness.run_to_end()


def test_budget_of_the_preempted_is_there_for_those_that_stay() -> None:
    harness = Harness(num_blocks=9, budget=20, prefill_cap=20)
    best = harness.add(range(15), 12, priority=0)
    worst = harness.add(range(20, 32), 12, priority=1)
    harness.step()
    assert worst.state is State.RUNNING
    middle = harness.add(range(40, 44), 12, priority=0)
    while worst.state is State.RUNNING:
        harness.issue()
        staying = {stream.handle for stream in (best, middle, worst) if stream.state is State.RUNNING}
        assert set(harness.scheduled) == staying, "whoever keeps its row computes"
        harness.land()
    harness.run_to_end()


def test_ties_of_priority_are_broken_by_arrival() -> None:
    harness = Harness(num_blocks=10)
    streams = [harness.add(range(20 * n, 20 * n + 8), 12, priority=3) for n in range(3)]
    harness.step()
    assert until_preempted(harness, streams) is streams[2]
    harness.run_to_end()


def test_nobody_new_is_admitted_in_a_step_that_preempted() -> None:
    harness = Harness(num_blocks=7)
    old, young = harness.add(range(8), 12), harness.add(range(20, 28), 12)
    while harness.pool.num_free:
        harness.step()
    small = harness.add([1], 1, priority=-1)
    while young.state is State.RUNNING:
        harness.step()
    assert harness.pool.num_free > 0, "enough for the small one"
    assert not small.admitted
    harness.step()
    assert small.admitted
    harness.run_to_end()
    assert old.reason is young.reason is FinishReason.MAX_TOKENS


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("num_blocks", [6, 8, 11])
def test_preempted_requests_get_the_same_tokens_as_without(num_blocks: int, depth: int) -> None:
    harness = Harness(num_blocks=num_blocks, depth=depth, budget=16)
    streams = [harness.add([n, n + 1, 7], 16) for n in range(4)]
    harness.run_to_end()
    assert sum(stream.finished.preemptions for stream in streams if stream.finished) > 0
    for stream in streams:
        assert stream.token_ids == stream.expected(16)


def test_preempted_request_resumes_with_prompt_and_output_as_its_prefill() -> None:
    harness = Harness(prefix_caching=False)
    stream = harness.add(range(6), 8)
    for _ in range(3):
        harness.step()
    harness.preempt(stream)
    harness.issue()
    (new_row,) = harness.worker.steps[-1].new_rows
    assert new_row.token_ids.tolist() == [*range(6), *stream.token_ids]
    assert harness.scheduled == {stream.handle: 9}
    harness.land()
    harness.run_to_end()
    assert len(stream.admitted) == 1, "it is told once"


def test_request_preempted_in_a_chunked_prefill_starts_over() -> None:
    harness = Harness(budget=4, prefix_caching=False)
    stream = harness.add(range(10), 3)
    harness.step()
    harness.preempt(stream)
    harness.run_to_end()
    assert sum(step.num_tokens for step in harness.worker.steps) == 4 + 10 + 2


def test_preempted_request_finds_its_own_blocks_again() -> None:
    harness = Harness()
    stream = harness.add(range(10), 8)
    for _ in range(4):
        harness.step()
    harness.preempt(stream)
    harness.issue()
    assert harness.scheduled == {stream.handle: 14 - 12}
    harness.land()
    harness.run_to_end()
    assert stream.finished is not None
    assert stream.finished.cached_tokens == 0, "what it finds of its own is no saving"


@pytest.mark.parametrize("depth", [2, 3])
def test_token_in_flight_of_a_preempted_request_is_delivered_and_counted_once(depth: int) -> None:
    harness = Harness(depth=depth)
    stream = harness.add(range(6), 8)
    for _ in range(depth):
        harness.issue()
    harness.preempt(stream)
    while harness.in_flight:
        harness.land()
        assert stream.state is State.WAITING
    assert len(stream.token_ids) == depth
    harness.issue()
    (new_row,) = harness.worker.steps[-1].new_rows
    assert new_row.token_ids.tolist() == [*range(6), *stream.token_ids]
    harness.run_to_end()
    assert stream.token_ids == stream.expected(8)


def test_preempted_request_is_not_admitted_while_a_token_of_it_is_in_flight() -> None:
    harness = Harness(depth=3)
    stream = harness.add(range(6), 8)
    harness.issue()
    harness.issue()
    harness.preempt(stream)
    assert harness.issue() is None
    harness.land()
    assert harness.issue() is None
    harness.land()
    assert harness.issue() is not None
    harness.run_to_end()


@pytest.mark.parametrize("forced", [{1: 0}, {}], ids=["end of sequence", "length"])
def test_late_token_may_end_a_preempted_request(forced: dict[int, int]) -> None:
    harness = Harness(depth=2)
    stream = harness.add(range(6), 2, forced=forced)
    harness.issue()
    harness.issue()
    harness.preempt(stream)
    harness.run_to_end()
    assert stream.reason is (FinishReason.EOS if forced else FinishReason.MAX_TOKENS)
    assert len(stream.token_ids) == 2
    assert len(harness.worker.steps) == 2
