"""Load beyond what there is: who is refused, who is served, and that callers get their turns. In simulated time."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

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


class TestPace:
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
