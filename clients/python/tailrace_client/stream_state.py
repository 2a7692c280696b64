"""StreamState: what is known of one request, and the rules its messages must keep.

    started, then deltas and progress, then summary; the offsets of a sequence leave no gap

Knows no transport: whoever reads the messages hands them in and takes deltas out.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from tailrace_client.errors import ProtocolError
from tailrace_client.events import to_delta, to_progress, to_started, to_summary

if TYPE_CHECKING:
    from collections.abc import Callable

    from protos.tailrace.v1 import generation_pb2 as pb
    from tailrace_client.events import Delta, Finish, Progress, Started, Summary


class StreamState:
    """`on_progress` is called with each progress message."""

    def __init__(self, spec: pb.GenerationSpec, on_progress: Callable[[Progress], None] | None) -> None:
        self.spec = spec
        """What was asked for, the request's id filled in."""
        self.started: Started | None = None
        """None until the first message is here."""
        self.finishes: dict[int, Finish] = {}
        """By sequence, how it ended."""
        self.summary: Summary | None = None
        """None until the last message is here."""
        self._on_progress = on_progress
        self._offsets: dict[int, int] = {}
        """By sequence, the offset its next delta must have."""
        self._pending: deque[Delta] = deque()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.request_id}, offsets={self._offsets}, finishes={self.finishes})"

    @property
    def request_id(self) -> str:
        """To cancel by; known before anything was sent."""
        return self.spec.request_id

    @property
    def finish(self) -> Finish | None:
        """How the first sequence ended; None while it has not."""
        return self.finishes.get(0)

    def _accept(self, response: pb.GenerateStreamResponse) -> None:
        """Takes in a message; its deltas are then pending. Raises ProtocolError if it must not come here."""
        event = response.WhichOneof("event")
        if self.summary is not None:
            raise self._violation(f"{event} after the summary")
        if self.started is None and event != "started":
            raise self._violation(f"{event} before started")
        match event:
            case "started":
                self._accept_started(to_started(response.started))
            case "delta":
                self._pending += [self._checked(to_delta(sequence)) for sequence in response.delta.sequences]
            case "progress":
                if self._on_progress is not None:
                    self._on_progress(to_progress(response.progress))
            case "summary":
                if 0 not in self.finishes or self._offsets.keys() != self.finishes.keys():
                    raise self._violation("the summary came before every sequence had ended")
                self.summary = to_summary(response.summary)

    def _accept_end(self) -> None:
        """The call ended with OK."""
        if self.summary is None:
            raise self._violation("the stream ended without a summary")

    def _accept_started(self, started: Started) -> None:
        if self.started is None:
            self.started = started
        elif started.prompt_logprobs and not self._offsets:
            # The rest of a long prompt's log-probabilities.
            pieces = [*self.started.prompt_logprobs, *started.prompt_logprobs]
            self.started = replace(self.started, prompt_logprobs=pieces)
        else:
            raise self._violation("started twice")

    def _checked(self, delta: Delta) -> Delta:
        if delta.index in self.finishes:
            raise self._violation(f"sequence {delta.index} goes on after its end")
        expected = self._offsets.get(delta.index, len(self.spec.resume_from.ids))
        # Without ids a delta does not tell how many tokens it covers: then offsets can only be seen to grow.
        has_ids = not self.spec.output.HasField("token_ids") or self.spec.output.token_ids
        if delta.offset < expected or (has_ids and delta.offset > expected):
            raise self._violation(f"sequence {delta.index} goes on at token {delta.offset}, not at {expected}")
        self._offsets[delta.index] = delta.offset + len(delta.token_ids)
        if delta.finish is not None:
            self.finishes[delta.index] = delta.finish
        return delta

    def _violation(self, what: str) -> ProtocolError:
        return ProtocolError(what, self.request_id)
