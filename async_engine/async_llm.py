"""AsyncLLM: one engine for many concurrent requests on one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from typing import TYPE_CHECKING

from async_engine.core_client import CoreClient
from async_engine.input_processor import Accepted, InputProcessor
from async_engine.output_processor import OutputProcessor
from async_engine.outputs import Delta, Progress, Summary
from async_engine.request_state import RequestState
from async_engine.served_model import NULL_MODEL, ServedModel, load_served_model, null_model
from async_engine.stream import RequestStream
from protos.errors import (
    CoreDiedError,
    DuplicateRequestError,
    OverloadedError,
    RequestFailedError,
    TailraceError,
    UnavailableError,
)
from protos.messages import Abort, Finished, FinishReason
from protos.model_files import read_model_spec, resolve_model

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable

    from async_engine.outputs import OutputSink
    from async_engine.request import GenerationRequest
    from protos.config import EngineConfig
    from protos.messages import CoreStats


logger = logging.getLogger(__name__)


class AsyncLLM:
    """Submits requests to a core process and routes what comes back.

    Observers: `on_end(state, finished)` is told every request that is over, `on_stats(stats)` how the core
    does. `keep_text` keeps prompts and outputs for them.
    """

    def __init__(self, model: ServedModel, core: CoreClient, max_queued_requests: int = 1024) -> None:
        self.model = model
        self.core = core
        self.on_end: list[Callable[[RequestState, Finished], None]] = []
        self.on_stats: list[Callable[[CoreStats], None]] = []
        self.keep_text = False
        self.draining = False
        self.drained = asyncio.Event()
        """Set when no request is live any more and none will be."""
        self._input = InputProcessor(model, core.ready.max_model_len)
        self.output_processor = OutputProcessor(on_stop=self._abort_handles, on_end=self._ended)
        self._capacity = core.ready.max_num_seqs + max_queued_requests
        self._live: dict[str, RequestState] = {}
        self._num_handles = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._output_task = asyncio.create_task(self._process_outputs(), name="output-processor")

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        served_name: str = "",
        max_queued_requests: int = 1024,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> AsyncLLM:
        """Starts a core process for the configured model. Raises StartupError, one line, if that fails.

        The tokenizer is read while the core loads the weights.
        """
        name = config.model.model
        if name == NULL_MODEL:
            return cls(null_model(served_name), await CoreClient.start(config, (), on_progress), max_queued_requests)
        path = await asyncio.to_thread(resolve_model, name)
        spec = await asyncio.to_thread(read_model_spec, path)
        loading = asyncio.create_task(load_served_model(name, path, spec, served_name))
        try:
            core = await CoreClient.start(config, spec.eos_token_ids, on_progress)
        except BaseException:
            loading.cancel()
            raise
        try:
            return cls(await loading, core, max_queued_requests)
        except BaseException:
            await core.close(grace=0)
            raise

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def error(self) -> TailraceError | None:
        """Why the engine cannot go on; None while it can."""
        return self.core.death

    # Requests ---------------------------------------------------------------------------------

    async def generate(self, request: GenerationRequest, request_id: str = "") -> AsyncGenerator[Delta | Summary]:
        """Streams one request: deltas, then the summary. Leaving the iteration aborts the request."""
        stream = RequestStream(offset=len(request.resume_token_ids))
        async with self.open(request, stream, request_id):
            async for event in stream:
                if isinstance(event, Delta | Summary):
                    yield event

    @contextlib.asynccontextmanager
    async def open(
        self, request: GenerationRequest, sink: OutputSink, request_id: str = ""
    ) -> AsyncIterator[tuple[RequestState, Accepted]]:
        """A live request whose events go to `sink`; aborted on exit if it is not over."""
        state = self.register(request_id, sink)
        try:
            yield state, await self.submit(state, request)
        finally:
            self.release(state)

    def register(self, request_id: str, sink: OutputSink) -> RequestState:
        """Makes a request known, before anything is awaited, so that it can be cancelled from now on.

        Raises DuplicateRequestError, OverloadedError, UnavailableError or what the engine died of.
        """
        if self.core.death is not None:
            raise self.core.death.with_traceback(None)
        if self.draining:
            raise UnavailableError("the server is draining")
        # Those whose caller left count until the core has ended them: a hung core must not gather them.
        if max(len(self._live), len(self.output_processor.states)) >= self._capacity:
            raise OverloadedError(f"{self._capacity} requests run or wait already")
        request_id = request_id or uuid.uuid4().hex
        if request_id in self._live:
            raise DuplicateRequestError(f"a live request has the id {request_id!r} already")
        self._num_handles += 1
        state = RequestState(self._num_handles, request_id, sink)
        if self.keep_text:
            state.output_text = []
        self._live[request_id] = state
        self._idle.clear()
        return state

    async def submit(self, state: RequestState, request: GenerationRequest) -> Accepted:
        """Checks a registered request and sends it to the core.

        Raises InvalidRequestError or ModelNotFoundError; the caller still has to `release` the state.
        """
        accepted = await self._input.accept(request, state)
        if self.core.death is not None:
            raise self.core.death.with_traceback(None)
        if state.cancelled:
            self._end_early(state, FinishReason.ABORTED)
        elif accepted.complete is not None:
            state.sink.started(0)
            state.finish_now(accepted.complete)
            self._end_early(state, accepted.complete.reason)
        else:
            self.output_processor.states[state.handle] = state
            elapsed = time.monotonic() - state.arrival_time
            self.core.send(self._input.core_request(state.handle, accepted, elapsed))
        return accepted

    def release(self, state: RequestState) -> None:
        """The caller is done with a request, over or not. Idempotent."""
        if self._live.get(state.request_id) is state:
            del self._live[state.request_id]
            if not self._live:
                self._idle.set()
        if state.handle in self.output_processor.states and state.finish is None:
            self._abort_handles([state.handle])

    def cancel(self, request_id: str) -> bool:
        """Ends a request by its id, with what it has so far; False if it is not live."""
        state = self._live.get(request_id)
        if state is None or state.finish is not None:
            return False
        if state.handle in self.output_processor.states:
            self._abort_handles([state.handle])
        else:
            state.cancelled = True
        return True

    async def progress(self, state: RequestState) -> Progress:
        """Where a request is that has not sent anything lately."""
        answer = await self.core.call("progress", state.handle)
        return Progress(*answer) if answer else Progress(0, state.prompt_tokens)

    # The engine's life ------------------------------------------------------------------------

    async def drain(self, seconds: float) -> None:
        """Refuses new requests and waits for the live ones, at most so long; what is left then fails."""
        self.draining = True
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            self.output_processor.fail_all(UnavailableError("the server is going away; resume on another"))
        self.drained.set()

    async def close(self) -> None:
        """Stops the core. Requests still live fail with UnavailableError. Idempotent."""
        self.draining = True
        self._output_task.cancel()
        await asyncio.wait([self._output_task])
        self.output_processor.fail_all(UnavailableError("the engine was closed"))
        await self.core.close()

    async def died(self) -> TailraceError:
        """Waits until the engine cannot go on, and says why."""
        await asyncio.wait([self._output_task])
        return self.core.death or CoreDiedError("the output processor stopped")

    async def _process_outputs(self) -> None:
        """The output-processor task: the only reader of the core's outputs. Its end ends every request."""
        try:
            while True:
                outputs = await self.core.outputs()
                self.output_processor.process(outputs)
                if outputs.stats is not None:
                    for callback in self.on_stats:
                        callback(outputs.stats)
                # Readers run between two messages, however fast the core is.
                await asyncio.sleep(0)
        except TailraceError as error:
            self.output_processor.fail_all(error)
        except Exception:
            logger.exception("the output processor failed")
            self.output_processor.fail_all(RequestFailedError("the output processor failed"))

    def _abort_handles(self, handles: list[int]) -> None:
        self.core.send(Abort(handles))

    def _ended(self, state: RequestState, finished: Finished) -> None:
        for callback in self.on_end:
            callback(state, finished)

    def _end_early(self, state: RequestState, reason: FinishReason) -> None:
        """The request is over without the core having heard of it."""
        finished = Finished(state.handle, reason)
        state.end(reason, -1)
        state.sink.summary(state.summarize(finished))
        self._ended(state, finished)
