"""How rows and prompts are dealt out to the steps that pass a pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from core_proc.pace import Pace
from core_proc.request import make_request
from core_proc.shares import MIN_CHUNK, StepShares
from protos.messages import EngineCoreRequest, Sampling
from tests.core_proc.harness import Harness, encode_ids

if TYPE_CHECKING:
    from protos.step import SchedulerOutput


def ints(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def waits(number: int) -> np.ndarray:
    return np.ones(number, np.bool_)


@pytest.mark.parametrize(
    ("num_ready", "num_in_flight", "rows"), [(8, 0, 2), (6, 2, 2), (9, 0, 3), (2, 7, 3), (1, 0, 1), (0, 0, 1)]
)
def test_a_step_takes_an_even_part_of_the_rows_that_are_ready_or_will_be(
    num_ready: int, num_in_flight: int, rows: int
) -> None:
    shares = StepShares(4)
    assert shares.share(np.ones(num_ready, np.int32), waits(num_in_flight), 0).rows == rows


def test_a_step_takes_an_even_part_of_the_prompts_those_in_flight_and_waiting_included() -> None:
    shares = StepShares(4)
    share = shares.share(ints(300, 1, 200), waits(0), 500)
    assert share.prompt_tokens == 250
    shares.issued(ints(250, 1))
    assert shares.share(ints(50, 200), waits(0), 500).prompt_tokens == 250
    shares.returned()
    assert shares.share(ints(50, 200), waits(0), 0).prompt_tokens == MIN_CHUNK


def test_a_share_goes_to_those_that_are_served_first() -> None:
    share = StepShares(2).share(ints(1, 100, 1, 1, 100, 1), waits(0), 0)
    todo = ints(1, 80, 1, 1, 80, 1)
    share.limit(todo)
    assert todo.tolist() == [1, 80, 1, 0, 20, 0]
    assert share.left(todo) == 0
    assert share.left(ints(30, 1, 1)) == 70


def test_a_row_draws_a_token_only_every_so_many_steps_and_is_late_accordingly() -> None:
    late = []
    for steps_per_token in (1, 4):
        pace = Pace(steps_per_token)
        for step in range(1000):
            pace.step_returned(0, 0.0, float(step))
        message = EngineCoreRequest(1, encode_ids([1]), Sampling(ignore_eos=True), 11, deadline=0.5)
        late.append(pace.seconds_late(make_request(message, 0, 4, 64, 0.0), 0.0, 0, False, 0.0))
    assert late == pytest.approx([9.5, 39.5])


def run_steps(harness: Harness, number: int) -> list[SchedulerOutput]:
    """The steps issued while so many are, each waiting for the oldest if as many are in flight as may be."""
    first = len(harness.worker.steps)
    while len(harness.worker.steps) < first + number:
        harness.step()
    return harness.worker.steps[first:]


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_rows_are_split_evenly_over_the_steps_in_flight(num_stages: int) -> None:
    harness = Harness(depth=num_stages, pipeline=True, max_num_seqs=16, num_blocks=200)
    streams = [harness.add([number], 30, ignore_eos=True) for number in range(12)]
    run_steps(harness, num_stages)
    steps = run_steps(harness, 4 * num_stages)
    assert {len(step.rows) for step in steps} == {12 // num_stages}
    # Each has a token of every round.
    for first in range(0, len(steps), num_stages):
        rows = np.concatenate([step.rows for step in steps[first : first + num_stages]])
        assert sorted(rows.tolist()) == list(range(12))
    harness.run_to_end()
    assert all(len(stream.token_ids) == 30 for stream in streams)


def test_what_became_uneven_is_evened_out() -> None:
    harness = Harness(depth=2, pipeline=True, max_num_seqs=16, num_blocks=200)
    for number in range(9):
        harness.add([number], 40, ignore_eos=True)
    run_steps(harness, 2)
    for stream in [stream for stream in harness.live.values() if stream.request.row % 2][:4]:
        harness.abort(stream)
    harness.add([100], 40, ignore_eos=True)
    run_steps(harness, 4)
    assert {len(step.rows) for step in run_steps(harness, 8)} == {3}
    harness.run_to_end()


def test_one_row_is_in_one_step() -> None:
    harness = Harness(depth=4, pipeline=True)
    harness.add([1], 5, ignore_eos=True)
    while harness.step():
        assert len(harness.in_flight) <= 1
    assert [len(step.rows) for step in harness.worker.steps] == [1] * 5


def test_chunks_of_one_prompt_follow_one_another_through_the_stages() -> None:
    harness = Harness(depth=4, pipeline=True, budget=2048, num_blocks=400)
    harness.add(range(250), 2)
    for _ in range(4):
        harness.issue()
    # The last ones are small: the tokens ahead are in flight still, so they count.
    assert [step.counts.tolist() for step in harness.worker.steps] == [[64], [64], [64], [58]]
    harness.run_to_end()
    harness.add([number % 256 for number in range(1000, 2000)], 2)
    first = len(harness.worker.steps)
    for _ in range(4):
        harness.issue()
    assert [step.counts.tolist() for step in harness.worker.steps[first:]] == [[250]] * 4
    harness.run_to_end()


def test_prompts_that_come_together_are_spread_and_so_are_their_rows() -> None:
    harness = Harness(depth=2, pipeline=True, budget=2048, max_num_seqs=16, num_blocks=400)
    for number in range(16):
        harness.add([number] * 16, 8, ignore_eos=True)
    steps = run_steps(harness, 2)
    assert [len(step.rows) for step in steps] == [8, 8]
    assert {len(step.rows) for step in run_steps(harness, 6)} == {8}
    harness.run_to_end()


def test_a_long_prompt_leaves_room_for_others_while_rows_are_in_flight() -> None:
    harness = Harness(depth=3, pipeline=True, budget=400, prefill_cap=100, num_blocks=400)
    decoding = harness.add([1], 40, ignore_eos=True)
    harness.issue()
    long = harness.add([number % 251 for number in range(900)], 2)
    for _ in range(2):
        harness.issue()
        assert harness.scheduled == {long.handle: 100}
    harness.land()
    harness.issue()
    assert harness.scheduled == {decoding.handle: 1, long.handle: 100}
    harness.run_to_end()


def test_prompts_that_wait_for_a_row_are_not_reckoned_with() -> None:
    harness = Harness(depth=4, pipeline=True, budget=2048, max_num_seqs=1, num_blocks=400)
    harness.add([number % 251 for number in range(400)], 2)
    harness.issue()
    harness.add([number % 250 for number in range(1000)], 2)
    harness.issue()
    assert [step.counts.tolist() for step in harness.worker.steps] == [[100], [100]]
    harness.run_to_end()


def test_a_trial_is_not_dealt_out() -> None:
    harness = Harness(depth=2, pipeline=True, budget=2048, num_blocks=400)
    for start in (0, 80, 160):
        harness.add(range(start, start + 70), 2)
    harness.issue()
    harness.land(fail=True)
    harness.issue()
    assert list(harness.scheduled.values()) == [70]
    harness.run_to_end()


def test_a_budget_smaller_than_a_share_is_kept() -> None:
    harness = Harness(depth=2, pipeline=True, budget=2)
    streams = [harness.add([number], 6, ignore_eos=True) for number in range(8)]
    harness.run_to_end()
    assert max(step.num_tokens for step in harness.worker.steps) == 2
    assert all(len(stream.token_ids) == 6 for stream in streams)


def test_no_row_is_left_out_for_longer_than_a_round() -> None:
    harness = Harness(depth=3, pipeline=True, max_num_seqs=8, num_blocks=200)
    for number in range(7):
        harness.add([number], 40, ignore_eos=True)
    run_steps(harness, 3)
    last: dict[int, int] = {}
    for step in run_steps(harness, 30):
        for row in step.rows.tolist():
            assert step.step_id - last.get(row, step.step_id) <= 4
            last[row] = step.step_id
    assert len(last) == 7
    harness.run_to_end()


def test_a_preemption_gives_no_blocks_to_a_row_that_is_not_in_the_step() -> None:
    """Who is in a step is settled before rows leave it for want of blocks; the harness checks what grows."""
    harness = Harness(depth=2, pipeline=True, max_num_seqs=8, num_blocks=12)
    streams = [harness.add([number] * 3, 20, ignore_eos=True) for number in range(6)]
    harness.run_to_end()
    assert all(len(stream.token_ids) == 20 for stream in streams)
    assert harness.table.stats(0, 0).preemptions > 3
