"""Scheduler: who runs in a step with how many tokens, and what the drawn tokens mean.

There is no prefill phase and no decode phase. A request has tokens known and tokens computed; a step
gives each request some of the difference, within a budget of tokens. Chunked prefill, prefix hits
and resumption after preemption all follow from that.

Progress is counted when a step is scheduled, not when it is back, so that the next one can be
scheduled meanwhile. A step in flight remembers rows, epochs and positions: its tokens go to rows
whose epoch is still the same, and otherwise to the request if that was merely preempted.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from core_proc.request import Request, State
from core_proc.request_table import RequestTable
from core_proc.timers import PrefillRate
from protos.messages import FinishReason
from protos.step import EMPTY, NewRow, SchedulerOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from core_proc.kv_cache import KVCache
    from protos.config import SchedulerOptions
    from protos.messages import CoreStats

Int32s = npt.NDArray[np.int32]
_EXPIRED = {
    FinishReason.DEADLINE: "the deadline has passed",
    FinishReason.QUEUE_TIMEOUT: "not admitted within the queue timeout",
}
_MISPLACED = "a step returned a token out of place or out of the vocabulary"


@dataclass(slots=True)
class StepInFlight:
    """What is remembered of a step until its tokens are back. Arrays are parallel: the rows that draw."""

    output: SchedulerOutput
    scheduled_time: float
    rows: Int32s
    epochs: npt.NDArray[np.int64]
    positions: Int32s
    """Index in prompt + output that the drawn token will have."""
    requests: npt.NDArray[np.object_]
    all_requests: npt.NDArray[np.object_]
    """Of every scheduled row, drawing or not."""


@dataclass(slots=True)
class _Draft:
    """A step while it is being put together."""

    new_rows: list[NewRow] = field(default_factory=list)
    block_rows: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    grown: set[int] = field(default_factory=set)
    """Rows that got blocks: the only decoding ones that may have filled one."""


class Scheduler:
    """Owns every request of the core. Synchronous, knows no sockets, no text and no tensors.

    `eos_token_ids` end a request unless it says otherwise. `clock` returns seconds.
    """

    def __init__(
        self,
        options: SchedulerOptions,
        kv_cache: KVCache,
        max_model_len: int,
        eos_token_ids: Iterable[int],
        vocab_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert max_model_len <= kv_cache.capacity_tokens, "a request that can never fit would wait for ever"
        self.max_model_len = max_model_len
        self.kv_cache = kv_cache
        self.table = RequestTable(options.max_num_seqs, max_model_len, kv_cache, clock)
        self.events = self.table.events
        self.admission: Literal["open", "paused", "frozen"] = "open"
        self._rows = self.table.rows
        self._waiting = self.table.waiting
        self._budget = options.max_num_batched_tokens
        self._prefill_cap = options.long_prefill_threshold or max(1, self._budget // 4)
        self._is_eos = np.zeros(vocab_size, np.bool_)
        self._is_eos[list(eos_token_ids)] = True
        self._prefill_rate = PrefillRate()
        self._clock = clock
        self._num_steps = 0

    def __repr__(self) -> str:
        return f"Scheduler({self.admission}, {self.table}, steps={self._num_steps})"

    def add(self, request: Request) -> None:
        """Queues a request; one that could never run fails at once."""
        self.table.add(request)
        if not 0 < request.num_waiting_tokens < request.max_len <= self.max_model_len:
            self.table.finish(request, FinishReason.ERROR, f"its length must be within 1 and {self.max_model_len - 1}")

    def abort(self, client: int, handles: Iterable[int]) -> None:
        """Ends requests wherever they are; unknown handles are ignored."""
        for handle in handles:
            request = self.table.get(client, handle)
            if request is not None:
                self.table.finish(request, FinishReason.ABORTED)

    def progress(self, client: int, handle: int) -> list[int]:
        """[requests ahead of it in the queue, prompt tokens computed] of a live request, else []."""
        request = self.table.get(client, handle)
        if request is None:
            return []
        if request.state is State.WAITING:
            return [self._waiting.position(request), 0]
        return [0, min(int(self._rows.computed[request.row]), request.num_prompt_tokens)]

    def reset_prefix_cache(self, preempt_running: bool = False) -> bool:
        """Forgets all cached blocks. Refused, with False, while one is in use, unless what runs may start over:
        then tokens still in flight are dropped, since what they were drawn from no longer counts."""
        if not preempt_running:
            return self.kv_cache.pool.reset()
        for request in self.table.running():
            self.table.preempt(request, publish=False)
        self.table.drop_in_flight(self._num_steps - 1)
        self.kv_cache.pool.forget_all()
        return True

    @property
    def has_work(self) -> bool:
        """Whether `schedule` may find something to do."""
        return self.admission != "frozen" and (len(self._rows) > 0 or self._next_to_admit() is not None)

    @property
    def seconds_to_timer(self) -> float | None:
        """Until a request runs out of time; None if none can."""
        return self.table.timers.seconds_left(self._clock())

    def stats(self, steps_in_flight: int) -> CoreStats:
        return self.table.stats(self._num_steps, steps_in_flight)

    # Schedule ---------------------------------------------------------------------------------

    def schedule(self) -> StepInFlight | None:
        """Chooses the next step, or None if there is nothing to compute now."""
        now = self._clock()
        self.expire(now)
        if self.admission == "frozen":
            return None
        draft = _Draft()
        rows, counts, scarce = self._schedule_running(draft)
        if not scarce and len(self._waiting):
            admitted, chunks = self._admit(draft, self._budget - int(counts.sum()), now)
            if admitted:
                rows = np.concatenate([rows, np.array(admitted, np.int32)])
                counts = np.concatenate([counts, np.array(chunks, np.int32)])
        if not len(rows):
            return None
        return self._issue(draft, rows, counts, now)

    def _schedule_running(self, draft: _Draft) -> tuple[Int32s, Int32s, bool]:
        """(rows, tokens of each, whether blocks were too few for one of them) of the running rows that compute."""
        scarce = False
        columns = self._rows
        while True:
            rows = columns.in_order
            computed = columns.computed[rows]
            expected = columns.expected[rows]
            todo = expected - computed
            # A row that is certain to end when its step returns has nothing more to compute.
            todo[expected >= columns.max_len[rows]] = 0
            if np.count_nonzero(todo) + len(self._waiting) > 1:
                np.minimum(todo, self._prefill_cap, out=todo)
            ends = np.cumsum(todo)
            counts = todo
            if len(ends) and ends[-1] > self._budget:
                counts = np.clip(self._budget - (ends - todo), 0, todo).astype(np.int32)
            short = np.flatnonzero(computed + counts > columns.capacity[rows])
            if all(self._grow(draft, rows, counts, int(index)) for index in short):
                chosen = counts > 0
                return rows[chosen], counts[chosen], scarce or not counts[short].all()
            # Someone left: whoever could not grow tries again, with the budget that came back.
            scarce = True

    def _grow(self, draft: _Draft, rows: Int32s, counts: Int32s, index: int) -> bool:
        """Gives a row the blocks its tokens need, or lets it skip the step; False if it had to preempt."""
        row = int(rows[index])
        request: Request = self._rows.requests[row]
        blocks = self.kv_cache.grow(request, int(self._rows.computed[row]) + int(counts[index]))
        if blocks is not None:
            draft.block_rows += [row] * len(blocks)
            draft.block_ids += blocks
            draft.grown.add(row)
            self._rows.capacity[row] += len(blocks) * self.kv_cache.block_size
        elif self.kv_cache.has_deferred:
            counts[index] = 0
        else:
            # The last in order cannot have got blocks in this step: it would have been the last to ask.
            self.table.preempt(self._rows.last())
            return False
        return True

    def _admit(self, draft: _Draft, budget: int, now: float) -> tuple[list[int], list[int]]:
        """(rows, tokens of each) of waiting requests that start or resume in this step."""
        rows: list[int] = []
        counts: list[int] = []
        while budget > 0 and self._rows.num_free and (request := self._next_to_admit()):
            if request.last_step > self.kv_cache.last_returned_step:
                break  # a token of it is still in flight
            num_tokens = request.num_waiting_tokens
            hits = self.kv_cache.lookup(request)
            cached = len(hits) * self.kv_cache.block_size
            if self._prefill_rate.misses_deadline(request, num_tokens - cached, now):
                self.table.finish(request, FinishReason.DEADLINE, "the deadline cannot be met any more")
                continue
            # All of it must fit, not just the first chunk: else prompts evict one another half-way.
            if not self.kv_cache.fits(num_tokens, hits):
                break
            self.kv_cache.share(request, hits)
            count = min(num_tokens - cached, budget)
            if len(self._rows) or len(self._waiting) > 1:
                count = min(count, self._prefill_cap)
            grown = self.kv_cache.grow(request, cached + count)
            assert grown is not None, "fits() was asked"
            rows.append(self.table.start(request, cached, now))
            counts.append(count)
            budget -= count
            draft.new_rows.append(
                NewRow(
                    row=request.row,
                    token_ids=request.token_ids,
                    num_prompt_tokens=request.num_prompt_tokens,
                    block_ids=list(request.block_ids),
                    sampling=request.params.sampling,
                )
            )
            self._publish(request, cached + count)
        return rows, counts

    def _next_to_admit(self) -> Request | None:
        """Head of the queue; while admission is paused, of those in it that had been admitted before."""
        if self.admission == "paused":
            preempted = (request for request in self._waiting if request.admitted_time > -math.inf)
            return min(preempted, key=lambda request: request.key, default=None)
        return self._waiting.peek()

    def _issue(self, draft: _Draft, rows: Int32s, counts: Int32s, now: float) -> StepInFlight:
        """Counts the chosen tokens as computed and describes the step."""
        columns = self._rows
        starts = columns.computed[rows]
        computed = starts + counts
        columns.computed[rows] = computed
        columns.last_step[rows] = self._num_steps
        expected = columns.expected[rows]
        samples = computed == expected
        drawing = rows[samples]
        positions = expected[samples]
        columns.expected[drawing] = positions + 1
        for row in {*draft.grown, *rows[counts > 1].tolist()}:
            self._publish(columns.requests[row], int(columns.computed[row]))
        output = SchedulerOutput(
            step_id=self._num_steps,
            rows=rows,
            starts=starts,
            counts=counts,
            samples=samples,
            new_rows=draft.new_rows,
            block_rows=np.array(draft.block_rows, np.int32) if draft.block_rows else EMPTY,
            block_ids=np.array(draft.block_ids, np.int32) if draft.block_ids else EMPTY,
        )
        self._num_steps += 1
        return StepInFlight(
            output=output,
            scheduled_time=now,
            rows=drawing,
            epochs=columns.epoch[drawing],
            positions=positions,
            requests=columns.requests[drawing],
            all_requests=columns.requests[rows],
        )

    def _publish(self, request: Request, num_computed: int) -> None:
        known = self._rows.token_ids[request.row, : self._rows.known[request.row]]
        self.kv_cache.publish(request, known, num_computed, self._num_steps)

    # Update -----------------------------------------------------------------------------------

    def update(self, step: StepInFlight, token_ids: Int32s) -> None:
        """Takes in what a step drew. Steps come back in the order they were issued."""
        now = self._clock()
        self.kv_cache.step_returned(step.output.step_id)
        # One token of each row is not prefill, or not enough to matter.
        self._prefill_rate.observe(step.output.num_tokens - len(step.output.rows), step.scheduled_time, now)
        columns = self._rows
        rows, positions = step.rows, step.positions
        current = columns.epoch[rows] == step.epochs
        if not current.all():
            for index in np.flatnonzero(~current).tolist():
                self._deliver_late(step, index, int(token_ids[index]), now)
            rows, positions, token_ids = rows[current], positions[current], token_ids[current]
        as_expected = (columns.known[rows] == positions) & (token_ids >= 0) & (token_ids < len(self._is_eos))
        if not as_expected.all():
            for row in rows[~as_expected].tolist():
                self.table.finish(columns.requests[row], FinishReason.ERROR, _MISPLACED)
            rows, positions, token_ids = rows[as_expected], positions[as_expected], token_ids[as_expected]
        columns.token_ids[rows, positions] = token_ids
        columns.known[rows] = positions + 1
        self.events.tokens(columns.client[rows], columns.handle[rows], token_ids)
        first = columns.awaits_first[rows]
        if first.any():
            for row in rows[first].tolist():
                columns.requests[row].first_token_time = now
            columns.awaits_first[rows] = False
        ended = self._is_eos[token_ids] & ~columns.ignore_eos[rows]
        ended |= positions + 1 >= columns.max_len[rows]
        ended |= columns.has_stop_ids[rows]
        for index in np.flatnonzero(ended).tolist():
            self._finish_if_ended(columns.requests[rows[index]], int(token_ids[index]), int(positions[index]) + 1)

    def fail(self, step: StepInFlight, message: str) -> None:
        """A step raised: its requests end, the engine goes on.

        What the step was to fill is withdrawn; whoever already built on it starts over.
        """
        false_blocks = self.kv_cache.step_failed(step.output.step_id)
        for request in step.all_requests:
            if request.state is State.RUNNING:
                self.table.finish(request, FinishReason.ERROR, message)
        for request in self.table.running():
            if not false_blocks.isdisjoint(request.block_ids):
                self.table.preempt(request, publish=False)
        self.table.drop_in_flight(self._num_steps - 1)

    def expire(self, now: float) -> None:
        """Ends the requests whose time is up."""
        for request, reason in self.table.timers.due(now):
            self.table.finish(request, reason, _EXPIRED.get(reason, ""))

    def _deliver_late(self, step: StepInFlight, index: int, token_id: int, now: float) -> None:
        """A token for a request that has left its row: kept if the request was preempted, else nobody's."""
        request: Request = step.requests[index]
        if request.state is State.FINISHED or step.output.step_id <= request.dropped_step:
            return
        in_place = request.state is State.WAITING and len(request.token_ids) == step.positions[index]
        if not in_place or not 0 <= token_id < len(self._is_eos):
            self.table.finish(request, FinishReason.ERROR, _MISPLACED)
            return
        request.token_ids = np.append(request.token_ids, np.int32(token_id))
        if request.first_token_time == -math.inf:
            request.first_token_time = now
        self.events.tokens(
            np.array([request.client], np.int32), np.array([request.handle]), np.array([token_id], np.int32)
        )
        self._finish_if_ended(request, token_id, len(request.token_ids))

    def _finish_if_ended(self, request: Request, token_id: int, length: int) -> None:
        """Ends, in this order of precedence: end of sequence, stop id, length."""
        sampling = request.params.sampling
        if self._is_eos[token_id] and not sampling.ignore_eos:
            self.table.finish(request, FinishReason.EOS, stop_token_id=token_id)
        elif token_id in sampling.stop_token_ids:
            self.table.finish(request, FinishReason.STOP_TOKEN, stop_token_id=token_id)
        elif length >= request.max_len:
            within_context = length - request.num_prompt_tokens >= request.params.max_tokens
            self.table.finish(request, FinishReason.MAX_TOKENS if within_context else FinishReason.CONTEXT_FULL)
