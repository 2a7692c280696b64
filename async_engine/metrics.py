"""Prometheus metrics: fed by the core's statistics and by each request's end, never by a token."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import TYPE_CHECKING

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    start_http_server,
)

from protos.errors import StartupError
from protos.front_ends import Sample
from protos.messages import NO_STATS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from prometheus_client.core import Metric

    from async_engine.async_llm import AsyncLLM
    from async_engine.request_state import RequestState
    from protos.messages import CoreStats, Finished

SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TOKENS = (1, 8, 32, 128, 512, 2048, 8192, 32768, 131072)

# Name and help of each gauge and counter, by the CoreStats field it shows.
_GAUGES = {
    "running": "Requests in the running batch.",
    "waiting": "Requests waiting for admission.",
    "kv_usage": "Fraction of the KV blocks in use.",
    "steps_in_flight": "Steps issued whose result is not back.",
    "queue_seconds": "Until what waits now will have been admitted, by estimate.",
}
_COUNTERS = {
    "prompt_tokens": "Prompt tokens of admitted requests.",
    "output_tokens": "Tokens drawn.",
    "prefix_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_hits": "Prompt tokens found in the prefix cache.",
    "preemptions": "Times a request lost its memory.",
    "steps": "Engine steps issued.",
    "aborted_tokens": "Tokens computed for requests that were aborted.",
}


class Metrics:
    """One registry per engine."""

    def __init__(self, llm: AsyncLLM) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # they would double the series
        self.registry = CollectorRegistry()
        self._gauges = {name: self._gauge(f"tailrace_{name}", text) for name, text in _GAUGES.items()}
        self._counters = {
            name: Counter(f"tailrace_{name}", text, registry=self.registry) for name, text in _COUNTERS.items()
        }
        self._last = NO_STATS
        live = self._gauge("tailrace_live_requests", "Requests the front end knows.")
        live.set_function(lambda: llm.num_live)
        silence = self._gauge("tailrace_core_silent_seconds", "Since the core was last heard of: its step's age.")
        silence.set_function(lambda: llm.cores.silent_seconds)
        adapters = self._gauge("tailrace_adapters", "LoRA adapters that requests may ask for.")
        adapters.set_function(lambda: len(llm.cores.adapters.names))
        self._finished = Counter(
            "tailrace_requests_finished", "Requests that are over.", ["reason"], registry=self.registry
        )
        restarts = self._gauge("tailrace_core_restarts", "Cores started to replace one that died.")
        restarts.set_function(lambda: llm.cores.num_restarts)
        self._merged = Counter(
            "tailrace_merged_tokens", "Tokens that joined a delta their reader had not taken.", registry=self.registry
        )
        self._ttft = self._histogram("tailrace_time_to_first_token_seconds", "Arrival to first token.", SECONDS)
        self._e2e = self._histogram("tailrace_e2e_request_latency_seconds", "Arrival to end.", SECONDS)
        self._inter_token = self._histogram(
            "tailrace_inter_token_latency_seconds", "Mean time between tokens of a request.", SECONDS
        )
        self._queue = self._histogram("tailrace_request_queue_seconds", "Arrival to admission.", SECONDS)
        self._prefill = self._histogram("tailrace_request_prefill_seconds", "Admission to first token.", SECONDS)
        self._decode = self._histogram("tailrace_request_decode_seconds", "First token to end.", SECONDS)
        self._prompt = self._histogram("tailrace_request_prompt_tokens", "Prompt tokens of a request.", TOKENS)
        self._output = self._histogram("tailrace_request_output_tokens", "Output tokens of a request.", TOKENS)
        llm.on_end.append(self._ended)
        llm.on_stats.append(self._stats)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, buckets=buckets, registry=self.registry)

    def _stats(self, stats: CoreStats) -> None:
        for name, gauge in self._gauges.items():
            gauge.set(getattr(stats, name))
        for name, counter in self._counters.items():
            counter.inc(getattr(stats, name) - getattr(self._last, name))
        self._last = stats

    def _ended(self, state: RequestState, finished: Finished) -> None:
        self._finished.labels(finished.reason.name.lower()).inc()
        self._merged.inc(state.sink.num_merged)
        now = time.monotonic()
        self._e2e.observe(now - state.arrival_time)
        self._queue.observe(finished.queue_seconds)
        self._prompt.observe(state.prompt_tokens)
        self._output.observe(state.output_tokens)
        if (ttft := state.time_to_first_token) is not None:
            self._ttft.observe(ttft)
            self._prefill.observe(finished.prefill_seconds)
            self._decode.observe(finished.decode_seconds)
            if (gap := state.inter_token_seconds(finished)) is not None:
                self._inter_token.observe(gap)


OF_THE_ENGINE = {
    *(f"tailrace_{name}" for name in (*_GAUGES, *_COUNTERS)),
    "tailrace_core_silent_seconds",
    "tailrace_core_restarts",
    "tailrace_adapters",
}
"""Families that every front end of an engine knows alike, as the cores tell all. The others are each one's own."""


def samples(families: Iterable[Metric]) -> list[Sample]:
    """Those that are a front end's own."""
    return [
        Sample(family.name, sample.name, dict(sample.labels), sample.value)
        for family in families
        if family.name not in OF_THE_ENGINE
        for sample in family.samples
    ]


class Totals:
    """Sums of samples of several front ends, each family's by name and labels."""

    def __init__(self) -> None:
        self._sums: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = defaultdict(dict)

    def copy(self) -> Totals:
        copy = Totals()
        copy._sums.update({family: dict(sums) for family, sums in self._sums.items()})
        return copy

    def add(self, of_one: Iterable[Sample], gauges: bool = True) -> None:
        """Of a front end that is gone without what it had live: `gauges` are what a name without a suffix tells."""
        for sample in of_one:
            if gauges or sample.name != sample.family:
                key = sample.name, tuple(sorted(sample.labels.items()))
                sums = self._sums[sample.family]
                sums[key] = sums.get(key, 0.0) + sample.value

    def added_to(self, families: Iterable[Metric]) -> Iterator[Metric]:
        """The families of one more front end, with these."""
        for family in families:
            sums = dict(self._sums.get(family.name, {}))
            found, family.samples = family.samples, []
            for sample in found:
                key = sample.name, tuple(sorted(sample.labels.items()))
                family.add_sample(sample.name, sample.labels, sample.value + sums.pop(key, 0.0))
            for (name, labels), value in sums.items():
                family.add_sample(name, dict(labels), value)
            yield family


class MergedRegistry(CollectorRegistry):
    """A front end's registry, with what the others have counted. Collected on the thread of the HTTP server."""

    def __init__(self, own: CollectorRegistry, others: Callable[[], Totals]) -> None:
        """`others` is called on that thread, too."""
        super().__init__()
        self._own = own
        self._others = others

    def collect(self) -> Iterator[Metric]:
        yield from self._others().added_to(self._own.collect())


class MetricsServer:
    """Serves a registry over HTTP at /metrics, on a thread of its own."""

    def __init__(self, address: str, registry: CollectorRegistry) -> None:
        host, _, port = address.rpartition(":")
        try:
            self._server, self._thread = start_http_server(int(port), host or "0.0.0.0", registry)
        except (OSError, ValueError, OverflowError) as error:
            raise StartupError(f"cannot serve metrics on {address}: {error}; choose another --metrics-listen") from None

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
