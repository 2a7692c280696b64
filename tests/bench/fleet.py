"""Fleet: many cores behind one front end in simulated time, with the code that decides and counts in earnest.

Scheduler, KVCache, Admission, OutputProcessor, CoreGroup and its router are the real ones; messages are encoded and
decoded as between processes. Simulated are time, the device, which takes as long as a model of it says, and the
sockets. What the real code takes is measured on the way.
"""

from __future__ import annotations

import heapq
import itertools
import time
from array import array
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from async_engine.admission import Admission
from async_engine.core_group import CoreGroup
from async_engine.core_source import CoreSource
from async_engine.output_processor import OutputProcessor
from async_engine.prefix_map import prefix_hashes
from async_engine.request_state import Rendering, RequestState
from async_engine.tokenizer import byte_tokenizer
from core_proc.block_hash import request_root
from protos import codec
from protos.errors import OverloadedError
from protos.kv_changes import ROUTER_WATCH, WatchKV
from protos.messages import Abort, CoreReady, EngineCoreOutputs, EngineCoreRequest, Vocabulary
from protos.server_config import AdmissionOptions
from tests.bench.fleet_load import Turn
from tests.core_proc.plant import Plant, message_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from async_engine.router import Router
    from tests.core_proc.harness import ManualClock

STATS_INTERVAL = 0.25
"""Simulated seconds between two statistics of a core, as in a real one."""


class Stopwatch:
    """Seconds of pieces of code, by name, and how often they ran.

    The slowest of a name's pieces are those in which the machine did something else: they count as the others do.
    """

    SLOWEST = 0.05

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._pieces: defaultdict[str, array[float]] = defaultdict(lambda: array("f"))

    def add(self, name: str, began: float, count: int = 1) -> None:
        """A piece that began then is over; it did so many things that are counted."""
        self._pieces[name].append(time.perf_counter() - began)
        self.counts[name] += count

    def wrap(self, owner: Any, method: str, name: str) -> None:
        call = getattr(owner, method)

        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            result = call(*arguments)
            self.add(name, began)
            return result

        setattr(owner, method, timed)

    def seconds(self, name: str) -> float:
        """Of all pieces together."""
        pieces = np.sort(np.array(self._pieces[name], np.float64))
        usual = pieces[: len(pieces) - int(self.SLOWEST * len(pieces))]
        return float(usual.mean() * len(pieces)) if len(pieces) else 0.0

    def microseconds(self, *names: str, per: int) -> float:
        return sum(map(self.seconds, names)) / max(1, per) * 1e6


class SimCore:
    """Stands where a CoreClient does: what is sent to it waits until the fleet takes it to the plant."""

    def __init__(self, number: int, plant: Plant, dirty: set[int]) -> None:
        self.plant = plant
        self._number, self._dirty = number, dirty
        self.sent: list[Any] = []
        self.busy_seconds = 0.0
        self.computed_tokens = 0
        self.row_seconds = 0.0
        """Running sequences, summed over time."""
        self.is_busy = False
        self.stats_due = 0.0
        self.ready = CoreReady(
            max_model_len=plant.max_model_len,
            kv_capacity_tokens=plant.scheduler.kv_cache.capacity_tokens,
            block_size=plant.block_size,
            max_num_seqs=plant.num_rows,
            dtype="none",
            device="simulated",
            weight_bytes=0,
            kv_cache_bytes=0,
        )

    def send(self, message: Any) -> None:
        self.sent.append(message)
        self._dirty.add(self._number)


class Times:
    """What clients saw, in simulated seconds, of requests that came after the warm-up."""

    def __init__(self) -> None:
        self.first = array("d")
        self.gaps = array("d")
        self.requests = self.tokens = self.refused = 0


class VisitSink:
    """A client: notes when its tokens come."""

    num_merged = 0

    def __init__(self, fleet: Fleet, visit: Turn) -> None:
        self._fleet, self._visit = fleet, visit
        self._last = 0.0

    def sequence(self, index: int) -> VisitSink:
        return self

    def tokens(self, token_ids: list[int], text: str, extra: Any = None) -> None:
        now, visit = self._fleet.clock.now, self._visit
        times = self._fleet.times
        visit.drew(now)
        if visit.at >= self._fleet.warm_up:
            if visit.num_tokens == 1:
                times.first.append(now - visit.at)
            else:
                times.gaps.append(now - self._last)
        self._last = now

    def started(self, cached_tokens: int) -> None: ...
    def finish(self, finish: Any) -> None: ...
    def summary(self, summary: Any) -> None: ...
    def failed(self, error: Exception) -> None: ...


class Fleet:
    """`make_plant(clock)` makes a core; `route` may take the place of the router's choice: (number of request) to core.

    `warm_up`: simulated seconds at the start that count for nothing.
    """

    def __init__(
        self,
        num_cores: int,
        make_plant: Callable[[ManualClock], Plant],
        clock: ManualClock,
        warm_up: float = 0.0,
        route: Callable[[int], int] | None = None,
        admission: AdmissionOptions | None = None,
    ) -> None:
        self.clock = clock
        self.warm_up = warm_up
        self.times = Times()
        self.watch = Stopwatch()
        self._dirty: set[int] = set()
        """Cores that something was sent to."""
        self.cores = [SimCore(number, make_plant(clock), self._dirty) for number in range(num_cores)]
        self._processor = OutputProcessor(lambda state: self._admission.unqueue(state), self._ended, self._began)
        self.group = CoreGroup(
            [(CoreSource(f"core {number}", _never), core) for number, core in enumerate(self.cores)],  # type: ignore[misc]
            self._processor,
            is_live=lambda state: True,
            on_stats=lambda stats: self._admission.observe(stats, num_in_core=0),
            vocabulary=lambda: Vocabulary([], (), ()),
            max_core_restarts=0,
        )
        self._admission = Admission(
            admission or AdmissionOptions(max_queued_requests=1 << 20, max_queued_tokens=1 << 40),
            self.group.ready.max_num_seqs,
        )
        self._tokenizer = byte_tokenizer()
        self._visits: dict[int, Turn] = {}
        self._handles = itertools.count()
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, int | Turn]] = []
        self._before = np.zeros((num_cores, 4))
        self._is_warm = warm_up == 0
        self.router: Router | None = self.group._router
        if self.router is not None:
            for core in self.cores:
                core.send(WatchKV(ROUTER_WATCH))
            if route is not None:
                self._replace_choice(self.router, route)
            self.watch.wrap(self.router, "route", "route")
            for method in ("update", "computed", "ended"):
                self.watch.wrap(self.router, method, "map")

    def _replace_choice(self, router: Router, route: Callable[[int], int]) -> None:
        calls = itertools.count()
        router.route = lambda hashes, num_tokens, count=1: router._enter(  # type: ignore[method-assign]
            route(next(calls)), [], 0, num_tokens, count
        )

    # Simulated time -----------------------------------------------------------------------------

    def run(self, visits: Iterable[Turn]) -> None:
        """Until all have ended. Visits come in order of time; each may name one that follows it."""
        coming = iter(visits)
        self._next_arrival(coming)
        while self._events:
            self.clock.now, _, what = heapq.heappop(self._events)
            if not self._is_warm and self.clock.now >= self.warm_up:
                self._begin_to_count()
            if isinstance(what, Turn):
                if what.is_first:
                    self._next_arrival(coming)
                self._submit(what)
            else:
                self._step_back(what)
                self._dirty.add(what)
            while self._dirty:
                number = self._dirty.pop()
                core = self.cores[number]
                self._deliver(core)
                if not core.is_busy and core.plant.scheduler.has_work:
                    self._step_out(number)

    def _next_arrival(self, coming: Iterator[Turn]) -> None:
        visit = next(coming, None)
        if visit is not None:
            self._push(visit.at, visit)

    def _push(self, at: float, what: int | Turn) -> None:
        heapq.heappush(self._events, (at, next(self._numbers), what))

    def _begin_to_count(self) -> None:
        self._is_warm = True
        self._before = self._totals()

    # The front end ------------------------------------------------------------------------------

    def _submit(self, visit: Turn) -> None:
        counted = visit.at >= self.warm_up
        handle = next(self._handles)
        prompt = visit.prompt = visit.make_prompt()
        visit.prompt_tokens = len(prompt)
        message = message_of(visit, handle, self.clock.now)
        visit.prompt = None
        began = time.perf_counter()
        state = RequestState(str(handle), VisitSink(self, visit), [handle], visit.caller)
        try:
            self._admission.enter(visit.caller, 1, len(self._processor.sequences))
        except OverloadedError:
            self.times.refused += counted
            return
        state.sequences[0].render(Rendering(self._tokenizer.new_detokenizer(True), wants_text=True))
        state.prompt_tokens = visit.prompt_tokens
        self._admission.queue(state, visit.prompt_tokens)
        self.watch.add("enter", began)
        if self.router is not None:
            began = time.perf_counter()
            block_size, root = self.group.ready.block_size, request_root("", "")
            state.prefix_hashes = prefix_hashes(prompt, block_size, root)
            self.watch.add("hash", began)
        began = time.perf_counter()
        state.message = message
        self._processor.sequences[handle] = state.sequences[0]
        self._visits[handle] = visit
        self.group.submit(state)
        self.watch.add("submit", began)

    def _began(self, state: RequestState) -> None:
        self.group.began(state)

    def _ended(self, state: RequestState, finished: Any) -> None:
        self.group.ended(state)
        self._admission.leave(state)
        visit = self._visits.pop(state.handle)
        del self.cores[state.core].plant.visits[state.handle]
        visit.end(finished, self.clock.now)
        if visit.at >= self.warm_up:
            self.times.requests += 1
            self.times.tokens += visit.num_tokens
        if visit.then is not None:
            visit.then.at = self.clock.now + visit.then.think
            self._push(visit.then.at, visit.then)

    # The cores ----------------------------------------------------------------------------------

    def _deliver(self, core: SimCore) -> None:
        plant = core.plant
        for message in core.sent:
            began = time.perf_counter()
            frame = codec.to_core.decode(msgspec.msgpack.encode(message))
            match frame:
                case EngineCoreRequest():
                    plant.arrive(self._visits[frame.handle], frame)
                    self.watch.add("core request", began)
                case Abort():
                    plant.scheduler.abort(0, frame.handles, frame.stopped)
                case WatchKV():
                    plant.scheduler.kv_cache.changes.begin(0, frame)
        core.sent.clear()

    def _step_out(self, number: int) -> None:
        core = self.cores[number]
        began = time.perf_counter()
        seconds = core.plant.begin()
        self.watch.add("core schedule", began, seconds is not None)
        if seconds is not None:
            core.is_busy = True
            core.busy_seconds += seconds
            step = core.plant.step
            core.computed_tokens += step.num_tokens
            core.row_seconds += seconds * len(step.rows)
            self._push(self.clock.now + seconds, number)
        self._take(number)

    def _step_back(self, number: int) -> None:
        core = self.cores[number]
        began = time.perf_counter()
        core.plant.end()
        self.watch.add("core update", began)
        core.is_busy = False
        self._take(number)

    def _take(self, number: int) -> None:
        """What a step brought, to the front end."""
        core = self.cores[number]
        scheduler = core.plant.scheduler
        began = time.perf_counter()
        outputs = scheduler.events.take().get(0)
        changes = scheduler.kv_cache.changes.take(0)
        has_stats = self.clock.now >= core.stats_due or not scheduler.has_work
        if outputs is None and not changes and not has_stats:
            return
        outputs = msgspec.structs.replace(outputs or EngineCoreOutputs(), kv_changes=changes)
        if has_stats:
            core.stats_due = self.clock.now + STATS_INTERVAL
            outputs = msgspec.structs.replace(outputs, stats=scheduler.stats(int(core.is_busy)))
        frame = codec.encode_frame(outputs)
        self.watch.add("core send", began)
        began = time.perf_counter()
        self.group.took(self.group.slots[number], codec.to_front_end.decode(frame[4:]))
        self.watch.add("outputs", began, len(outputs.handles) // 8)

    @property
    def tokens_counted(self) -> int:
        """That came to requests of after the warm-up."""
        return len(self.times.first) + len(self.times.gaps)

    # What came of it ----------------------------------------------------------------------------

    def _totals(self) -> np.ndarray:
        """[cores, 4]: prefix hits and queries in tokens, tokens computed, sequences over time."""
        stats = [core.plant.scheduler.stats(0) for core in self.cores]
        return np.array(
            [
                (told.prefix_hits, told.prefix_queries, core.computed_tokens, core.row_seconds)
                for told, core in zip(stats, self.cores, strict=True)
            ]
        )

    def results(self) -> Results:
        hits, queries, computed, rows = (self._totals() - self._before).T
        return Results(
            hit_rate=float(hits.sum() / max(1, queries.sum())),
            imbalance=_imbalance(computed),
            row_imbalance=_imbalance(rows),
            running=float(rows.mean() / (self.clock.now - self.warm_up)),
        )


@dataclass(frozen=True)
class Results:
    """After the warm-up. An imbalance is by how much the core with most had more than the mean."""

    hit_rate: float
    """Of prompt tokens, found in a cache."""
    imbalance: float
    """Of tokens computed."""
    row_imbalance: float
    """Of running sequences, in the mean over time."""
    running: float
    """Sequences in a core, in the mean."""


def _imbalance(amounts: np.ndarray) -> float:
    return float(amounts.max() / amounts.mean() - 1)


def _never(*_: Any) -> Any:
    raise AssertionError("no core dies here")
