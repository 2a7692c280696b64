"""Scheduler: who runs in a step with how many tokens.

There is no prefill phase and no decode phase. A request has tokens known and tokens computed; a step
gives each request some of the difference, within a budget of tokens. Chunked prefill, prefix hits
and resumption after preemption all follow from that.

Progress is counted when a step is scheduled, not when it is back, so that the next one can be
scheduled meanwhile; intake.py takes in what it drew.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from core_proc.chunk import Chunks, StepBudget
from core_proc.followers import Followers
from core_proc.intake import Intake, StepInFlight
from core_proc.request import Request, State
from core_proc.request_table import RequestTable
from core_proc.step_draft import StepDraft
from core_proc.suspects import Suspects
from protos.errors import TailraceError
from protos.messages import FinishReason
from protos.step import EMPTY, GrammarMask, SchedulerOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from core_proc.grammar import Matcher
    from core_proc.kv_cache import KVCache
    from core_proc.shares import StepShares
    from protos.config import SchedulerOptions
    from protos.messages import CoreStats
    from protos.step import ModelRunnerOutput

Int32s = npt.NDArray[np.int32]
Admission = Literal["open", "paused", "frozen"]
_EXPIRED = {
    FinishReason.DEADLINE: "the deadline has passed",
    FinishReason.QUEUE_TIMEOUT: "not admitted within the queue timeout",
}


class Scheduler:
    """Owns every request of the core. Synchronous, knows no sockets, no text and no tensors.

    `eos_token_ids` end a request unless it says otherwise. `clock` returns seconds; `shares` are a pipeline's.
    """

    def __init__(
        self,
        options: SchedulerOptions,
        kv_cache: KVCache,
        max_model_len: int,
        eos_token_ids: Iterable[int],
        vocab_size: int,
        clock: Callable[[], float] = time.monotonic,
        shares: StepShares | None = None,
    ) -> None:
        assert max_model_len <= kv_cache.capacity_tokens, "a request that can never fit would wait for ever"
        self.max_model_len = max_model_len
        self.kv_cache = kv_cache
        steps_per_token = shares.num_steps if shares else 1
        self.table = RequestTable(options.max_num_seqs, max_model_len, kv_cache, clock, steps_per_token)
        self.events = self.table.events
        self._admission: Admission = "open"
        self.held_back: list[int] = []
        """Front ends that do not take what is there for them: their rows compute nothing more."""
        self._rows = self.table.rows
        self._waiting = self.table.waiting
        self._vocab_size = vocab_size
        self._intake = Intake(self.table, eos_token_ids, vocab_size)
        self._followers = Followers(self._waiting, kv_cache)
        self._pace = self.table.pace
        self._suspects = Suspects()
        self._shares = shares
        self._chunks = Chunks(options, steps_per_token)
        self._clock = clock
        self._num_steps = 0

    def __repr__(self) -> str:
        return f"Scheduler({self.admission}, {self.table}, steps={self._num_steps})"

    @property
    def admission(self) -> Admission:
        """open; paused: nothing new is admitted; frozen: nothing is scheduled."""
        return self._admission

    @admission.setter
    def admission(self, admission: Admission) -> None:
        self._admission = admission
        self._pace.queue_stopped()

    def add(self, request: Request) -> None:
        """Queues a request. One that could never run fails at once, and so does one that would wait too long for what
        time it has. With a grammar it waits for `attach_matcher`."""
        self.table.add(request)
        if not 0 < request.num_waiting_tokens < request.max_len <= self.max_model_len:
            self.table.finish(request, FinishReason.ERROR, f"its length must be within 1 and {self.max_model_len - 1}")
        elif request.is_new and request.has_time_limit:
            wait = self._pace.queue_seconds(self._waiting.cost_before(request))
            # Its prompt may be cached: that shows when its turn comes.
            self._shed_if_late(request, wait, 0, self._clock())

    def _shed_if_late(self, request: Request, wait: float, num_prompt_tokens: int, now: float) -> bool:
        """Refuses a request that would miss its deadline, or its queue timeout, after waiting for so long."""
        others_wait = self._waiting.num_ready > 1
        late = self._pace.seconds_late(request, wait, num_prompt_tokens, others_wait, now)
        if late > 0:
            message = f"it would miss its deadline or queue timeout by {late:.2g} s"
            self.table.finish(request, FinishReason.SHED, message, retry_after=late)
        return late > 0

    def attach_matcher(self, request: Request, matcher: Matcher | TailraceError) -> None:
        """The grammar of a request is compiled, or cannot be: the request may run, or ends."""
        if request.state is State.FINISHED:
            return
        if isinstance(matcher, TailraceError):
            self.table.refuse(request, matcher)
            return
        if matcher.is_done:  # it allows no token at all, or a resumed output was whole
            self.table.finish(request, FinishReason.CONSTRAINT_DONE)
            return
        request.matcher = matcher
        for sibling in request.siblings:
            sibling.matcher = matcher.copy()
        self.table.release(request)

    def abort(self, client: int, handles: Iterable[int], stopped: bool = False) -> None:
        """Ends requests wherever they are, given up or `stopped` because they are complete; unknown handles are
        ignored."""
        for handle in handles:
            request = self.table.get(client, handle)
            if request is not None:
                self.table.finish(request, FinishReason.STOP_STRING if stopped else FinishReason.ABORTED)

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
        if self.admission == "frozen":
            return False
        return len(self._rows) > 0 or self._next_to_admit() is not None or bool(self._suspects or self._followers)

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
        self._followers.release(self.held_back)
        if not self._suspects:
            return self._schedule(now)
        is_turn = self._suspects.last_trial < self._num_steps - 1
        return self._schedule(now, trial=is_turn) or self._schedule(now, trial=not is_turn)

    def _schedule(self, now: float, trial: bool = False) -> StepInFlight | None:
        """A step of suspects, or of all others."""
        if trial and self._suspects.last_trial > self.kv_cache.last_returned_step:
            return None
        draft = StepDraft()
        rows, counts, budget = self._schedule_running(draft, trial)
        if budget is not None and len(self._waiting):
            if draft.share is not None:
                budget.tokens = min(budget.tokens, draft.share.left(counts))
            admitted, chunks = self._admit(draft, budget, now, trial)
            if admitted:
                rows = np.concatenate([rows, np.array(admitted, np.int32)])
                counts = np.concatenate([counts, np.array(chunks, np.int32)])
        if not len(rows):
            return None
        if trial:
            self._suspects.last_trial = self._num_steps
        return self._issue(draft, rows, counts, now)

    def _schedule_running(self, draft: StepDraft, trial: bool) -> tuple[Int32s, Int32s, StepBudget | None]:
        """(rows, tokens of each, what is left for others) of the running rows that compute; nothing is left where
        blocks were too few for one of them."""
        scarce = False
        columns = self._rows
        whole: StepBudget | None = None
        while True:
            rows = columns.in_order
            computed, known, expected, max_len, capacity = columns.lengths[:, rows]
            todo = expected - computed
            # What a grammar allows next is known when the last token is; the token itself, to a first stage, too.
            waits = expected > known
            if not self._shares:
                waits &= columns.has_grammar[rows]
            # A row that is certain to end when its step returns has nothing more to compute.
            todo[waits | (expected >= max_len)] = 0
            if self.held_back:
                todo[np.isin(columns.client[rows], self.held_back)] = 0
            if self._suspects:
                todo[[request.is_suspect is not trial for request in columns.requests[rows]]] = 0
            num_waiting = self._waiting.num_ready if columns.num_free else 0
            if self._shares is not None and not trial:
                num_tokens = self._waiting.num_ready_tokens(self._chunks.max_tokens * self._shares.num_steps)
                draft.share = draft.share or self._shares.share(todo, waits, num_tokens if columns.num_free else 0)
            whole = whole or self._chunks.budget(todo, computed, waits, num_waiting, trial)
            budget = whole.copy()
            if draft.share is not None:
                draft.share.limit(todo)
            counts = budget.deal(todo, computed)
            (short,) = (computed + counts > capacity).nonzero()
            if all(self._grow(draft, rows, counts, index) for index in short.tolist()):
                left = None if scarce or not counts[short].all() else budget
                chosen = counts > 0
                return rows[chosen], counts[chosen], left
            # Someone left: whoever could not grow tries again, with the budget that came back. What it started with
            # stays, so that nobody gets less than there are blocks for now.
            scarce = True

    def _grow(self, draft: StepDraft, rows: Int32s, counts: Int32s, index: int) -> bool:
        """Gives a row the blocks its tokens need, or lets it skip the step; False if it had to preempt."""
        row = int(rows[index])
        request: Request = self._rows.requests[row]
        blocks = self.kv_cache.grow(request, int(self._rows.computed[row]) + int(counts[index]))
        if blocks is not None:
            draft.grow(row, blocks)
            self._rows.capacity[row] += len(blocks) * self.kv_cache.block_size
        elif self.kv_cache.has_deferred:
            counts[index] = 0
        else:
            # The last in order cannot have got blocks in this step: it would have been the last to ask.
            self.table.preempt(self._rows.last())
            return False
        return True

    def _admit(self, draft: StepDraft, budget: StepBudget, now: float, trial: bool) -> tuple[list[int], list[int]]:
        """(rows, tokens of each) of waiting requests that start or resume in this step."""
        rows: list[int] = []
        counts: list[int] = []
        costs: list[float] = []
        kept_rows, kept_tokens = (0, 0) if trial else self._suspects.reserved(self.kv_cache.block_size)
        next_one = self._suspects.next_waiting if trial else self._next_to_admit
        while budget.is_open and self._rows.num_free > kept_rows and (request := next_one()):
            if request.last_step > self.kv_cache.last_returned_step:
                break  # a token of it is still in flight
            num_tokens = request.num_waiting_tokens
            hits = self.kv_cache.lookup(request)
            if self._followers.follow(request, len(hits)):
                continue
            cached = len(hits) * self.kv_cache.block_size
            if request.is_new and self._shed_if_late(request, 0.0, num_tokens - cached, now):
                continue
            claimed_rows, claimed_tokens = self._followers.claims(request)
            # All of it must fit, not just the first chunk: else prompts evict one another half-way.
            fits = self.kv_cache.fits(num_tokens + kept_tokens + claimed_tokens, hits)
            if not fits or self._rows.num_free <= kept_rows + claimed_rows:
                break
            self.kv_cache.share(request, hits)
            count = budget.take(num_tokens - cached, cached)
            grown = self.kv_cache.grow(request, cached + count)
            assert grown is not None, "fits() was asked"
            costs.append(request.cost)
            rows.append(self.table.start(request, cached, now))
            counts.append(count)
            draft.enter(request)
            self._publish(request, cached + count)
            self._followers.lead(request)
        self._pace.queue_moved(costs, now, self._waiting.num_ready)
        return rows, counts

    def _next_to_admit(self) -> Request | None:
        """Head of the queue; while admission is paused, of those in it that are not new."""
        return self._waiting.peek_returning() if self.admission == "paused" else self._waiting.peek()

    def _issue(self, draft: StepDraft, rows: Int32s, counts: Int32s, now: float) -> StepInFlight:
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
        for row in draft.grown.union(rows[counts > 1].tolist()):
            self._publish(columns.requests[row], int(columns.computed[row]))
        for row in drawing[columns.has_siblings[drawing]].tolist():
            self.table.release_siblings(columns.requests[row])
        if self._shares is not None:
            self._shares.issued(counts)
        output = SchedulerOutput(
            step_id=self._num_steps,
            rows=rows,
            starts=starts,
            counts=counts,
            samples=samples,
            new_rows=draft.new_rows,
            block_rows=np.array(draft.block_rows, np.int32) if draft.block_rows else EMPTY,
            block_ids=np.array(draft.block_ids, np.int32) if draft.block_ids else EMPTY,
            last_ids=EMPTY if self._shares is None else columns.token_ids[rows, computed - 1],
        )
        self._num_steps += 1
        return StepInFlight(
            output=output,
            scheduled_time=now,
            rows=drawing,
            epochs=columns.epoch[drawing],
            positions=positions,
            all_requests=columns.requests[rows],
        )

    def _publish(self, request: Request, num_computed: int) -> None:
        known = self._rows.token_ids[request.row, : self._rows.known[request.row]]
        self.kv_cache.publish(request, known, num_computed, self._num_steps)

    # Update -----------------------------------------------------------------------------------

    def grammar_mask(self, step: StepInFlight) -> GrammarMask | None:
        """What the grammars of a step allow it to draw. All their tokens are known: such rows wait for them."""
        (index,) = self._rows.has_grammar[step.rows].nonzero()
        if not len(index):
            return None
        bits = np.zeros((len(index), -(-self._vocab_size // 32)), np.int32)
        for request, row in zip(step.requests[index], bits, strict=True):
            request.matcher.fill(row)
        return GrammarMask(index.astype(np.int32), bits)

    def update(self, step: StepInFlight, output: ModelRunnerOutput) -> None:
        """Takes in what a step drew. Steps come back in the order they were issued."""
        now = self._clock()
        if self._shares is not None:
            self._shares.returned()
        self.kv_cache.step_returned(step.output.step_id)
        # One token of each row is not prefill, or not enough to matter.
        num_prompt_tokens = step.output.num_tokens - len(step.output.rows)
        seconds = self._pace.step_returned(num_prompt_tokens, step.scheduled_time, now)
        self._chunks.times.learn(step.output, num_prompt_tokens, seconds)
        self._intake.take(step, output, now)
        if self._suspects.is_trial(step):
            self._suspects.clear(step)

    def fail(self, step: StepInFlight, message: str) -> None:
        """A step raised: its request ends; if it has several, they become suspects. The engine goes on.

        What the step was to fill is withdrawn; whoever already built on it starts over.
        """
        if self._shares is not None:
            self._shares.returned()
        false_blocks = self.kv_cache.step_failed(step.output.step_id)
        is_trial = self._suspects.is_trial(step)
        live: list[Request] = [request for request in step.all_requests if request.state is not State.FINISHED]
        if not is_trial and any(request.is_suspect for request in step.all_requests):
            # Issued before they were suspected, it tells nothing new: the others in it start over.
            for request in live:
                if request.state is State.RUNNING:
                    self.table.preempt(request, publish=False)
        elif live and len(step.all_requests) == 1 and (is_trial or live[0].state is State.RUNNING):
            live[0].is_suspect = True
            self.table.finish(live[0], FinishReason.ERROR, message)
        else:
            for request in live:
                self.table.suspect(request)
            self._suspects.accuse(step, live)
        for request in self.table.running():
            if not false_blocks.isdisjoint(request.block_ids):
                self.table.preempt(request, publish=False)
        self.table.drop_in_flight(self._num_steps - 1)

    def expire(self, now: float) -> None:
        """Ends the requests whose time is up."""
        for request, reason in self.table.timers.due(now):
            self.table.finish(request, reason, _EXPIRED.get(reason, ""))
