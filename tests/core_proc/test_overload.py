"""Load beyond what there is: who is refused, who is served, and that callers get their turns. In simulated time."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import pytest

from core_proc.pace import Pace
from protos.messages import FinishReason
from tests.core_proc.harness import Harness
from tests.core_proc.plant import Plant, Visit, poisson, reasons

if TYPE_CHECKING:
    from core_proc.intake import StepInFlight

PEAK = 140.0
"""Requests a second that the plant serves when it is always busy, of those that `poisson` makes."""


def goodput(visits: list[Visit], seconds: float) -> float:
    """Requests a second that were whole in time, but for the first third of the time."""
    return sum(visit.in_time for visit in visits if visit.at >= seconds / 3) / (seconds * 2 / 3)


@pytest.mark.parametrize("ignore_eos", [True, False], ids=["lengths known", "lengths unknown"])
def test_at_three_times_the_load_goodput_is_the_peak_and_nobody_admitted_waits_long(ignore_eos: bool) -> None:
    visits = poisson(3 * PEAK, 12, deadline=1.5, ignore_eos=ignore_eos)
    Plant().run(visits)
    assert goodput(visits, 12) > 0.9 * PEAK
    waits = [visit.first_token_at - visit.at for visit in visits if visit.first_token_at is not None]
    assert max(waits) < 1.5
    late = reasons(visits).get(FinishReason.DEADLINE, 0)
    assert late < 0.03 * len(visits), "that many were served in vain"


def test_most_of_those_refused_are_told_at_once() -> None:
    visits = poisson(3 * PEAK, 12, deadline=1.5)
    Plant().run(visits)
    shed = [visit for visit in visits if visit.finished and visit.finished.reason is FinishReason.SHED]
    assert sum(visit.ended_at - visit.at < 0.05 for visit in shed if visit.at > 4) > 0.7 * len(shed) * 2 / 3
    assert all(visit.finished.retry_after > 0 for visit in shed if visit.finished)
    assert not any(visit.num_tokens for visit in shed)


def test_below_the_peak_nobody_is_refused() -> None:
    visits = poisson(0.7 * PEAK, 12, deadline=1.5)
    Plant().run(visits)
    assert reasons(visits) == {FinishReason.EOS: len(visits)}


def test_a_queue_timeout_that_will_not_be_kept_is_told_at_once() -> None:
    plant = Plant(num_rows=4)
    crowd = [Visit(0.0, 100, 50, None) for _ in range(200)]
    late = Visit(1.0, 100, 50, None, queue_timeout=0.5)
    patient = Visit(1.0, 100, 50, None, queue_timeout=60.0)
    plant.run([*crowd, late, patient])
    assert late.finished is not None
    assert patient.finished is not None
    assert (late.finished.reason, patient.finished.reason) == (FinishReason.SHED, FinishReason.EOS)
    assert late.ended_at < 1.1
    # It would have waited as long as the other one did.
    assert late.finished.retry_after == pytest.approx(patient.finished.queue_seconds - 0.5, rel=0.3)


def test_the_wait_is_told_by_the_statistics() -> None:
    plant = Plant(num_rows=4)
    crowd = [Visit(0.0, 100, 50, None) for _ in range(200)]
    looks: list[tuple[float, float]] = []
    clock = plant.scheduler.schedule

    def schedule() -> StepInFlight | None:
        looks.append((plant.clock.now, plant.scheduler.stats(0).queue_seconds))
        return clock()

    plant.scheduler.schedule = schedule  # type: ignore[method-assign]
    plant.run(crowd)
    last = max(visit.finished.queue_seconds for visit in crowd if visit.finished)
    assert [told for now, told in looks if now == 0.0] == [0.0]
    halfway = next(told for now, told in looks if now >= last / 2)
    assert halfway == pytest.approx(last / 2, rel=0.15)
    assert looks[-1][1] == 0.0


def test_a_place_that_nobody_else_wants_is_for_whoever_might_make_it() -> None:
    visits = poisson(0.5 * PEAK, 4, deadline=10.0)
    # The mean output takes four times as long.
    alone = Visit(6.0, 100, 3, 0.03)
    Plant().run([*visits, alone])
    assert alone.in_time


def test_who_is_out_of_time_already_is_told_so_and_not_to_come_again() -> None:
    harness = Harness(max_num_seqs=1)
    pace = harness.scheduler.table.pace
    for number in range(20):
        pace.queue_moved([1.0], number, 5)
    harness.add([1], 4)
    harness.add([2], 4)
    late = [harness.add([3], 4, deadline=-1.0), harness.add([3], 4, queue_timeout=-1.0)]
    harness.issue()
    assert [stream.reason for stream in late] == [FinishReason.DEADLINE, FinishReason.QUEUE_TIMEOUT]
    harness.run_to_end()


def test_sequences_of_a_request_that_is_refused_are_told_the_same() -> None:
    harness = Harness()
    pace = harness.scheduler.table.pace
    pace.seconds_late = lambda *_: 3.0  # type: ignore[method-assign]
    refused = harness.add([1], 4, num_sequences=3, deadline=5.0)
    ends = [stream.finished for stream in [refused, *refused.siblings]]
    assert [(end.reason, end.retry_after) for end in ends if end] == [(FinishReason.SHED, 3.0)] * 3


def test_sequences_that_share_a_prompt_are_not_refused_behind_it() -> None:
    harness = Harness(max_num_seqs=1)
    pace = harness.scheduler.table.pace
    first = harness.add([1] * 20, 4, num_sequences=4, deadline=5.0)
    other = harness.add([2] * 20, 4)
    harness.step()
    pace.seconds_late = lambda request, *_: float(request.has_time_limit)  # type: ignore[method-assign]
    harness.run_to_end()
    assert [stream.reason for stream in [first, *first.siblings]] == [FinishReason.MAX_TOKENS] * 4
    assert all(stream.request.arrival < other.request.arrival for stream in first.siblings)


def test_what_is_to_be_computed_anew_counts_as_waiting_before_it() -> None:
    harness = Harness(max_num_seqs=1)
    running = harness.add([1] * 9, 4)
    harness.step()
    new = harness.add([2], 4)
    before = harness.table.waiting.cost_before(new.request)
    harness.preempt(running)
    assert harness.table.waiting.cost_before(new.request) == before + running.request.cost
    harness.run_to_end()


class TestCallers:
    def test_one_with_a_thousand_requests_does_not_keep_one_with_one_waiting(self) -> None:
        crowd = [Visit(0.0, 100, 50, None, caller="crowd") for _ in range(1000)]
        singles = [Visit(1.0 + number, 100, 50, None, caller="single") for number in range(5)]
        Plant().run([*crowd, *singles])
        for visit in singles:
            assert visit.first_token_at is not None
            assert visit.first_token_at - visit.at < 0.1
        assert max(visit.ended_at for visit in crowd) > 6.0

    def test_tokens_are_shared_rather_than_requests(self) -> None:
        long = [Visit(0.0, 50, 90, None, caller="long") for _ in range(400)]
        short = [Visit(0.0, 50, 20, None, caller="short") for _ in range(400)]
        Plant(num_rows=8).run([*long, *short])
        end = max(visit.ended_at for visit in short)
        served = [sum(50 + 2 * v.length for v in visits if v.ended_at <= end) for visits in (long, short)]
        assert served[0] == pytest.approx(served[1], rel=0.1)

    def test_prompts_are_paid_for_too(self) -> None:
        long = [Visit(0.0, 300, 10, None, caller="long") for _ in range(200)]
        short = [Visit(0.0, 30, 10, None, caller="short") for _ in range(200)]
        Plant(num_rows=4).run([*long, *short])
        end = max(visit.ended_at for visit in short)
        served = [sum(v.prompt_tokens + 20 for v in visits if v.ended_at <= end) for visits in (long, short)]
        assert served[0] == pytest.approx(served[1], rel=0.15)

    def test_a_caller_that_was_away_has_saved_nothing_up(self) -> None:
        steady = [Visit(0.0, 100, 50, None, caller="steady") for _ in range(400)]
        comes = [Visit(2.0, 100, 50, None, caller="comes") for _ in range(200)]
        Plant(num_rows=8).run([*steady, *comes])
        end = max(visit.ended_at for visit in comes)
        meanwhile = sum(2.0 < visit.ended_at <= end for visit in steady)
        assert meanwhile == pytest.approx(len(comes), rel=0.15)

    def test_a_better_priority_goes_first_whoever_was_served(self) -> None:
        urgent = [Visit(0.0, 100, 50, None, caller="busy", priority=-1) for _ in range(50)]
        other = [Visit(0.0, 100, 50, None, caller="idle") for _ in range(50)]
        Plant(num_rows=4).run([*other, *urgent])
        assert statistics.median(v.ended_at for v in urgent) < min(v.ended_at for v in other[4:])

    def test_who_was_preempted_comes_back_before_anybody_new(self) -> None:
        harness = Harness(max_num_seqs=1)
        first = harness.add([1], 8, caller="a")
        harness.step()
        new = harness.add([2], 8, caller="b")
        harness.preempt(first)
        harness.step()
        assert (len(first.admitted), len(new.admitted)) == (1, 0)
        harness.run_to_end()

    def test_what_another_core_had_admitted_goes_first_and_is_not_refused(self) -> None:
        harness = Harness(max_num_seqs=1)
        running = harness.add([1], 4)
        harness.step()
        new = harness.add([2], 4, caller="a")
        pace = harness.scheduler.table.pace
        pace.seconds_late = lambda request, *_: float(request.has_time_limit)  # type: ignore[method-assign]
        refused = harness.add([4], 4, caller="b", deadline=5.0)
        assert refused.reason is FinishReason.SHED
        continued = harness.add([3], 4, caller="b", was_admitted=True, deadline=5.0)
        harness.run_until_idle()
        assert [each.reason for each in (running, continued, new)] == [FinishReason.MAX_TOKENS] * 3
        assert continued.admitted[0].queue_seconds <= new.admitted[0].queue_seconds
        assert continued.request.arrival < new.request.arrival

    def test_a_prompt_that_is_cached_costs_what_is_left_of_it(self) -> None:
        harness = Harness(num_blocks=200, max_num_seqs=1)
        harness.add(range(100), 1)
        harness.run_to_end()
        cached = [harness.add([*range(100), 101 + number], 1, caller="cached") for number in range(4)]
        plain = [harness.add(range(10 * number + 200, 10 * number + 210), 1, caller="plain") for number in range(4)]
        harness.run_to_end()
        order = sorted([*cached, *plain], key=lambda stream: stream.request.arrival)
        # By its whole length the first of them would cost as much as all of the other caller's.
        assert [stream in cached for stream in order[:4]] == [True, False, True, True]


class TestPace:
    @staticmethod
    def expected(pace: Pace, **fields: Any) -> int:
        harness = Harness(num_blocks=100)
        output = fields.pop("output", ())
        stream = harness.add([1] * 10, fields.pop("max_tokens", 100), output=output, **fields)
        found = pace.expected_output(stream.request)
        harness.abort(stream)
        return found

    def test_an_output_is_expected_to_be_as_long_as_others_within_what_it_asks_for(self) -> None:
        pace = Pace()
        assert self.expected(pace) == 1
        for _ in range(200):
            pace.output_ended(40)
        assert self.expected(pace) == 40
        assert self.expected(pace, max_tokens=30) == 30
        assert self.expected(pace, min_tokens=60) == 60
        assert self.expected(pace, ignore_eos=True) == 100
        assert self.expected(pace, output=[3] * 15) == 25
        assert self.expected(pace, output=[3] * 50) == 1
        assert self.expected(pace, output=[3] * 15, min_tokens=60) == 45
        assert self.expected(pace, output=[3] * 15, ignore_eos=True) == 85

    def test_the_speed_of_prompts_is_the_best_of_late(self) -> None:
        pace = Pace()
        request = Harness(num_blocks=100).add([1] * 10, 1, deadline=1.0).request
        pace.step_returned(1000, 0.0, 1.0)
        pace.step_returned(100, 1.0, 2.0)
        assert pace.seconds_late(request, 0.0, 900, False, 0.0) == pytest.approx(0.0)
        assert pace.seconds_late(request, 0.0, 1800, False, 0.0) == pytest.approx(1.0)
        for _ in range(100):
            pace.step_returned(100, 2.0, 3.0)
            pace._last_return = 2.0
        assert pace.seconds_late(request, 0.0, 200, False, 0.0) == pytest.approx(1.0)

    def test_knows_nothing_of_a_queue_before_it_moved_some_times(self) -> None:
        pace = Pace()
        now = 0.0
        # The first time ends no wait that was measured.
        for _ in range(9):
            assert pace.queue_seconds(100.0) == 0.0
            pace.queue_moved([10.0], now, 5)
            now += 0.5
        for _ in range(9):
            pace.queue_moved([10.0], now, 5)
            now += 0.5
        assert pace.queue_seconds(100.0) == pytest.approx(5.0)
        assert pace.queue_seconds(0.0) == 0.0

    def test_a_queue_that_is_stopped_or_empty_does_not_count_as_slow(self) -> None:
        pace = Pace()
        for number in range(40):
            now = 0.5 * number
            pace.queue_moved([10.0], now, 5)
        pace.queue_stopped()
        pace.queue_moved([], 1000.0, 5)
        pace.queue_moved([10.0], 1000.5, 0)
        pace.queue_moved([10.0], 2000.0, 5)
        pace.queue_moved([10.0], 2000.5, 5)
        assert pace.queue_seconds(100.0) == pytest.approx(5.0)

    def test_forgets_how_fast_a_queue_once_was(self) -> None:
        pace = Pace()
        for number in range(100):
            pace.queue_moved([10.0], 0.1 * number, 5)
        for number in range(100):
            pace.queue_moved([10.0], 10.0 + number, 5)
        assert pace.queue_seconds(100.0) == pytest.approx(10.0, rel=0.05)
