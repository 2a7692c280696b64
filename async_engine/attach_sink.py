"""AttachSink: one request's output on its way into the frames of an Attach call."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from async_engine import from_proto, to_proto
from async_engine.error_status import to_status
from async_engine.outputs import Extra, SequenceFinish, Started
from async_engine.sequence_buffer import MAX_CELLS, SequenceBuffer

if TYPE_CHECKING:
    from collections.abc import Callable

    from async_engine.frames import Columns, Frames
    from async_engine.logprobs import Logprobs
    from async_engine.outputs import Delta, Summary
    from async_engine.request_state import RequestState
    from protos.errors import TailraceError
    from protos.tailrace.v1 import generation_pb2 as pb


EVENT_BYTES = 128
"""Of an event without what grows."""


class Piece(msgspec.Struct):
    """Output that waits for credit."""

    sequence: AttachSequence
    token_ids: list[int]
    text: str = ""
    extra: Extra | None = None
    finish: SequenceFinish | None = None

    def split(self, count: int) -> Piece:
        """Takes the first tokens out. Text may lag behind its tokens, never lead them."""
        head = Piece(self.sequence, self.token_ids[:count])
        self.token_ids = self.token_ids[count:]
        if self.extra is not None and self.extra.logprobs is not None:
            head.extra = Extra(self.extra.logprobs.split(count))
        return head


class AttachSink:
    """Gathers what is to be told of a request. Plain token ids go into columns at once."""

    state: RequestState

    def __init__(
        self,
        spec: pb.GenerationSpec,
        slot: int,
        num_sequences: int,
        columns: Columns,
        mark: Callable[[AttachSink], None],
    ) -> None:
        """`mark` is told when there is something for the next frame that is not in its `columns`."""
        self.columns = columns
        self.mark = partial(mark, self)
        self.slot = slot
        self.request_id = spec.request_id
        self.is_over = False
        self.is_plain = (
            from_proto.wants_token_ids(spec)
            and not from_proto.wants_text(spec)
            and not from_proto.wants_logprobs(spec)
            and from_proto.coalesce(spec) == 1
            and num_sequences == 1
        )
        self.credit: int | None = spec.output.initial_credit if spec.output.HasField("initial_credit") else None
        self.pieces: deque[Piece] = deque()
        offset = len(spec.resume_from.ids)
        self._sequences = [
            AttachSequence(self, SequenceBuffer(index, offset, self.mark, from_proto.coalesce(spec)))
            for index in range(num_sequences)
        ]
        self._answer: to_proto.Answer | None = None
        self._started: Started | None = None
        self._named_slot = False
        self._prompt_logprobs: list[tuple[int, Logprobs]] = []
        self._summary: Summary | None = None
        self._error: TailraceError | None = None

    def accepted(self, answer: to_proto.Answer) -> None:
        """What the request became, without which nothing of it can be told."""
        self._answer = answer
        self.mark()

    def add_credit(self, tokens: int) -> None:
        if self.credit is not None:
            self.credit += tokens
            self.mark()

    # OutputSink -------------------------------------------------------------------------------

    @property
    def num_merged(self) -> int:
        return sum(sequence.buffer.num_merged for sequence in self._sequences)

    def sequence(self, index: int) -> AttachSequence:
        return self._sequences[index]

    def started(self, cached_tokens: int) -> None:
        self._started = Started(cached_tokens)
        self.mark()

    def prompt_logprobs(self, offset: int, logprobs: Logprobs) -> None:
        self._prompt_logprobs.append((offset, logprobs))
        self.mark()

    def summary(self, summary: Summary) -> None:
        if self._started is None and not self._named_slot:
            self._started = Started(None)  # it ended in the queue
        self._summary = summary
        self.mark()

    def failed(self, error: TailraceError) -> None:
        self._error = error
        self.mark()

    # Into frames ------------------------------------------------------------------------------

    def spend_credit(self) -> None:
        """Lets go of as much as may be sent."""
        while self.pieces and self.credit is not None:
            piece = self.pieces[0]
            if len(piece.token_ids) <= self.credit:
                self.pieces.popleft()
            elif self.credit:
                piece = piece.split(self.credit)
            else:
                return
            self.credit -= len(piece.token_ids)
            piece.sequence.let_go(piece)

    def add_started(self, frames: Frames) -> None:
        """What a reader must know before the columns, be there a failure behind them or not."""
        if self._answer is None:
            return
        if self._started is not None:
            event = self._add_event(frames, EVENT_BYTES)
            event.started.CopyFrom(to_proto.from_started(self._started, self._answer))
            self._started = None
        for offset, logprobs in self._prompt_logprobs:
            told = 0
            while len(logprobs):
                part = logprobs.split(max(1, MAX_CELLS // (2 + 2 * logprobs.width)))
                event = self._add_event(frames, EVENT_BYTES + part.num_bytes)
                to_proto.fill_logprobs(event.started.prompt_logprobs, part, offset + told)
                told += len(part)
        self._prompt_logprobs.clear()

    def add_events(self, frames: Frames) -> None:
        """All the rest, behind the columns."""
        if self.is_over:
            return
        if self._error is not None:
            self._add_event(frames, EVENT_BYTES).status = to_status(self._error, self.request_id).SerializeToString()
            self.is_over = True
            return
        if self._answer is None:
            return
        while (delta := self._take_delta()) is not None:
            event = self._add_event(frames, EVENT_BYTES + delta.num_bytes)
            to_proto.fill_delta(event.delta, delta, self._answer)
        if self._summary is not None and not self.pieces:
            self._add_event(frames, EVENT_BYTES).summary.CopyFrom(to_proto.from_summary(self._summary))
            self.is_over = True

    def _take_delta(self) -> Delta | None:
        for sequence in self._sequences:
            delta = sequence.buffer.take()
            if delta is not None:
                return delta
        return None

    def _add_event(self, frames: Frames, num_bytes: int) -> pb.RequestEvent:
        """In the frame itself: an event that is put into one is copied, once per token."""
        frame = frames.with_room(num_bytes)
        if self._named_slot:
            return frame.events.add(request_id=self.request_id)
        self._named_slot = True
        return frame.events.add(request_id=self.request_id, slot=self.slot)


class AttachSequence:
    """One sequence of the request."""

    def __init__(self, sink: AttachSink, buffer: SequenceBuffer) -> None:
        self._sink = sink
        self.buffer = buffer

    # SequenceSink -----------------------------------------------------------------------------

    def tokens(self, token_ids: list[int], text: str, extra: Extra | None = None) -> None:
        sink = self._sink
        if sink.credit is not None:
            sink.pieces.append(Piece(self, token_ids, text, extra))
            sink.mark()
        elif sink.is_plain:
            self._add_columns(token_ids)
        else:
            self.buffer.tokens(token_ids, text, extra)

    def finish(self, finish: SequenceFinish) -> None:
        if self._sink.credit is not None:
            self._sink.pieces.append(Piece(self, [], finish=finish))
            self._sink.mark()
        else:
            self.buffer.finish(finish)

    def let_go(self, piece: Piece) -> None:
        """There was credit for it."""
        if piece.finish is not None:
            self.buffer.finish(piece.finish)
        elif self._sink.is_plain:
            self._add_columns(piece.token_ids)
        else:
            self.buffer.tokens(piece.token_ids, piece.text, piece.extra)

    def _add_columns(self, token_ids: list[int]) -> None:
        self._sink.columns.add(self._sink.slot, token_ids)
        self.buffer.skip(len(token_ids))
