"""AttachCall: many requests multiplexed on one bidirectional call, one frame per engine step.

What is written is whatever gathered since the last write: usually one step's output, more when the
client reads slowly. Requests that want plain token ids cost two list entries per token and no
message; all others are events of the frame.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from async_engine import convert
from async_engine.error_status import to_status
from async_engine.outputs import Delta, Started
from async_engine.unexpected import hide_error
from protos.errors import InvalidRequestError, TailraceError, UnavailableError
from protos.tailrace.v1 import generation_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from async_engine.async_llm import AsyncLLM
    from async_engine.outputs import SequenceFinish, Summary
    from async_engine.request_state import RequestState


class AttachCall:
    """One call: its live requests and the frame that gathers."""

    def __init__(self, llm: AsyncLLM, context: Any) -> None:
        self._llm = llm
        self._context = context
        self._sinks: dict[str, AttachSink] = {}
        self._num_slots = 0
        self._reading = True
        self._wakeup = asyncio.Event()
        self._dirty: dict[AttachSink, None] = {}
        self.slots: list[int] = []
        self.counts: list[int] = []
        self.token_ids: list[int] = []

    async def run(self, commands: AsyncIterator[pb.AttachRequest]) -> None:
        """Serves until the client has closed its side and every request is over. Aborts what is live on exit.

        Raises UnavailableError, after the last frame, when the server has drained.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                reader = tasks.create_task(self._read(commands, tasks))
                drain = tasks.create_task(self._watch_drain())
                await self._write()
                reader.cancel()
                drain.cancel()
        except BaseExceptionGroup as group:
            raise _first(group) from None
        finally:
            for sink in self._sinks.values():
                self._llm.release(sink.state)
        if self._llm.drained.is_set():
            raise UnavailableError("the server is going away")

    def mark(self, sink: AttachSink) -> None:
        """The sink has something for the next frame."""
        self._dirty[sink] = None
        self._wakeup.set()

    def wake(self) -> None:
        self._wakeup.set()

    async def _watch_drain(self) -> None:
        await self._llm.drained.wait()
        self._reading = False
        self._wakeup.set()

    # Commands ---------------------------------------------------------------------------------

    async def _read(self, commands: AsyncIterator[pb.AttachRequest], tasks: asyncio.TaskGroup) -> None:
        async for command in commands:
            match command.WhichOneof("command"):
                case "submit":
                    self._submit(command.submit, tasks)
                case "cancel":
                    self._llm.cancel(command.cancel)
                case "credit":
                    sink = self._sinks.get(command.credit.request_id)
                    if sink is not None:
                        sink.add_credit(command.credit.tokens)
        self._reading = False
        self._wakeup.set()

    def _submit(self, spec: pb.GenerationSpec, tasks: asyncio.TaskGroup) -> None:
        self._num_slots += 1
        sink = AttachSink(self, spec, self._num_slots)
        try:
            if not spec.request_id:
                raise InvalidRequestError("submit.request_id", "is required on Attach")
            convert.check_id(spec.request_id)
            sink.state = self._llm.register(spec.request_id, sink)
        except TailraceError as error:
            sink.failed(error)
            return
        self._sinks[spec.request_id] = sink
        tasks.create_task(self._start(spec, sink))

    async def _start(self, spec: pb.GenerationSpec, sink: AttachSink) -> None:
        try:
            request = convert.to_request(spec, self._context.time_remaining())
            accepted = await self._llm.submit(sink.state, request)
        except TailraceError as error:
            sink.failed(error)
        except Exception as error:  # one request's bug must not end the others
            sink.failed(hide_error(error))
        else:
            sink.accepted(convert.Answer(spec.request_id, spec, accepted), len(request.resume_token_ids))

    # Frames -----------------------------------------------------------------------------------

    async def _write(self) -> None:
        while self._reading or self._sinks or self._dirty:
            await self._wakeup.wait()
            self._wakeup.clear()
            frame = self._take_frame()
            if frame is not None:
                await self._context.write(frame)

    def _take_frame(self) -> pb.AttachResponse | None:
        dirty, self._dirty = self._dirty, {}
        frame = pb.AttachResponse()
        for sink in dirty:
            sink.take(frame)
            if sink.is_over:
                self._forget(sink)
        if not frame.events and not self.slots:
            return None
        if self.slots:
            counts = self.counts if len(self.token_ids) != len(self.slots) else None
            frame.tokens.CopyFrom(pb.StepTokens(slots=self.slots, counts=counts, token_ids=self.token_ids))
            self.slots, self.counts, self.token_ids = [], [], []
        return frame

    def _forget(self, sink: AttachSink) -> None:
        if self._sinks.get(sink.request_id) is sink:
            del self._sinks[sink.request_id]
            self._llm.release(sink.state)


class AttachSink:
    """One request's output on its way into frames."""

    state: RequestState

    def __init__(self, call: AttachCall, spec: pb.GenerationSpec, slot: int) -> None:
        self._call = call
        self._slot = slot
        self.request_id = spec.request_id
        self.is_over = False
        wants_text = spec.output.text if spec.output.HasField("text") else True
        self._is_plain = convert.wants_token_ids(spec) and not wants_text
        self._credit: int | None = spec.output.initial_credit if spec.output.HasField("initial_credit") else None
        self._answer: convert.Answer | None = None
        self._offset = 0
        self._started: Started | None = None
        self._named_slot = False
        self._token_ids: list[int] = []
        self._text: list[str] = []
        self._finish: SequenceFinish | None = None
        self._summary: Summary | None = None
        self._error: TailraceError | None = None

    def accepted(self, answer: convert.Answer, offset: int) -> None:
        """What the request became, without which nothing of it can be told."""
        self._answer = answer
        self._offset = offset
        self._call.mark(self)

    def add_credit(self, tokens: int) -> None:
        if self._credit is not None:
            self._credit += tokens
            self._call.mark(self)

    # OutputSink -------------------------------------------------------------------------------

    def started(self, cached_tokens: int) -> None:
        self._started = Started(cached_tokens)
        self._call.mark(self)

    def tokens(self, token_ids: list[int], text: str) -> None:
        if self._is_plain and self._credit is None:
            call = self._call
            call.slots.append(self._slot)
            call.counts.append(len(token_ids))
            call.token_ids += token_ids
            self._offset += len(token_ids)
            call.wake()
            return
        self._token_ids += token_ids
        if text:
            self._text.append(text)
        self._call.mark(self)

    def finish(self, finish: SequenceFinish) -> None:
        if self._started is None and not self._named_slot:
            self._started = Started(None)  # it ended in the queue
        self._finish = finish
        self._call.mark(self)

    def summary(self, summary: Summary) -> None:
        self._summary = summary
        self._call.mark(self)

    def failed(self, error: TailraceError) -> None:
        self._error = error
        self._call.mark(self)

    # Into a frame -----------------------------------------------------------------------------

    def take(self, frame: pb.AttachResponse) -> None:
        """Adds the events to send now. Plain token ids go to the call's columns instead, which a reader takes in
        after `started` and before all other events of the frame."""
        if self._answer is not None and self._error is None:
            if self._started is not None:
                self._add_event(frame).started.CopyFrom(convert.from_started(self._started, self._answer))
                self._started = None
            delta = self._take_delta()
            if delta is not None:
                convert.fill_delta(self._add_event(frame).delta, delta, self._answer)
            if self._summary is not None and not self._token_ids:
                self._add_event(frame).summary.CopyFrom(convert.from_summary(self._summary))
                self.is_over = True
        elif self._error is not None and not self.is_over:
            self._add_event(frame).status = to_status(self._error, self.request_id).SerializeToString()
            self.is_over = True

    def _take_delta(self) -> Delta | None:
        count = len(self._token_ids)
        if self._credit is not None:
            count = min(count, self._credit)
            self._credit -= count
        token_ids, self._token_ids = self._token_ids[:count], self._token_ids[count:]
        if self._is_plain and token_ids:
            self._call.slots.append(self._slot)
            self._call.counts.append(count)
            self._call.token_ids += token_ids
            self._offset += count
            token_ids = []
        text, finish = "", None
        if not self._token_ids:  # text may lag behind its tokens, never lead them
            text = "".join(self._text)
            self._text.clear()
            finish, self._finish = self._finish, None
        if not token_ids and not text and finish is None:
            return None
        delta = Delta(self._offset, token_ids, text, finish)
        self._offset += len(token_ids)
        return delta

    def _add_event(self, frame: pb.AttachResponse) -> pb.RequestEvent:
        """In the frame itself: an event that is put into one is copied, once per token."""
        if self._named_slot:
            return frame.events.add(request_id=self.request_id)
        self._named_slot = True
        return frame.events.add(request_id=self.request_id, slot=self._slot)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """One of the errors in a group: a call has one status."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
