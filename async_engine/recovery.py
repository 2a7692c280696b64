"""Recovery: what a new core is to be told so that it goes on where the last one died.

A draw depends on nothing but (seed, position), so a sequence is continued exactly from its prompt and the
tokens that are out already. Only a request that brings cores down must not come back for ever. Those with
which a core had just begun when it died are suspects: they come back one at a time, so that the others need
not share their fate. One that alone was beginning when a core crashed, twice and without a token in between,
is given up. A core that was killed from outside says little about its requests, but memory that runs out
looks the same: such deaths count less.

Where there are several cores, all but the suspects go on in another one at once. Suspects come back to the core
that takes the place of the one they died with: whatever they do, they do it to one core. Only if that place stays
empty does another core try them.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from async_engine.core_request import time_left
from protos.errors import RequestFailedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from async_engine.output_processor import OutputProcessor
    from async_engine.request_state import RequestState, SequenceState
    from protos.messages import EngineCoreRequest

MAX_STRIKES = 2.0
CRASH_STRIKE = 1.0
KILL_STRIKE = 0.4
BACKOFF_SECONDS = 0.5
MAX_BACKOFF_SECONDS = 30.0


class Recovery:
    """What the cores that died in one place were doing, and what the next one there is told.

    The place is that of the core numbered `core`. `is_live` tells whether somebody still waits for a request; a core
    may be replaced `most_in_vain` times in a row without having done anything.
    """

    def __init__(
        self,
        processor: OutputProcessor,
        is_live: Callable[[RequestState], bool],
        most_in_vain: int,
        core: int = 0,
    ) -> None:
        self._processor = processor
        self._is_live = is_live
        self._most_in_vain = most_in_vain
        self._core = core
        self._in_vain = 0
        self.num_restarts = 0
        self._suspects: deque[RequestState] = deque()
        self._tried: RequestState | None = None
        """The suspect that the core has been told of last."""

    def next_delay(self, others_serve: bool = False) -> float | None:
        """Seconds to wait before the next core is started; None if there is to be none. While others serve there always
        is, if any core may be replaced at all."""
        if self._in_vain >= self._most_in_vain and not (others_serve and self._most_in_vain):
            return None
        self._in_vain += 1
        self.num_restarts += 1
        return 0.0 if self._in_vain == 1 else min(MAX_BACKOFF_SECONDS, BACKOFF_SECONDS * 2 ** min(self._in_vain, 16))

    def core_died(self, entering: Iterable[int] | None, was_killed: bool) -> list[RequestState]:
        """Suspicion falls on the requests it had just begun with, whose handles are `entering`; where nobody knows
        (None), on all without a token of it. Returns the others that are to go on."""
        known = self._processor.sequences
        if entering is None:
            requests = dict.fromkeys(self._processor.requests_in(self._core))
        else:
            requests = {known[handle].request: None for handle in entering if handle in known}
        suspects = [request for request in requests if not request.has_progressed]
        self._tried = None
        if len(suspects) == 1:
            suspects[0].strikes += KILL_STRIKE if was_killed else CRASH_STRIKE
        for request in suspects:
            if request.strikes >= MAX_STRIKES:
                self._processor.fail(request, RequestFailedError("the core died each time it began with this request"))
            elif request not in self._suspects:
                self._suspects.append(request)
        going_on: list[RequestState] = []
        for request in self._processor.requests_in(self._core):
            if self._processor.goes_on(request, self._is_live):
                if request.has_progressed:
                    request.strikes = 0
                request.has_progressed = False
                if request not in self._suspects:
                    going_on.append(request)
        return going_on

    def core_started(self) -> Iterator[EngineCoreRequest]:
        """There is a new core. The suspects come one at a time."""
        yield from self._try_next()

    def core_works(self) -> Iterator[EngineCoreRequest]:
        """A token came, or a request ended. Perhaps it is the turn of the next suspect."""
        self._in_vain = 0
        tried = self._tried
        if tried is None or tried.has_progressed or not self._is_in_core(tried):
            yield from self._try_next()

    def core_found(self) -> None:
        """That it can be reached is all that could be hoped for of a core which others replace."""
        self._in_vain = 0

    def give_suspects_away(self) -> list[RequestState]:
        """For another core to try them."""
        suspects = list(self._suspects)
        self._suspects.clear()
        return suspects

    def take_suspects(self, suspects: Iterable[RequestState]) -> Iterator[EngineCoreRequest]:
        """Of a core that is not to be had any more."""
        for request in suspects:
            request.core = self._core
            self._suspects.append(request)
        if self._tried is None:
            yield from self._try_next()

    def _is_in_core(self, request: RequestState) -> bool:
        return self._is_live(request) and any(each.handle in self._processor.sequences for each in request.sequences)

    def _try_next(self) -> Iterator[EngineCoreRequest]:
        self._tried = None
        while self._suspects and self._tried is None:
            request = self._suspects.popleft()
            if self._processor.goes_on(request, self._is_live):
                self._tried = request
                yield from resubmissions(request)


def resubmissions(request: RequestState) -> Iterator[EngineCoreRequest]:
    """A request as a new core is to continue it: whole if nothing of it is out, else sequence by sequence."""
    message = request.message
    assert message is not None
    elapsed = time.monotonic() - request.sent_at
    message = msgspec.structs.replace(
        message,
        deadline=time_left(message.deadline, elapsed),
        time_limit=time_left(message.time_limit, elapsed),
        # Once admitted a request does not wait for admission any more.
        queue_timeout=None if request.started else time_left(message.queue_timeout, elapsed),
        prompt_logprobs_from=request.prompt_logprobs_from,
        was_admitted=request.started,
    )
    if all(sequence.finish is None and not sequence.new_token_ids for sequence in request.sequences):
        yield message
        return
    seeds = {sibling.handle: sibling.seed for sibling in message.siblings}
    for sequence in request.sequences:
        if sequence.finish is None:
            yield _continue(message, sequence, seeds.get(sequence.handle, message.sampling.seed))


def _continue(message: EngineCoreRequest, sequence: SequenceState, seed: int) -> EngineCoreRequest:
    is_first = sequence.handle == message.handle
    sampling = msgspec.structs.replace(
        message.sampling, seed=seed, prompt_logprobs=message.sampling.prompt_logprobs if is_first else None
    )
    return msgspec.structs.replace(
        message,
        handle=sequence.handle,
        sampling=sampling,
        output_token_ids=message.output_token_ids + sequence.new_token_ids.tobytes(),
        siblings=[],
    )
