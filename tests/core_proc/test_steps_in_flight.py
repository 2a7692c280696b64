"""Results that come back into a state that has changed since they were asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from core_proc.request import State
from protos.messages import FinishReason
from tests.core_proc.harness import Harness
from tests.fakes import EOS

if TYPE_CHECKING:
    from tests.core_proc.harness import Stream


def in_flight(depth: int, num_steps: int) -> tuple[Harness, Stream, Stream]:
    """Two decoding requests, and steps of both in flight. The first of these completes a block."""
    harness = Harness(depth=depth)
    streams = harness.add(range(11), 9), harness.add(range(20, 31), 9)
    harness.issue()
    harness.land()
    for _ in range(num_steps):
        harness.issue()
    return harness, *streams


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_reset_drops_the_tokens_in_flight_and_publishes_nothing_stale(num_steps: int) -> None:
    harness, first, second = in_flight(3, num_steps)
    assert harness.reset(weights=2)
    while harness.in_flight:
        harness.land()
    assert len(first.token_ids) == len(second.token_ids) == 1
    assert not harness.pool._block_of
    harness.run_to_end()
    # The harness compared the rest with the new model's tokens. So must be a later request that shares the prompt:
    follower = harness.add(range(11), 4)
    harness.run_to_end()
    assert first.reason is follower.reason is FinishReason.MAX_TOKENS


def test_reset_drops_the_tokens_in_flight_of_a_request_preempted_before() -> None:
    harness, first, second = in_flight(3, 2)
    harness.preempt(second)
    assert harness.reset(weights=2)
    while harness.in_flight:
        harness.land()
    assert len(first.token_ids) == len(second.token_ids) == 1
    harness.run_to_end()
    assert second.reason is FinishReason.MAX_TOKENS


def test_token_out_of_place_ends_one_request() -> None:
    harness, first, second = in_flight(2, 2)
    harness.table.rows.known[first.request.row] += 1
    harness.land()
    assert first.reason is FinishReason.ERROR
    harness.run_to_end()
    assert second.token_ids == second.expected(9)


def test_late_token_out_of_place_ends_one_request() -> None:
    harness, first, second = in_flight(2, 2)
    harness.preempt(first)
    first.request.token_ids = first.request.token_ids[:-1]
    harness.land()
    assert first.reason is FinishReason.ERROR
    harness.run_to_end()
    assert second.token_ids == second.expected(9)


@pytest.mark.parametrize("token_id", [-2, 256, 1 << 30])
@pytest.mark.parametrize("late", [False, True], ids=["in its row", "preempted"])
def test_token_outside_the_vocabulary_ends_one_request(token_id: int, late: bool) -> None:
    harness, first, second = in_flight(2, 1)
    if late:
        harness.preempt(first)
    step = harness.in_flight.popleft()
    harness.worker.execute(step.output)
    output = harness.worker.sample()
    output.token_ids[step.requests.tolist().index(first.request)] = token_id
    harness.scheduler.update(step, output)
    harness.check()
    assert first.reason is FinishReason.ERROR
    assert first.state is State.FINISHED
    harness.run_to_end()
    assert second.token_ids == second.expected(9)


def test_step_that_draws_nothing_comes_back_with_no_tokens() -> None:
    harness = Harness(budget=4)
    stream = harness.add(range(10))
    harness.issue()
    step = harness.in_flight[0]
    assert len(step.rows) == 0
    harness.land()
    assert stream.token_ids == []
    harness.run_to_end()


@pytest.mark.parametrize("budget", [4, 64], ids=["budget is short", "budget is enough"])
def test_columns_of_a_step_are_int32(budget: int) -> None:
    harness = Harness(budget=budget, prefill_cap=64)
    harness.add(range(5), 9)
    harness.step()
    harness.add(range(20, 29))
    while harness.live:
        step = harness.issue()
        assert step is not None
        dtypes = {column.dtype for column in (step.rows, step.starts, step.counts, step.block_rows, step.block_ids)}
        assert dtypes == {np.dtype(np.int32)}
        harness.land()


def test_decoding_row_is_looked_at_by_itself_only_for_a_block_or_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness()
    harness.add([5], 16, forced={3: EOS, 9: EOS}, ignore_eos=True)
    harness.step()
    looks: list[str] = []

    def count(owner: object, name: str) -> None:
        method = getattr(owner, name)

        def counting(*args: object) -> object:
            looks.append(name)
            return method(*args)

        monkeypatch.setattr(owner, name, counting)

    count(harness.kv_cache, "grow")
    count(harness.scheduler._intake, "_finish_if_ended")
    harness.run_to_end()
    assert (looks.count("grow"), looks.count("_finish_if_ended")) == (3, 1)


def test_batch_stays_dense() -> None:
    harness = Harness(max_num_seqs=4)
    streams = [harness.add([n], 3 if n == 1 else 9) for n in range(3)]
    harness.step()
    assert [stream.request.row for stream in streams] == [0, 1, 2]
    while streams[1].reason is None:
        harness.step()
    follower = harness.add([7], 2)
    harness.issue()
    assert follower.request.row == 1, "the lowest free row"
    harness.land()
    harness.run_to_end()
