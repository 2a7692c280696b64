"""OutputProcessor: from the core's columns to each request's sink."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from async_engine.logprobs import LogprobTable
from async_engine.unexpected import hide_error
from protos.errors import (
    AdapterNotFoundError,
    DeadlineError,
    InvalidRequestError,
    OverloadedError,
    QueueTimeoutError,
    RequestFailedError,
    ShedError,
    TailraceError,
)
from protos.messages import EngineCoreOutputs, Finished, FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable

    from async_engine.request_state import RequestState, SequenceState

_FAILURES: dict[FinishReason, type[TailraceError]] = {
    FinishReason.DEADLINE: DeadlineError,
    FinishReason.QUEUE_TIMEOUT: QueueTimeoutError,
    FinishReason.ERROR: RequestFailedError,
    FinishReason.OVERLOADED: OverloadedError,
}


class OutputProcessor:
    """The only loop over tokens in the front end.

    `on_admitted(state)` is told each request that a core has admitted, `on_first(state)` the first token of each in
    the core where it is, `on_end(state, finished)` each that is over.
    """

    def __init__(
        self,
        on_admitted: Callable[[RequestState], None],
        on_end: Callable[[RequestState, Finished], None],
        on_first: Callable[[RequestState], None] = lambda state: None,
    ) -> None:
        self.sequences: dict[int, SequenceState] = {}
        """By handle, from before the request is sent to the core until the core has ended it."""
        self._on_admitted = on_admitted
        self._on_end = on_end
        self._on_first = on_first

    def process(self, outputs: EngineCoreOutputs) -> list[int]:
        """Takes in one message. Unknown handles are those of requests nobody waits for. Returns the handles of
        sequences that are over here and must end in the core."""
        sequences = self.sequences
        for admitted in outputs.admitted:
            sequence = sequences.get(admitted.handle)
            if sequence is not None and sequence.request.handle == admitted.handle and not sequence.request.started:
                sequence.request.started = True
                self._on_admitted(sequence.request)
                sequence.request.sink.started(admitted.cached_tokens)
        for part in outputs.prompt_logprobs:
            sequence = sequences.get(part.handle)
            if sequence is not None:
                logprobs = LogprobTable(part.columns).all()
                sequence.request.prompt_logprobs_from = part.offset + len(logprobs)
                sequence.request.sink.prompt_logprobs(part.offset, logprobs)
        table = None if outputs.logprobs is None else LogprobTable(outputs.logprobs)
        ended = {finished.handle: finished for finished in outputs.finished}
        stopped: list[int] = []
        now = time.monotonic()
        handles = np.frombuffer(outputs.handles, "<i8").tolist()
        token_ids = np.frombuffer(outputs.token_ids, "<i4").tolist()
        for place, (handle, token_id) in enumerate(zip(handles, token_ids, strict=True)):
            sequence = sequences.get(handle)
            if sequence is None or sequence.finish is not None:
                continue
            if not sequence.request.has_progressed:
                sequence.request.has_progressed = True
                sequence.request.first_token_time = sequence.request.first_token_time or now
                self._on_first(sequence.request)
            if handle in ended and sequence.drops(ended[handle]):
                sequence.new_token_ids.append(token_id)
                continue
            try:
                if sequence.push(token_id, table, place):
                    stopped.append(handle)
            except Exception as error:  # a bug that one request's text meets must not end the others
                stopped += self._fail(sequence.request, hide_error(error))
        for finished in outputs.finished:
            sequence = sequences.pop(finished.handle, None)
            if sequence is not None:
                stopped += self._end(sequence, finished)
        return stopped

    def requests_in(self, core: int | None) -> list[RequestState]:
        """Of the core with this number, or of none, in order of arrival."""
        requests = {sequence.request: None for sequence in self.sequences.values()}
        return [request for request in requests if request.core == core]

    def goes_on(self, request: RequestState, is_live: Callable[[RequestState], bool]) -> bool:
        """Whether a core is to continue a request whose core is gone. Its sequences that nobody waits for any more end,
        and so do those that were complete, or given up, and whose end the core had yet to tell."""
        left = [sequence for sequence in request.sequences if sequence.handle in self.sequences]
        is_wanted = is_live(request) and not request.cancelled
        goes_on = False
        for sequence in left:
            if is_wanted and sequence.finish is None:
                goes_on = True
                continue
            reason = sequence.finish.reason if is_wanted and sequence.finish is not None else FinishReason.ABORTED
            del self.sequences[sequence.handle]
            self._end(sequence, Finished(sequence.handle, reason))
        return goes_on

    def fail(self, request: RequestState, error: TailraceError) -> None:
        """Ends one request as a whole."""
        self._fail(request, error)

    def fail_all(self, error: TailraceError) -> None:
        """The core is gone: so are its requests."""
        for request in {sequence.request: None for sequence in self.sequences.values()}:
            self._fail(request, error)

    def _fail(self, request: RequestState, error: TailraceError, finished: Finished | None = None) -> list[int]:
        """Ends a request as a whole; returns the handles that the core may still know. Without the core's word
        (`finished`) its times are what they looked like from here."""
        handles = [sequence.handle for sequence in request.sequences if sequence.handle in self.sequences]
        for handle in handles:
            del self.sequences[handle]
        request.sink.failed(error)
        if finished is None:
            now = time.monotonic()
            first = request.first_token_time or now
            finished = Finished(
                request.handle,
                FinishReason.ERROR,
                prefill_seconds=first - request.arrival_time,
                decode_seconds=now - first,
                message=str(error),
            )
        self._on_end(request, finished)
        return handles

    def _end(self, sequence: SequenceState, finished: Finished) -> list[int]:
        """The core has ended a sequence; returns the handles of those that are to end with it."""
        request = sequence.request
        if finished.reason.is_failure and sequence.finish is None:
            return self._fail(request, _error(finished), finished)
        sequence.end(finished.reason, finished.stop_token_id)
        whole = request.ended(finished)
        if whole is not None:
            request.sink.summary(request.summarize(whole))
            self._on_end(request, whole)
        return []


def _error(finished: Finished) -> TailraceError:
    if finished.reason is FinishReason.INVALID:
        return InvalidRequestError(finished.field, finished.message)
    if finished.reason is FinishReason.NO_ADAPTER:
        return AdapterNotFoundError(finished.field, finished.message)
    if finished.reason is FinishReason.SHED:
        return ShedError(finished.message, finished.retry_after)
    return _FAILURES[finished.reason](finished.message)
