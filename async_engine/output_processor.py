"""OutputProcessor: from the core's columns to each request's sink."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from async_engine.unexpected import hide_error
from protos.errors import DeadlineError, QueueTimeoutError, RequestFailedError, TailraceError
from protos.messages import EngineCoreOutputs, Finished, FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable

    from async_engine.request_state import RequestState

_FAILURES: dict[FinishReason, type[TailraceError]] = {
    FinishReason.DEADLINE: DeadlineError,
    FinishReason.QUEUE_TIMEOUT: QueueTimeoutError,
    FinishReason.ERROR: RequestFailedError,
}


class OutputProcessor:
    """The only loop over tokens in the front end.

    `on_stop(handles)` is told the requests that ended by a stop string and must end in the core;
    `on_end(state, finished)` each request that is over.
    """

    def __init__(self, on_stop: Callable[[list[int]], None], on_end: Callable[[RequestState, Finished], None]) -> None:
        self.states: dict[int, RequestState] = {}
        """By handle, from before the request is sent to the core until the core has ended it."""
        self._on_stop = on_stop
        self._on_end = on_end

    def process(self, outputs: EngineCoreOutputs) -> None:
        """Takes in one message. Unknown handles are those of requests nobody waits for."""
        states = self.states
        for admitted in outputs.admitted:
            state = states.get(admitted.handle)
            if state is not None:
                state.cached_tokens = admitted.cached_tokens
                state.sink.started(admitted.cached_tokens)
        ended = {finished.handle: finished for finished in outputs.finished}
        stopped: list[int] = []
        now = time.monotonic()
        handles = np.frombuffer(outputs.handles, "<i8").tolist()
        token_ids = np.frombuffer(outputs.token_ids, "<i4").tolist()
        for handle, token_id in zip(handles, token_ids, strict=True):
            state = states.get(handle)
            if state is None or state.finish is not None:
                continue
            if not state.first_token_time:
                state.first_token_time = now
            if handle in ended and state.drops(ended[handle]):
                state.drawn_tokens += 1
                continue
            try:
                if state.push(token_id):
                    stopped.append(handle)
            except Exception as error:  # a bug that one request's text meets must not end the others
                self._fail(state, hide_error(error))
                stopped.append(handle)
        for finished in outputs.finished:
            state = states.pop(finished.handle, None)
            if state is not None:
                self._end(state, finished)
        if stopped:
            self._on_stop(stopped)

    def fail_all(self, error: TailraceError) -> None:
        """The core is gone: so are its requests."""
        for state in list(self.states.values()):
            self._fail(state, error)

    def _fail(self, state: RequestState, error: TailraceError) -> None:
        del self.states[state.handle]
        state.sink.failed(error)
        self._on_end(state, Finished(state.handle, FinishReason.ERROR, message=str(error)))

    def _end(self, state: RequestState, finished: Finished) -> None:
        if finished.reason.is_failure and state.finish is None:
            state.sink.failed(_FAILURES[finished.reason](finished.message))
        else:
            state.end(finished.reason, finished.stop_token_id)
            state.sink.summary(state.summarize(finished))
        self._on_end(state, finished)
