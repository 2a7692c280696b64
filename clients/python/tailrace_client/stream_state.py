"""StreamState: what is known of one request, and the rules its messages must keep.

    started, then deltas and progress, then summary; the offsets of a sequence leave no gap

The request may need several calls: where one is lost, others bring the rest, one for each sequence that
has begun and not ended. To the reader they are one stream.

Knows no transport: whoever reads the messages of the current attempt hands them in and takes deltas out.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from protos.tailrace.v1 import generation_pb2 as pb
from tailrace_client.attempt import Attempt, Received, again, continue_sequence
from tailrace_client.errors import ProtocolError, explain_resumption
from tailrace_client.events import Summary, to_delta, to_progress, to_started, to_summary
from tailrace_client.resume import Route
from tailrace_client.spec import wants_token_ids

if TYPE_CHECKING:
    from collections.abc import Callable

    from tailrace_client.errors import TailraceError
    from tailrace_client.events import Delta, Finish, Progress, Started


class StreamState:
    """`on_progress` is called with each progress message. `route` says what follows a loss; without one, nothing."""

    def __init__(
        self,
        spec: pb.GenerationSpec,
        on_progress: Callable[[Progress], None] | None,
        route: Route | None = None,
        timeout: float | None = None,
    ) -> None:
        self.spec = spec
        """What was asked for, the request's id filled in."""
        self.started: Started | None = None
        """None until the first message is here."""
        self.finishes: dict[int, Finish] = {}
        """By sequence, how it ended."""
        self.summary: Summary | None = None
        """None until the last message is here. After a resumption it is the last call's: times, and the tokens
        that one drew. What each sequence has as a whole, `finishes` tells."""
        self.resumptions = 0
        """Times a server was lost while it served the request."""
        self._on_progress = on_progress
        self._timeout = timeout
        self._has_begun = False
        self._has_ended = False
        self._began = 0.0
        self._received: dict[int, Received] = {}
        self._pending: deque[Delta] = deque()
        sent, self._hides_ids = _with_ids(spec) if route is not None and route.may_retry else (spec, False)
        self._sent = sent
        """What servers are asked for."""
        self._attempts = deque([Attempt(sent, 0, route or Route(None))])
        """Those not over; the first one is read next."""

    def __repr__(self) -> str:
        offsets = {index: received.offset for index, received in self._received.items()}
        return f"{type(self).__name__}({self.request_id}, offsets={offsets}, finishes={self.finishes})"

    @property
    def request_id(self) -> str:
        """To cancel by; known before anything was sent."""
        return self.spec.request_id

    @property
    def request_ids(self) -> list[str]:
        """The ids of all calls that are not over: more than one once a request of several sequences was resumed."""
        return [attempt.spec.request_id for attempt in self._attempts]

    @property
    def finish(self) -> Finish | None:
        """How the first sequence ended; None while it has not."""
        return self.finishes.get(0)

    # What the transport does ------------------------------------------------------------------

    def _begin(self) -> None:
        """The block was entered: the clock starts."""
        self._has_begun = True
        self._began = time.monotonic()
        self._attempts[0].route.start(self._timeout)

    def _end(self) -> None:
        """The block was left."""
        self._has_ended = True
        for attempt in self._attempts:
            if attempt.call is not None:
                attempt.call.cancel()

    def _accept(self, response: pb.GenerateStreamResponse) -> None:
        """Takes in a message; its deltas are then pending. Raises ProtocolError if it must not come here."""
        attempt = self._attempts[0]
        event = response.WhichOneof("event")
        if attempt.summary is not None:
            raise self._violation(f"{event} after the summary")
        if not attempt.has_started and event != "started":
            raise self._violation(f"{event} before started")
        match event:
            case "started":
                self._accept_started(to_started(response.started), attempt)
            case "delta":
                attempt.route.progressed()
                self._pending += [self._checked(to_delta(part), attempt) for part in response.delta.sequences]
            case "progress":
                if self._on_progress is not None:
                    self._on_progress(to_progress(response.progress))
            case "summary":
                if any(index not in self.finishes for index in attempt.indices):
                    raise self._violation("the summary came before every sequence had ended")
                attempt.summary = to_summary(response.summary)
        # Of several calls each is heard in turn.
        if attempt.summary is None:
            self._attempts.rotate(-1)

    def _accept_end(self) -> None:
        """The call ended with OK."""
        summary = self._attempts[0].summary
        if summary is None:
            raise self._violation("the stream ended without a summary")
        self._attempts.popleft()
        if not self._attempts:
            self.summary = summary

    def _lost(self, error: TailraceError) -> None:
        """The call failed. Sets up those that bring the rest; raises the error if there are to be none."""
        attempt = self._attempts[0]
        if attempt.cause is not None:
            error = explain_resumption(error, attempt.cause)
        attempt.route.failed(error)
        self.resumptions += attempt.has_started
        self._attempts.popleft()
        self._attempts.extendleft(reversed(self._following(attempt, error)))
        if not self._attempts:
            # All is here but the summary.
            self.summary = attempt.summary or self._own_summary()

    # Inside -----------------------------------------------------------------------------------

    def _following(self, lost: Attempt, error: TailraceError) -> list[Attempt]:
        """What is to bring the rest of a lost attempt."""
        effective = None if self.started is None else self.started.effective
        elapsed = time.monotonic() - self._began
        cause = lost.cause or error

        def attempt(first: int) -> Attempt:
            return Attempt(again(self._sent, effective, elapsed), first, lost.route.copy(), cause=cause)

        if not self._received:
            # Nothing of the output was seen: the whole request once more.
            if self.started is not None:
                self.started = replace(self.started, prompt_logprobs=[])
            return [attempt(0)]
        following = [attempt(index) for index in lost.indices if index not in self.finishes]
        for each in following:
            continue_sequence(each.spec, each.first, self._received.get(each.first) or self._nothing())
        return following

    def _nothing(self) -> Received:
        """What there is of a sequence before its first delta."""
        spec = self._sent
        token_ids = list(spec.resume_from.ids)
        text_bytes: int | None = spec.resume_text_bytes
        wants_text = not spec.output.HasField("text") or spec.output.text
        if not wants_text or (token_ids and not spec.HasField("resume_text_bytes")):
            text_bytes = None
        return Received(token_ids, len(token_ids), text_bytes)

    def _own_summary(self) -> Summary:
        """For a request of which only the summary was lost."""
        assert self.started is not None
        output_tokens = sum(finish.output_tokens for finish in self.finishes.values())
        return Summary(self.started.prompt_tokens, self.started.cached_tokens or 0, output_tokens, 0.0, 0.0, 0.0, 0)

    def _accept_started(self, started: Started, attempt: Attempt) -> None:
        is_first, attempt.has_started = not attempt.has_started, True
        if self.started is None:
            if self._hides_ids:
                started.effective.output.token_ids = False
            self.started = started
        elif started.prompt_logprobs and not self._received:
            # The rest of a long prompt's log-probabilities.
            pieces = [*self.started.prompt_logprobs, *started.prompt_logprobs]
            self.started = replace(self.started, prompt_logprobs=pieces)
        elif not is_first:
            raise self._violation("started twice")

    def _checked(self, delta: Delta, attempt: Attempt) -> Delta:
        if delta.index >= len(attempt.indices):
            raise self._violation(f"sequence {delta.index} was not asked for")
        index = attempt.first + delta.index
        if index in self.finishes:
            raise self._violation(f"sequence {index} goes on after its end")
        received = self._received.get(index)
        if received is None:
            received = self._received[index] = self._nothing()
        # Without ids a delta does not tell how many tokens it covers: then offsets can only be seen to grow.
        if delta.offset < received.offset or (wants_token_ids(self._sent) and delta.offset > received.offset):
            raise self._violation(f"sequence {index} goes on at token {delta.offset}, not at {received.offset}")
        received.add(delta)
        attempt.cause = None
        finish = delta.finish
        if finish is not None:
            if finish.cumulative_logprob is not None and self.resumptions:
                # The server's covers only what it drew itself.
                finish = replace(finish, cumulative_logprob=received.logprob)
            self.finishes[index] = finish
        elif not (attempt.first or self._hides_ids):
            return delta
        token_ids = [] if self._hides_ids else delta.token_ids
        return replace(delta, index=index, token_ids=token_ids, finish=finish)

    def _violation(self, what: str) -> ProtocolError:
        return ProtocolError(what, self.request_id)


def _with_ids(spec: pb.GenerationSpec) -> tuple[pb.GenerationSpec, bool]:
    """The spec with the ids that resuming needs, and whether they are more than was asked for.

    A request for nothing but its end gets that in one piece: it is resumed from the beginning.
    """
    output = spec.output
    wants_text = not output.HasField("text") or output.text
    wants_logprobs = output.HasField("logprobs") or output.logprob_token_ids.ids
    if wants_token_ids(spec) or not (wants_text or wants_logprobs):
        return spec, False
    result = pb.GenerationSpec()
    result.CopyFrom(spec)
    result.output.token_ids = True
    return result, True
