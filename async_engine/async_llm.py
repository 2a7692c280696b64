"""AsyncLLM: one engine for many concurrent requests on one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
import uuid
from typing import TYPE_CHECKING

from async_engine.adapters import load_at_start, open_adapter
from async_engine.admission import Admission
from async_engine.core_group import CoreGroup, kept, start_cores
from async_engine.core_request import core_request
from async_engine.core_source import LocalCores, remote_core
from async_engine.input_processor import Accepted, InputProcessor
from async_engine.output_processor import OutputProcessor
from async_engine.outputs import Delta, Progress, PromptLogprobs, Summary
from async_engine.request_state import RequestState
from async_engine.served_model import digest_model, open_model
from async_engine.stream import RequestStream
from protos.adapter_config import adapter_paths
from protos.errors import CoreDiedError, DuplicateRequestError, StartupError, TailraceError, UnavailableError
from protos.messages import Finished, FinishReason
from protos.server_config import AdmissionOptions

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence

    from async_engine.core_client import CoreClient
    from async_engine.core_process import Door
    from async_engine.core_source import CoreSource
    from async_engine.outputs import OutputSink
    from async_engine.request import GenerationRequest
    from async_engine.served_model import ServedModel
    from protos.adapter import Adapter
    from protos.config import EngineConfig
    from protos.messages import CoreReady, CoreStats

DEFAULT_CORE_RESTARTS = 5
DEFAULT_ADMISSION = AdmissionOptions()


class AsyncLLM:
    """Submits requests to a core process and routes what comes back.

    A core that dies is replaced, up to `max_core_restarts` times in a row, and every live request goes on where it
    was, in another core if there are several. Observers: `on_begin(state)` is told every request that comes,
    `on_end(state, finished)` every one that is over, `on_stats(stats)` how the cores do together. `keep_text` keeps
    prompts and outputs for them.
    """

    def __init__(
        self,
        model: ServedModel,
        cores: Sequence[tuple[CoreSource, CoreClient]],
        admission: AdmissionOptions,
        max_core_restarts: int = DEFAULT_CORE_RESTARTS,
    ) -> None:
        """`cores` are there, each with the way to the next one in its place."""
        self.model = model
        self.on_begin: list[Callable[[RequestState], None]] = []
        self.on_end: list[Callable[[RequestState, Finished], None]] = []
        self.on_stats: list[Callable[[CoreStats], None]] = []
        self.keep_text = False
        self.draining = False
        self.drained = asyncio.Event()
        """Set when no request is live any more and none will be."""
        self.output_processor = OutputProcessor(
            on_admitted=self._admitted, on_end=self._ended, on_first=lambda state: self.cores.began(state)
        )
        self.cores = CoreGroup(
            cores, self.output_processor, self._is_live, self._observe, model.vocabulary, max_core_restarts
        )
        self.input = InputProcessor(model, self.ready.max_model_len, admission.queue_timeout or None)
        self._admission = Admission(admission, self.ready.max_num_seqs)
        self._cancel_elsewhere: Callable[[str, str], Awaitable[bool]] | None = None
        self._live: dict[str, RequestState] = {}
        self._num_handles = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._output_task = asyncio.create_task(self.cores.run(), name="output-processor")

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        served_name: str = "",
        admission: AdmissionOptions = DEFAULT_ADMISSION,
        max_core_restarts: int = DEFAULT_CORE_RESTARTS,
        hang_timeout: float = math.inf,
        on_progress: Callable[[int, int], None] | None = None,
        doors: Sequence[Door] = (),
    ) -> AsyncLLM:
        """Starts the core processes for the configured model. Raises StartupError, one line, if that fails.

        The tokenizer is read while the cores load the weights. A core that is silent for `hang_timeout` seconds
        is taken for dead. Other front ends reach the cores at `doors`.
        """
        adapters = adapter_paths(config.adapters.adapters)
        local = LocalCores(config, doors)
        try:
            eos_token_ids, loading = await open_model(config.model.model, served_name)
            try:
                cores = await start_cores(local.sources(eos_token_ids, hang_timeout), on_progress)
            except BaseException:
                loading.cancel()
                raise
        finally:
            local.close()
        async with kept(cores):
            llm = cls(await loading, cores, admission, max_core_restarts)
        try:
            await load_at_start(adapters, llm.load_adapter)
        except BaseException:
            await llm.close()
            raise
        return llm

    @classmethod
    async def join(
        cls,
        addresses: Sequence[str],
        secret: bytes,
        model: str = "",
        *,
        served_name: str = "",
        admission: AdmissionOptions = DEFAULT_ADMISSION,
        max_core_restarts: int = DEFAULT_CORE_RESTARTS,
        hang_timeout: float = math.inf,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> AsyncLLM:
        """Connects to cores that others started. Raises StartupError, one line, if that fails.

        `model` is what its files are called here; by default what the first core calls them.
        """
        sources = [remote_core(address, secret, hang_timeout) for address in addresses]
        cores = await start_cores(sources, on_progress)
        async with kept(cores):
            served = model or cores[0][1].welcome.config.model.model
            digest = await digest_model(served)
            for source, core in cores:
                if core.welcome.model_digest != digest:
                    raise StartupError(f"{source.name} serves another model than the files of {served or 'ours'} here")
            _, loading = await open_model(served, served_name)
            return cls(await loading, cores, admission, max_core_restarts)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _is_live(self, state: RequestState) -> bool:
        return self._live.get(state.request_id) is state

    @property
    def core(self) -> CoreClient:
        """The first core, where one is as good as another."""
        return self.cores.slots[0].core

    @property
    def ready(self) -> CoreReady:
        """What the cores hold together; `max_model_len` is of each."""
        return self.cores.ready

    @property
    def stats(self) -> CoreStats:
        """What the cores told last, together, with the totals of the cores before them."""
        return self.cores.stats

    @property
    def recovering(self) -> bool:
        """Every core has died, and others are starting."""
        return not self.cores.is_up

    @property
    def error(self) -> TailraceError | None:
        """Why the engine cannot go on; None while it can."""
        return self.cores.error

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def live_requests(self) -> list[RequestState]:
        """Oldest first."""
        return list(self._live.values())

    def share_cores(self, cancel_elsewhere: Callable[[str, str], Awaitable[bool]]) -> None:
        """Other front ends of the server have the cores, too: they cancel what is not known here, and what they have
        in the cores counts at the door."""
        self._cancel_elsewhere = cancel_elsewhere
        self._admission.is_shared = True

    # Requests ---------------------------------------------------------------------------------

    async def generate(
        self, request: GenerationRequest, request_id: str = ""
    ) -> AsyncGenerator[Delta | PromptLogprobs | Summary]:
        """Streams one request: deltas, then the summary; the prompt's log-probabilities, if asked for, come first.
        Leaving the iteration aborts the request."""
        request.params.verify(self.model.vocab_size)
        stream = RequestStream(len(request.resume_token_ids), num_sequences=request.params.n)
        async with self.open(request, stream, request_id):
            async for event in stream:
                if isinstance(event, Delta | PromptLogprobs | Summary):
                    yield event

    @contextlib.asynccontextmanager
    async def open(
        self, request: GenerationRequest, sink: OutputSink, request_id: str = ""
    ) -> AsyncIterator[tuple[RequestState, Accepted]]:
        """A live request whose events go to `sink`; aborted on exit if it is not over."""
        state = self.register(request_id, sink, request.params.n, request.caller)
        try:
            yield state, await self.submit(state, request)
        finally:
            self.release(state)

    def register(self, request_id: str, sink: OutputSink, num_sequences: int = 1, caller: str = "") -> RequestState:
        """Makes a request known, before anything is awaited, so that it can be cancelled from now on.

        Raises DuplicateRequestError, OverloadedError, UnavailableError or what the engine died of.
        """
        if self.error is not None:
            raise self.error.with_traceback(None)
        if self.draining:
            raise UnavailableError("the server is draining")
        request_id = request_id or uuid.uuid4().hex
        if request_id in self._live:
            raise DuplicateRequestError(f"a live request has the id {request_id!r} already")
        self._admission.enter(caller, num_sequences, len(self.output_processor.sequences))
        handles = [self._num_handles + 1 + index for index in range(num_sequences)]
        self._num_handles += num_sequences
        state = RequestState(request_id, sink, handles, caller)
        if self.keep_text:
            state.output_text = []
        self._live[request_id] = state
        self._idle.clear()
        for callback in self.on_begin:
            callback(state)
        return state

    async def submit(self, state: RequestState, request: GenerationRequest) -> Accepted:
        """Checks a registered request and sends it to the core.

        Raises InvalidRequestError, ModelNotFoundError, AdapterNotFoundError or OverloadedError; the caller still has to
        `release` the state.
        """
        request = await self.cores.adapters.resolve(request, self.model.names)
        state.adapter = request.adapter
        accepted = await self.input.accept(request, state)
        if accepted.params.grammar is not None:
            await self.cores.tell_vocabulary()
        await self.cores.look_at(state, accepted)
        if self.error is not None:
            raise self.error.with_traceback(None)
        if state.cancelled:
            self._end_early(state, FinishReason.ABORTED)
        elif accepted.complete is not None:
            state.sink.started(0)
            for sequence in state.sequences:
                sequence.finish_resumed(accepted.complete)
            self._end_early(state, accepted.complete.reason)
        else:
            self._admission.queue(state, len(accepted.prompt_token_ids) + len(request.resume_token_ids))
            state.sent_at = time.monotonic()
            elapsed = state.sent_at - state.arrival_time
            state.message = core_request(state, accepted, self.model, self.ready.max_model_len, elapsed)
            self.output_processor.sequences |= {sequence.handle: sequence for sequence in state.sequences}
            self.cores.submit(state)
        return accepted

    def release(self, state: RequestState) -> None:
        """The caller is done with a request, over or not. Idempotent."""
        if self._live.get(state.request_id) is state:
            del self._live[state.request_id]
            self._admission.leave(state)
            if not self._live:
                self._idle.set()
        self._abort_unfinished(state)

    def cancel(self, request_id: str, caller: str = "") -> bool:
        """Ends a request by its id, with what it has so far; False if it is not live, or not the caller's if one is
        given."""
        state = self._live.get(request_id)
        if state is None or state.is_ending or (caller and caller != state.caller):
            return False
        state.cancelled = True
        self._abort_unfinished(state)
        return True

    async def cancel_anywhere(self, request_id: str, caller: str = "") -> bool:
        """The same for a request that may be another front end's."""
        if self.cancel(request_id, caller):
            return True
        return self._cancel_elsewhere is not None and await self._cancel_elsewhere(request_id, caller)

    async def progress(self, state: RequestState) -> Progress:
        """Where a request is that has not sent anything lately."""
        answer = await self.cores.progress(state)
        return Progress(*answer) if answer else Progress(0, state.prompt_tokens)

    # The engine's life ------------------------------------------------------------------------

    @property
    def paused(self) -> bool:
        return self.cores.paused

    async def pause(self, *, freeze: bool) -> None:
        """Admits nothing new until `resume`, or with `freeze` works on nothing at all. Streams stay open."""
        await self.cores.pause("freeze" if freeze else "pause")

    async def resume(self) -> None:
        """Undoes `pause`."""
        await self.cores.pause("resume")

    async def reset_prefix_cache(self, restart_running: bool) -> bool:
        """Forgets what is cached; False if a block is in use, unless what runs may start over."""
        return await self.cores.reset_prefix_cache(restart_running)

    async def load_adapter(self, name: str, path: str) -> Adapter:
        """Makes the adapter in a directory known to all requests by this name; see `LoadedAdapters.load`."""
        adapter = await open_adapter(name, path, self.model, self.ready.max_adapter_rank)
        await self.cores.adapters.load(adapter)
        return adapter

    async def drain(self, seconds: float) -> int:
        """Refuses new requests and waits for the live ones, at most so long; what is left then fails. How many did."""
        self.draining = True
        num_left = 0
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            num_left = self.num_live
            self.output_processor.fail_all(UnavailableError("the server is going away; resume on another"))
        self.drained.set()
        self.cores.kv_watches.close(UnavailableError("the server is going away"))
        return num_left

    async def close(self) -> None:
        """Stops the cores. Requests still live fail with UnavailableError. Idempotent."""
        self.draining = True
        self._output_task.cancel()
        await asyncio.wait([self._output_task])
        self.output_processor.fail_all(UnavailableError("the engine was closed"))
        await self.cores.close()
        self.model.tokenizer.close()

    async def died(self) -> TailraceError:
        """Waits until the engine cannot go on, and says why."""
        await asyncio.wait([self._output_task])
        return self.error or CoreDiedError("the output processor stopped")

    def _abort_unfinished(self, state: RequestState) -> bool:
        """Ends in the core what has not ended here; False if the core knows nothing of it."""
        handles = [
            sequence.handle
            for sequence in state.sequences
            if sequence.finish is None and sequence.handle in self.output_processor.sequences
        ]
        if handles:
            self.cores.abort(state, handles)
        return bool(handles)

    def _admitted(self, state: RequestState) -> None:
        self._admission.unqueue(state)

    def _observe(self, stats: CoreStats) -> None:
        self._admission.observe(stats, len(self.output_processor.sequences))
        for callback in self.on_stats:
            callback(stats)

    def _ended(self, state: RequestState, finished: Finished) -> None:
        self.cores.ended(state)
        for callback in self.on_end:
            callback(state, finished)

    def _end_early(self, state: RequestState, reason: FinishReason) -> None:
        """The request is over without the core having heard of it."""
        finished = Finished(state.handle, reason)
        for sequence in state.sequences:
            sequence.end(reason)
        state.sink.summary(state.summarize(finished))
        self._ended(state, finished)
