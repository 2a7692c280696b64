"""Several front ends: what is added up of them, and what is not."""

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from async_engine.admission import Admission
from async_engine.front_end_report import together
from async_engine.metrics import MergedRegistry, Totals, samples
from protos.errors import OverloadedError
from protos.front_ends import Report
from protos.messages import NO_STATS
from protos.server_config import AdmissionOptions


class Numbers:
    """A front end's metrics, in small."""

    def __init__(self, count, live, running=5):
        disable_created_metrics()
        self.registry = CollectorRegistry()
        finished = Counter("tailrace_requests_finished", "", ["reason"], registry=self.registry)
        for reason, number in count.items():
            finished.labels(reason).inc(number)
        Gauge("tailrace_live_requests", "", registry=self.registry).set(live)
        Gauge("tailrace_running", "", registry=self.registry).set(running)
        seconds = Histogram("tailrace_seconds", "", registry=self.registry, buckets=(1.0, 2.0))
        for value in (0.5, 1.5, 2.5)[: sum(count.values())]:
            seconds.observe(value)

    def samples(self):
        return samples(self.registry.collect())


def merged(own, totals):
    return generate_latest(MergedRegistry(own.registry, lambda: totals)).decode()


def test_counters_histograms_and_own_gauges_are_added_and_what_the_core_tells_is_not():
    totals = Totals()
    totals.add(Numbers({"eos": 2, "error": 1}, live=3, running=7).samples())
    totals.add(Numbers({"eos": 1}, live=1, running=7).samples())
    text = merged(Numbers({"eos": 1}, live=1), totals)
    for line in (
        'tailrace_requests_finished_total{reason="eos"} 4.0',
        'tailrace_requests_finished_total{reason="error"} 1.0',
        "tailrace_live_requests 5.0",
        "tailrace_running 5.0",
        'tailrace_seconds_bucket{le="1.0"} 3.0',
        'tailrace_seconds_bucket{le="2.0"} 4.0',
        'tailrace_seconds_bucket{le="+Inf"} 5.0',
        "tailrace_seconds_count 5.0",
        "tailrace_seconds_sum 5.5",
    ):
        assert f"\n{line}\n" in text
    assert text.count("# TYPE tailrace_requests_finished_total counter") == 1


def test_of_a_front_end_that_is_gone_what_it_counted_stays_but_not_what_it_had_live():
    past = Totals()
    past.add(Numbers({"eos": 2}, live=3).samples(), gauges=False)
    now = past.copy()
    now.add(Numbers({"eos": 1}, live=1).samples())
    text = merged(Numbers({}, live=0), now)
    assert '\ntailrace_requests_finished_total{reason="eos"} 3.0\n' in text
    assert "\ntailrace_live_requests 1.0\n" in text
    assert '\ntailrace_requests_finished_total{reason="eos"} 2.0\n' in merged(Numbers({}, live=0), past)


def test_reports_of_several_are_one():
    one = Report(1, {"eos": 2}, [0.1], [], [1.0])
    other = Report(2, {"eos": 1, "error": 4}, [0.2, 0.3], [0.01], [])
    assert together([one, other]) == Report(3, {"eos": 3, "error": 4}, [0.1, 0.2, 0.3], [0.01], [1.0])


@pytest.mark.parametrize("is_shared", [True, False])
def test_sequences_of_other_front_ends_count_at_the_door_where_cores_are_shared(is_shared):
    admission = Admission(AdmissionOptions(max_queued_requests=6), max_running=4)
    admission.is_shared = is_shared
    admission.observe(msgspec.structs.replace(NO_STATS, running=4, waiting=4), num_in_core=1)
    admission.enter("me", 1, 1)
    admission.enter("you", 1, 2)
    if not is_shared:
        return admission.enter("they", 1, 3)
    with pytest.raises(OverloadedError, match="10 sequences at most"):
        admission.enter("they", 1, 3)
