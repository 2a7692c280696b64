"""RequestTable: every request of the core, and the changes of state they go through.

add ──► WAITING ──start──► RUNNING ──finish──► FINISHED
           ▲                  │                   ▲
           └────── preempt ───┘                   │
           └───────────── finish ─────────────────┘

Four kinds of request are held back in the queue: those whose grammar is being compiled, siblings,
which wait until the prompt they share is computed, followers, which wait for a common beginning, and
suspects, which wait for their trial.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from core_proc.events import EventLog
from core_proc.pace import Pace
from core_proc.request import OUTPUT_COST, Request, State
from core_proc.request_queue import RequestQueue
from core_proc.rows import Rows
from core_proc.timers import Timers
from protos.errors import InvalidRequestError, OverloadedError
from protos.messages import Admitted, CoreStats, Finished, FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable

    from core_proc.kv_cache import KVCache
    from protos.errors import TailraceError


class RequestTable:
    """The only place where a request enters or leaves the queue, a row or its blocks."""

    def __init__(
        self,
        num_rows: int,
        max_model_len: int,
        kv_cache: KVCache,
        clock: Callable[[], float],
        steps_per_token: int = 1,
    ) -> None:
        self.rows = Rows(num_rows, max_model_len, kv_cache.block_size)
        self.waiting = RequestQueue()
        self.kv_cache = kv_cache
        self.events = EventLog()
        self.timers = Timers()
        self.pace = Pace(steps_per_token)
        self._clock = clock
        self._requests: dict[tuple[int, int], Request] = {}
        self._num_arrived = -1
        self._prompt_tokens = 0
        self._prefix_queries = 0
        self._prefix_hits = 0
        self._preemptions = 0
        self._aborted_tokens = 0

    def __repr__(self) -> str:
        return f"RequestTable(running={len(self.rows)}, waiting={len(self.waiting)}, {self.kv_cache.pool})"

    def get(self, client: int, handle: int) -> Request | None:
        """A live request."""
        return self._requests.get((client, handle))

    def handles(self, client: int) -> list[int]:
        """Of the live requests of a front end."""
        return [handle for owner, handle in self._requests if owner == client]

    def add(self, request: Request) -> None:
        """Queues a new request, and its siblings behind it."""
        self._register(request)
        if request.params.grammar is None:
            self.waiting.push(request)
        else:
            self.waiting.hold(request)
        for sibling in request.siblings:
            self._register(sibling)
            self.waiting.hold(sibling)

    def _register(self, request: Request) -> None:
        key = (request.client, request.handle)
        assert key not in self._requests, f"handle {key} is in use"
        request.arrival = self._next_number()
        request.expected_output = self.pace.expected_output(request)
        self._requests[key] = request
        if request.adapter is not None:
            request.adapter.num_requests += 1
        self.timers.add(request)

    def _next_number(self) -> int:
        self._num_arrived += 1
        return self._num_arrived

    def release(self, request: Request) -> None:
        """A request that was held back may be served."""
        self.waiting.release(request)

    def release_siblings(self, request: Request) -> None:
        """The prompt of a request is computed: its siblings may share it."""
        for sibling in request.siblings:
            self.waiting.release(sibling)
        request.siblings = []
        self.rows.has_siblings[request.row] = False

    def start(self, request: Request, num_cached: int, now: float) -> int:
        """WAITING to RUNNING, with `num_cached` tokens in the blocks it holds already; returns the row."""
        self.waiting.remove(request)
        request.state = State.RUNNING
        if request.admitted_time == -math.inf:
            request.admitted_time = now
            request.arrival = self._next_number()
            self.waiting.admitted(request, request.cost - (0 if request.is_sibling else num_cached))
            request.num_cached_tokens = num_cached
            self._prompt_tokens += 0 if request.is_sibling else request.num_prompt_tokens
            self._prefix_queries += request.num_waiting_tokens
            self._prefix_hits += num_cached
            self.events.admitted(request.client, Admitted(request.handle, num_cached, now - request.arrival_time))
        return self.rows.enter(request, num_cached)

    def preempt(self, request: Request, publish: bool = True) -> None:
        """RUNNING to WAITING: gives up row and blocks, and will be computed anew.

        Tokens of it that are still in flight are kept, unless `drop_in_flight` is called.
        """
        self._leave_row(request, publish)
        request.state = State.WAITING
        request.num_preemptions += 1
        self._preemptions += 1
        if request.is_suspect:
            self.waiting.hold(request)
        else:
            self.waiting.push(request)

    def suspect(self, request: Request) -> None:
        """A step that computed it failed: it gives up what it has, and waits for its trial."""
        request.is_suspect = True
        if request.state is State.RUNNING:
            self.preempt(request, publish=False)
        else:
            self.waiting.remove(request)
            self.waiting.hold(request)

    def drop_in_flight(self, last_step: int) -> None:
        """Tokens of waiting requests from steps up to this one were drawn from something false."""
        for request in self.waiting:
            request.dropped_step = last_step

    def finish(
        self,
        request: Request,
        reason: FinishReason,
        message: str = "",
        *,
        field: str = "",
        stop_token_id: int = -1,
        retry_after: float = 0.0,
    ) -> None:
        """Any state to FINISHED: gives back all it holds and tells the front end. Siblings that still wait for its
        prompt end with it."""
        if request.state is State.RUNNING:
            if reason is FinishReason.ABORTED:
                self._aborted_tokens += int(self.rows.computed[request.row] - self.rows.cached[request.row])
            self._leave_row(request, publish=reason is not FinishReason.ERROR)
        else:
            self.waiting.remove(request)
        request.state = State.FINISHED
        del self._requests[request.client, request.handle]
        if request.adapter is not None:
            request.adapter.leave(request.last_step)
        siblings, request.siblings = request.siblings, []
        for sibling in siblings:
            if sibling.state is not State.FINISHED:
                self.finish(sibling, reason, message, field=field, retry_after=retry_after)
        self._settle(request, reason)
        now = self._clock()
        queued_until = request.admitted_time if request.admitted_time > -math.inf else now
        prefilled_until = request.first_token_time if request.first_token_time > -math.inf else now
        self.events.finished(
            request.client,
            Finished(
                handle=request.handle,
                reason=reason,
                stop_token_id=stop_token_id,
                cached_tokens=request.num_cached_tokens,
                preemptions=request.num_preemptions,
                queue_seconds=queued_until - request.arrival_time,
                prefill_seconds=prefilled_until - queued_until,
                decode_seconds=now - prefilled_until,
                message=message,
                field=field,
                retry_after=retry_after,
            ),
        )

    def refuse(self, request: Request, error: TailraceError) -> None:
        """Ends a request that turned out to be wrong, or too much, before it ran."""
        if isinstance(error, InvalidRequestError):
            self.finish(request, FinishReason.INVALID, error.description, field=error.field)
        elif isinstance(error, OverloadedError):
            self.finish(request, FinishReason.OVERLOADED, str(error))
        else:
            self.finish(request, FinishReason.ERROR, str(error))

    def _settle(self, request: Request, reason: FinishReason) -> None:
        """Its caller pays for what was drawn."""
        num_drawn = len(request.token_ids) - request.num_given_tokens
        if request.admitted_time > -math.inf:
            self.waiting.settle(request, OUTPUT_COST * (num_drawn - request.expected_output))
        if reason.is_complete and not request.params.sampling.ignore_eos:
            self.pace.output_ended(len(request.token_ids) - request.num_prompt_tokens)

    def _leave_row(self, request: Request, publish: bool) -> None:
        computed = int(self.rows.computed[request.row])
        self.rows.leave(request)
        if publish:
            self.kv_cache.publish(request, request.token_ids, computed, request.last_step)
        self.kv_cache.release(request)

    def progress(self, client: int, handle: int) -> list[int]:
        """[requests ahead of it in the queue, prompt tokens computed] of a live request, else []."""
        request = self.get(client, handle)
        if request is None:
            return []
        if request.state is State.WAITING:
            return [self.waiting.position(request), 0]
        return [0, min(int(self.rows.computed[request.row]), request.num_prompt_tokens)]

    def running(self) -> list[Request]:
        """First served first."""
        return [self.rows.requests[row] for row in self.rows.in_order]

    def stats(self, steps: int, steps_in_flight: int) -> CoreStats:
        return CoreStats(
            running=len(self.rows),
            waiting=len(self.waiting),
            kv_usage=self.kv_cache.pool.usage,
            steps_in_flight=steps_in_flight,
            prompt_tokens=self._prompt_tokens,
            output_tokens=self.events.num_tokens,
            prefix_queries=self._prefix_queries,
            prefix_hits=self._prefix_hits,
            preemptions=self._preemptions,
            steps=steps,
            aborted_tokens=self._aborted_tokens,
            queue_seconds=self.pace.queue_seconds(self.waiting.cost),
        )

    def audit(self) -> None:
        """Asserts that every live request is in exactly one place and every block is accounted for."""
        requests = list(self._requests.values())
        running = self.running()
        assert len(set(running)) == len(running) == sum(r.state is State.RUNNING for r in requests)
        assert len(self.waiting) == sum(r.state is State.WAITING for r in requests)
        for request in requests:
            assert (request in self.waiting) == (request.state is State.WAITING) == (request.row < 0), request
            assert request.state is not State.FINISHED, request
            assert request.row >= 0 or not request.block_ids, request
        self.kv_cache.audit(requests)
