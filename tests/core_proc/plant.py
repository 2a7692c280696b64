"""Plant: a scheduler in simulated time, for questions of load: steps take as long as a model of a device says."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from core_proc.kv_cache import KVCache
from core_proc.request import Request, make_request
from core_proc.scheduler import Scheduler
from protos.config import SchedulerOptions
from protos.messages import EngineCoreRequest, Finished, FinishReason, Sampling
from protos.step import ModelRunnerOutput, SchedulerOutput
from tests.core_proc.harness import ManualClock, columns, encode_ids

if TYPE_CHECKING:
    from collections.abc import Callable

    from core_proc.intake import StepInFlight

EOS, PLAIN = 0, 1
MAX_MODEL_LEN = 512


def small_device(step: SchedulerOutput) -> float:
    """Seconds of a step: 2 ms, 20 µs a token and 20 µs a row."""
    return 2e-3 + 20e-6 * (step.num_tokens + len(step.rows))


@dataclass
class Visit:
    """One request, as its client sees it. Times are absolute seconds; an output has `length` tokens by itself."""

    at: float
    prompt_tokens: int
    length: int
    deadline: float | None
    caller: str = ""
    ignore_eos: bool = False
    max_tokens: int = 256
    priority: int = 0
    queue_timeout: float | None = None
    prompt: Any = None
    """Token ids, int32, where it matters what they are."""
    first_token_at: float | None = None
    ended_at: float = 0.0
    finished: Finished | None = None
    num_tokens: int = 0
    token_times: list[float] = field(default_factory=list)

    def drew(self, now: float) -> None:
        self.num_tokens += 1
        self.first_token_at = self.first_token_at or now
        self.token_times.append(now)

    def end(self, finished: Finished, now: float) -> None:
        self.finished, self.ended_at = finished, now

    @property
    def in_time(self) -> bool:
        assert self.finished is not None
        return not self.finished.reason.is_failure and (
            self.deadline is None or self.ended_at <= self.at + self.deadline
        )


@dataclass
class Plant:
    """A core: `num_rows` requests at once, each step as long as `step_seconds` says."""

    num_rows: int = 32
    budget: int = 256
    clock: ManualClock = field(default_factory=ManualClock)
    step_seconds: Callable[[SchedulerOutput], float] = small_device
    max_model_len: int = MAX_MODEL_LEN
    block_size: int = 16
    num_blocks: int = 0
    """0 is enough for all rows, without prefix caching."""
    max_inter_token_gap: float = 0.0

    def __post_init__(self) -> None:
        blocks = self.num_blocks or 1 + self.num_rows * self.max_model_len // self.block_size
        options = SchedulerOptions(
            max_num_seqs=self.num_rows,
            max_num_batched_tokens=self.budget,
            max_inter_token_gap=self.max_inter_token_gap,
        )
        kv_cache = KVCache(blocks, self.block_size, prefix_caching=bool(self.num_blocks))
        self.scheduler = Scheduler(options, kv_cache, self.max_model_len, (EOS,), 8, self.clock)
        self.visits: dict[int, Visit] = {}
        """Those that are here, by handle."""
        self._step: StepInFlight | None = None

    def run(self, visits: list[Visit]) -> None:
        """Until all have ended."""
        arrivals = [(visit.at, number, visit) for number, visit in enumerate(visits)]
        heapq.heapify(arrivals)
        while arrivals or self.visits:
            while arrivals and arrivals[0][0] <= self.clock.now:
                _, number, visit = heapq.heappop(arrivals)
                self.arrive(visit, message_of(visit, number, self.clock.now))
            seconds = self.begin()
            self._collect()
            if seconds is None:
                later = [arrivals[0][0]] if arrivals else []
                timer = self.scheduler.seconds_to_timer
                later += [] if timer is None else [self.clock.now + timer]
                if not later:
                    assert not self.visits, "requests wait for nothing"
                    return
                self.clock.now = max(self.clock.now, min(later))
                continue
            self.clock.now += seconds
            self.end()
            self._collect()

    def arrive(self, visit: Visit, message: EngineCoreRequest) -> None:
        self.visits[message.handle] = visit
        self.scheduler.add(make_request(message, 0, self.block_size, self.max_model_len, self.clock.now))

    def begin(self) -> float | None:
        """Issues a step: how long it takes; None if there is nothing to do."""
        self._step = self.scheduler.schedule()
        return None if self._step is None else self.step_seconds(self._step.output)

    @property
    def step(self) -> SchedulerOutput:
        """The one that was issued last."""
        assert self._step is not None
        return self._step.output

    def end(self) -> None:
        """Takes the step in; its seconds have passed."""
        step = self._step
        assert step is not None
        drawn = [self._draw(request) for request in step.requests]
        self.scheduler.update(step, ModelRunnerOutput(step.output.step_id, np.array(drawn, np.int32)))

    def _draw(self, request: Request) -> int:
        visit = self.visits[request.handle]
        return EOS if visit.num_tokens + 1 == visit.length else PLAIN

    def _collect(self) -> None:
        for outputs in self.scheduler.events.take().values():
            for handle, _ in columns(outputs):
                self.visits[handle].drew(self.clock.now)
            for finished in outputs.finished:
                self.visits.pop(finished.handle).end(finished, self.clock.now)


def message_of(visit: Visit, handle: int, now: float) -> EngineCoreRequest:
    # In the core it is a moment later than the client counts from.
    return EngineCoreRequest(
        handle=handle,
        prompt_token_ids=encode_ids([2] * visit.prompt_tokens) if visit.prompt is None else visit.prompt.tobytes(),
        sampling=Sampling(ignore_eos=visit.ignore_eos),
        max_tokens=visit.length if visit.ignore_eos else visit.max_tokens,
        deadline=None if visit.deadline is None else visit.deadline + visit.at - now,
        queue_timeout=visit.queue_timeout,
        caller=visit.caller,
        priority=visit.priority,
    )


def poisson(rate: float, seconds: float, seed: int = 0, **fields: Any) -> list[Visit]:
    """Requests at random moments, `rate` a second, with prompts of 50 to 150 tokens and outputs of 1 to 99."""
    rng = random.Random(seed)
    visits, now = [], 0.0
    while (now := now + rng.expovariate(rate)) < seconds:
        visits.append(Visit(now, rng.randint(50, 150), rng.randint(1, 99), **fields))
    return visits


def reasons(visits: list[Visit]) -> dict[FinishReason, int]:
    found: dict[FinishReason, int] = {}
    for visit in visits:
        assert visit.finished is not None
        found[visit.finished.reason] = found.get(visit.finished.reason, 0) + 1
    return found
