"""Harness: a scheduler over a fake worker, with steps in flight held back at will and everything checked."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from core_proc.adapters import AdapterTable
from core_proc.kv_cache import KVCache
from core_proc.request import Request, State, make_request
from core_proc.scheduler import Scheduler, StepInFlight
from core_proc.shares import StepShares
from protos.config import SchedulerOptions
from protos.messages import Admitted, EngineCoreRequest, Finished, FinishReason, GrammarSpec, Sampling, Sibling
from tests.fakes import (
    EOS,
    VOCAB_SIZE,
    InjectedError,
    PagedFakeWorker,
    Reference,
    adapter_weights,
    logprob,
    make_adapter,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from protos.messages import EngineCoreOutputs, LogprobColumns
    from protos.step import GrammarMask, SchedulerOutput
    from tests.fakes import ScriptedMatcher

_SAMPLING_FIELDS = {field.name for field in msgspec.structs.fields(Sampling)}


class ManualClock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(eq=False)
class Stream:
    """What a client sees of one request."""

    client: int
    handle: int
    prompt: list[int]
    max_tokens: int
    sampling: Sampling
    reference: Reference
    request: Request
    token_ids: list[int] = field(default_factory=list)
    num_resumed: int = 0
    siblings: list[Stream] = field(default_factory=list)
    logprobs: list[int] = field(default_factory=list)
    """Positions that were told about, of the output and of the prompt."""
    prompt_logprobs: list[int] = field(default_factory=list)
    admitted: list[Admitted] = field(default_factory=list)
    finished: Finished | None = None

    @property
    def reason(self) -> FinishReason | None:
        return None if self.finished is None else self.finished.reason

    @property
    def state(self) -> State:
        return self.request.state

    def expected(self, n: int) -> list[int]:
        return [self.reference[index] for index in range(n)]


def encode_ids(token_ids: Sequence[int]) -> bytes:
    return np.array(token_ids, "<i4").tobytes()


def columns(outputs: EngineCoreOutputs) -> list[tuple[int, int]]:
    """(handle, token id) of each new token."""
    handles, token_ids = np.frombuffer(outputs.handles, "<i8"), np.frombuffer(outputs.token_ids, "<i4")
    return list(zip(handles.tolist(), token_ids.tolist(), strict=True))


@dataclass
class LogprobRow:
    """What a message tells of one token."""

    logprob: float
    rank: int
    top: list[tuple[int, float]]


def logprob_rows(columns: LogprobColumns) -> list[tuple[int, LogprobRow]]:
    """(index of the token, what is told of it) of each row of the columns."""
    index, ranks, widths, top_ids = (
        np.frombuffer(column, "<i4").tolist()
        for column in (columns.index, columns.ranks, columns.widths, columns.top_ids)
    )
    logprobs, top_logprobs = (
        np.frombuffer(column, "<f4").tolist() for column in (columns.logprobs, columns.top_logprobs)
    )
    top = list(zip(top_ids, top_logprobs, strict=True))
    ends = np.cumsum([0, *widths]).tolist()
    assert ends[-1] == len(top)
    return [
        (at, LogprobRow(value, rank, top[start:end]))
        for at, value, rank, start, end in zip(index, logprobs, ranks, ends, ends[1:], strict=False)
    ]


class Harness:
    """`issue` schedules a step; `land` carries out the oldest and takes its result in; `step` does as EngineCore does.

    After each call the books are audited, blocks that went back to the pool are poisoned, and every token
    that arrived is compared with what its request would have got alone.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 33,
        block_size: int = 4,
        budget: int = 64,
        max_num_seqs: int = 8,
        max_model_len: int | None = None,
        prefill_cap: int = 0,
        depth: int = 1,
        pipeline: bool = False,
        prefix_caching: bool = True,
    ) -> None:
        max_model_len = max_model_len or (num_blocks - 1) * block_size
        self.clock = ManualClock()
        self.depth = depth
        num_stages = depth if pipeline else 1
        self.worker = PagedFakeWorker(num_blocks, block_size, max_model_len, max_num_seqs, budget, depth, num_stages)
        self.kv_cache = KVCache(num_blocks, block_size, prefix_caching)
        self.pool = self.kv_cache.pool
        options = SchedulerOptions(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, long_prefill_threshold=prefill_cap
        )
        shares = StepShares(depth) if pipeline else None
        self.scheduler = Scheduler(options, self.kv_cache, max_model_len, (EOS,), VOCAB_SIZE, self.clock, shares)
        self.table = self.scheduler.table
        self.adapters = AdapterTable(2)
        self.in_flight: deque[StepInFlight] = deque()
        self.masks: deque[GrammarMask | None] = deque()
        self.live: dict[tuple[int, int], Stream] = {}
        self.num_followed = 0
        """Times that a request waited for another one's blocks while a step was chosen."""
        self._num_added = 0
        self._may_read_false = False

    # What a client does -----------------------------------------------------------------------

    def add(
        self,
        prompt: Sequence[int],
        max_tokens: int = 4,
        *,
        client: int = 0,
        handle: int | None = None,
        output: Sequence[int] = (),
        forced: dict[int, int] | None = None,
        poison: int | None = None,
        grammar: ScriptedMatcher | None = None,
        compiled: bool = True,
        num_sequences: int = 1,
        **fields: Any,
    ) -> Stream:
        """`fields` are those of Sampling and EngineCoreRequest. Each request has a seed of its own unless told.

        A `grammar` is attached at once if it is `compiled`. `poison` is the first position whose computation
        makes a step fail.
        """
        self._num_added += 1
        handle = self._num_added if handle is None else handle
        sampling = {"seed": 1000 + self._num_added} | {key: fields.pop(key) for key in _SAMPLING_FIELDS & fields.keys()}
        message_seed = sampling["seed"]
        message = EngineCoreRequest(
            handle=handle,
            prompt_token_ids=encode_ids(prompt),
            sampling=Sampling(**sampling),
            max_tokens=max_tokens,
            output_token_ids=encode_ids(output),
            siblings=[Sibling(handle * 100 + i, message_seed * 100 + i) for i in range(1, num_sequences)],
            grammar=None if grammar is None else GrammarSpec("regex", "scripted"),
            **fields,
        )
        if forced:
            self.worker.forced[message.sampling.seed] = forced
        if poison is not None:
            self.worker.poison_seeds[message.sampling.seed] = poison
        held = self.adapters.get(message.adapter)
        assert (held is None) == (not message.adapter), f"no adapter {message.adapter}"
        request = make_request(
            message, client, self.kv_cache.block_size, self.scheduler.max_model_len, self.clock.now, held
        )
        stream, *siblings = [
            Stream(
                client=client,
                handle=each.handle,
                prompt=list(prompt),
                max_tokens=max_tokens,
                sampling=each.params.sampling,
                reference=Reference(
                    prompt,
                    each.params.sampling,
                    self.worker.forced.get(each.params.sampling.seed),
                    self.worker.weights,
                    None if grammar is None else grammar.copy(),
                    0 if held is None else adapter_weights(held.adapter),
                ),
                request=each,
                token_ids=list(output),
                num_resumed=len(output),
            )
            for each in [request, *request.siblings]
        ]
        stream.siblings = siblings
        self.live |= {(client, each.handle): each for each in [stream, *siblings]}
        self.scheduler.add(request)
        if grammar is not None and compiled:
            self.scheduler.attach_matcher(request, grammar)
        self.check()
        return stream

    def abort(self, *streams: Stream) -> None:
        for stream in streams:
            self.scheduler.abort(stream.client, [stream.handle])
        self.check()

    def load_adapter(self, name: str, weights: int) -> bool:
        return self.adapters.load(make_adapter(name, weights), self.worker.load_adapter)

    def close_adapter(self, name: str) -> list[str]:
        """Its name comes into the list when it is gone."""
        gone: list[str] = []
        assert self.adapters.close(name, lambda: gone.append(name))
        self.check()
        return gone

    # What the engine does ---------------------------------------------------------------------

    def issue(self) -> SchedulerOutput | None:
        step = self.scheduler.schedule()
        self._check_followers()
        if step is not None:
            trial = {request.is_suspect for request in step.all_requests}
            assert len(trial) == 1, f"suspects and others share {step}"
            self.worker.issue(step.output)
            self.in_flight.append(step)
            self.masks.append(self.scheduler.grammar_mask(step))
        self.check()
        return None if step is None else step.output

    def land(self, *, fail: bool = False, before_update: Callable[[], None] = lambda: None) -> None:
        step, mask = self.in_flight.popleft(), self.masks.popleft()
        if fail:
            self.worker.fail_steps.add(step.output.step_id)
        try:
            self.worker.execute(step.output)
            output = self.worker.sample(mask)
        except InjectedError as error:
            self._may_read_false = True
            before_update()
            self.scheduler.fail(step, str(error))
        else:
            before_update()
            self.scheduler.update(step, output)
        self.check()

    def step(self) -> bool:
        """False if there was nothing to do."""
        issued = len(self.in_flight) < self.depth and self.issue() is not None
        if issued and len(self.in_flight) < self.depth:
            return True
        if self.in_flight:
            self.land()
            return True
        return issued

    @property
    def scheduled(self) -> dict[int, int]:
        """Tokens of each request, by its handle, in the step issued last, in batch order."""
        step = self.in_flight[-1]
        handles = [request.handle for request in step.all_requests]
        return dict(zip(handles, step.output.counts.tolist(), strict=True))

    def run_until_idle(self, limit: int = 2000) -> None:
        for _ in range(limit):
            if not self.step():
                return
        raise AssertionError(f"still busy after {limit} steps: {self.scheduler}")

    def run_to_end(self, limit: int = 2000) -> None:
        """Until nothing is left to do; then no request may be left, nor anything it held."""
        self.run_until_idle(limit)
        assert not self.live, f"stuck: {[stream.request for stream in self.live.values()]}"
        self.assert_empty()

    def preempt(self, stream: Stream) -> None:
        """As the scheduler does when it runs out of blocks."""
        self.table.preempt(stream.request)
        self.check()

    def reset(self, weights: int | None = None) -> bool:
        """Resets the prefix cache; with new `weights`, restarts what runs, so that none of the old model is left."""
        done = self.scheduler.reset_prefix_cache(preempt_running=weights is not None)
        if weights is not None:
            self.worker.weights = weights
            self._may_read_false = True
            for stream in self.live.values():
                stream.reference.weights = weights
        self.check()
        return done

    # What is checked --------------------------------------------------------------------------

    def check(self) -> None:
        for client, outputs in self.scheduler.events.take().items():
            self._collect(client, outputs)
        self.table.audit()
        for held in self.adapters.take_out(self.kv_cache.last_returned_step):
            self.worker.unload_adapter(held.slot)
            for on_gone in held.on_gone:
                on_gone()
        assert not self.worker.checker.violations, self.worker.checker.violations
        # Steps in flight may read what a failed step left out, or other weights wrote; their tokens must not arrive.
        assert self._may_read_false or not self.worker.false_reads, self.worker.false_reads
        findable = set(self.pool._block_of.values())
        self.worker.poison([block for block in self.pool._free if block not in findable])

    def _check_followers(self) -> None:
        """Whoever waits for another one's blocks is held in the queue, and these are still to come."""
        if self.scheduler.admission == "frozen":
            return
        for leader, followers in self.scheduler._followers._followers.items():
            for num_common, _, follower in followers:
                assert leader.state in (State.RUNNING, State.WAITING), f"{follower} waits for {leader}"
                if follower.state is State.WAITING:
                    self.num_followed += 1
                    assert follower in self.table.waiting._held
                    assert leader.block_hashes[num_common - 1] == follower.block_hashes[num_common - 1]

    def _collect(self, client: int, outputs: EngineCoreOutputs) -> None:
        for admitted in outputs.admitted:
            self.live[client, admitted.handle].admitted.append(admitted)
        for handle, token_id in columns(outputs):
            stream = self.live[client, handle]
            assert stream.admitted, f"a token before {stream.request} was admitted"
            index = len(stream.token_ids)
            assert token_id == stream.reference[index], f"token {index} of {stream.request} differs from alone"
            stream.token_ids.append(token_id)
        self._collect_logprobs(client, outputs)
        for finished in outputs.finished:
            stream = self.live.pop((client, finished.handle))
            stream.finished = finished
            self._check_end(stream)

    def _collect_logprobs(self, client: int, outputs: EngineCoreOutputs) -> None:
        if outputs.logprobs is not None:
            tokens = columns(outputs)
            seen: dict[int, int] = {}
            places: list[int] = []  # of each token of the message, its index in the output
            for handle, _ in reversed(tokens):
                seen[handle] = seen.get(handle, 0) + 1
                places.insert(0, len(self.live[client, handle].token_ids) - seen[handle])
            for index, told in logprob_rows(outputs.logprobs):
                handle, token_id = tokens[index]
                stream = self.live[client, handle]
                position = len(stream.prompt) + places[index]
                self._check_logprob(told, position, token_id, stream.sampling.logprobs)
                stream.logprobs.append(places[index])
        for part in outputs.prompt_logprobs:
            stream = self.live[client, part.handle]
            for index, told in logprob_rows(part.columns):
                position = part.offset + index
                self._check_logprob(told, position, stream.prompt[position], stream.sampling.prompt_logprobs)
                stream.prompt_logprobs.append(position)

    def _check_logprob(self, told: LogprobRow, position: int, token_id: int, width: int | None) -> None:
        assert (told.logprob, told.rank) == logprob(position, token_id)
        assert told.top == [(token_id + i, -i) for i in range(width or 0)]

    def _check_end(self, stream: Stream) -> None:
        """That the request ended where it should, if it ended by itself, and that all was told."""
        told = list(range(stream.num_resumed, len(stream.token_ids))) if stream.sampling.logprobs is not None else []
        assert stream.logprobs == told
        if stream.sampling.prompt_logprobs is not None and len(stream.token_ids) > stream.num_resumed:
            assert stream.prompt_logprobs == list(range(1, len(stream.prompt)))
        length = len(stream.token_ids)
        last = stream.token_ids[-1] if stream.token_ids else None
        match stream.reason:
            case FinishReason.EOS:
                assert last == EOS
            case FinishReason.STOP_TOKEN:
                assert last in stream.sampling.stop_token_ids
            case FinishReason.MAX_TOKENS:
                assert length == stream.max_tokens
            case FinishReason.CONTEXT_FULL:
                assert length == self.scheduler.max_model_len - len(stream.prompt)
        assert length <= stream.max_tokens

    def assert_empty(self) -> None:
        """Nothing is queued, running, in flight or held."""
        assert not self.in_flight
        assert not len(self.table.rows)
        assert not len(self.table.waiting)
        assert self.pool.num_free == self.pool.num_blocks - 1
