"""Plant: a scheduler in simulated time, for questions of load: steps take as long as a model of a device says."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from core_proc.kv_cache import KVCache
from core_proc.request import Request, make_request
from core_proc.scheduler import Scheduler
from protos.config import SchedulerOptions
from protos.messages import EngineCoreRequest, Finished, FinishReason, Sampling
from protos.step import ModelRunnerOutput
from tests.core_proc.harness import ManualClock, columns, encode_ids

EOS, PLAIN = 0, 1
MAX_MODEL_LEN = 512


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
    first_token_at: float | None = None
    ended_at: float = 0.0
    finished: Finished | None = None
    num_tokens: int = 0

    @property
    def in_time(self) -> bool:
        assert self.finished is not None
        return not self.finished.reason.is_failure and (
            self.deadline is None or self.ended_at <= self.at + self.deadline
        )


@dataclass
class Plant:
    """`num_rows` requests at once; a step takes 2 ms, 20 µs a token and 20 µs a row."""

    num_rows: int = 32
    budget: int = 256
    clock: ManualClock = field(default_factory=ManualClock)

    def __post_init__(self) -> None:
        blocks = 1 + self.num_rows * MAX_MODEL_LEN // 16
        options = SchedulerOptions(max_num_seqs=self.num_rows, max_num_batched_tokens=self.budget)
        kv_cache = KVCache(blocks, 16, prefix_caching=False)
        self.scheduler = Scheduler(options, kv_cache, MAX_MODEL_LEN, (EOS,), 8, self.clock)
        self.steps_with_rows = 0
        self._visits: dict[int, Visit] = {}

    def run(self, visits: list[Visit]) -> None:
        """Until all have ended."""
        arrivals = [(visit.at, number, visit) for number, visit in enumerate(visits)]
        heapq.heapify(arrivals)
        while arrivals or self._visits:
            while arrivals and arrivals[0][0] <= self.clock.now:
                self._arrive(*heapq.heappop(arrivals)[1:])
            step = self.scheduler.schedule()
            self._collect()
            if step is None:
                later = [arrivals[0][0]] if arrivals else []
                timer = self.scheduler.seconds_to_timer
                later += [] if timer is None else [self.clock.now + timer]
                if not later:
                    assert not self._visits, "requests wait for nothing"
                    return
                self.clock.now = max(self.clock.now, min(later))
                continue
            self.clock.now += 2e-3 + 20e-6 * (step.output.num_tokens + len(step.output.rows))
            drawn = [self._draw(request) for request in step.requests]
            self.scheduler.update(step, ModelRunnerOutput(step.output.step_id, np.array(drawn, np.int32)))
            self._collect()

    def _arrive(self, number: int, visit: Visit) -> None:
        # In the core it is a moment later than the client counts from.
        message = EngineCoreRequest(
            handle=number,
            prompt_token_ids=encode_ids([2] * visit.prompt_tokens),
            sampling=Sampling(ignore_eos=visit.ignore_eos),
            max_tokens=visit.length if visit.ignore_eos else visit.max_tokens,
            deadline=None if visit.deadline is None else visit.deadline + visit.at - self.clock.now,
            queue_timeout=visit.queue_timeout,
            caller=visit.caller,
            priority=visit.priority,
        )
        self._visits[number] = visit
        self.scheduler.add(make_request(message, 0, 16, MAX_MODEL_LEN, self.clock.now))

    def _draw(self, request: Request) -> int:
        visit = self._visits[request.handle]
        return EOS if visit.num_tokens + 1 == visit.length else PLAIN

    def _collect(self) -> None:
        for outputs in self.scheduler.events.take().values():
            for handle, _ in columns(outputs):
                visit = self._visits[handle]
                visit.num_tokens += 1
                visit.first_token_at = visit.first_token_at or self.clock.now
            for finished in outputs.finished:
                visit = self._visits.pop(finished.handle)
                visit.finished, visit.ended_at = finished, self.clock.now


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
