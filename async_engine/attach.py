"""AttachCall: many requests multiplexed on one bidirectional call, one frame per engine step.

What is written is whatever gathered since the last write: usually one step's output, more when the
client reads slowly. Requests that want plain token ids cost two list entries per token and no
message; all others are events of the frame.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from async_engine import from_proto, to_proto
from async_engine.attach_sink import AttachSink
from async_engine.auth import caller, principal
from async_engine.frames import Columns, Frames
from async_engine.unexpected import first_error, hide_error
from protos.errors import InvalidRequestError, TailraceError, UnavailableError
from protos.tailrace.v1 import generation_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from async_engine.async_llm import AsyncLLM


class AttachCall:
    """One call: its live requests and the frame that gathers."""

    def __init__(self, llm: AsyncLLM, context: Any) -> None:
        self._llm = llm
        self._context = context
        self._sinks: dict[str, AttachSink] = {}
        self._num_slots = 0
        self._reading = True
        self._wakeup = asyncio.Event()
        self._columns = Columns(self._wakeup)
        self._dirty: dict[AttachSink, None] = {}
        """Requests that have more to tell than plain ids, in order."""

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
            raise first_error(group) from None
        finally:
            for sink in self._sinks.values():
                self._llm.release(sink.state)
        if self._llm.drained.is_set():
            raise UnavailableError("the server is going away")

    def _mark(self, sink: AttachSink) -> None:
        self._dirty[sink] = None
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
                    await self._llm.cancel_anywhere(command.cancel, principal.get())
                case "credit":
                    sink = self._sinks.get(command.credit.request_id)
                    if sink is not None:
                        sink.add_credit(command.credit.tokens)
        self._reading = False
        self._wakeup.set()

    def _submit(self, spec: pb.GenerationSpec, tasks: asyncio.TaskGroup) -> None:
        self._num_slots += 1
        try:
            if not spec.request_id:
                raise InvalidRequestError("request_id", "is required on Attach")
            from_proto.check_id(spec.request_id)
            num_sequences = from_proto.num_sequences(spec)
            sink = AttachSink(spec, self._num_slots, num_sequences, self._columns, self._mark)
            who = caller(self._context, spec.scheduling.session_id)
            sink.state = self._llm.register(spec.request_id, sink, num_sequences, who)
        except TailraceError as error:
            # Told under its id as far as that goes: one of megabytes would break the call.
            told = pb.GenerationSpec(request_id=spec.request_id[: from_proto.MAX_ID_LENGTH])
            AttachSink(told, self._num_slots, 0, self._columns, self._mark).failed(error)
            return
        self._sinks[spec.request_id] = sink
        tasks.create_task(self._start(spec, sink))

    async def _start(self, spec: pb.GenerationSpec, sink: AttachSink) -> None:
        try:
            limit = self._llm.ready.max_model_len
            request = from_proto.to_request(spec, sink.state.caller, self._context.time_remaining(), limit)
            accepted = await self._llm.submit(sink.state, request)
        except TailraceError as error:
            sink.failed(error)
        except Exception as error:  # one request's bug must not end the others
            sink.failed(hide_error(error))
        else:
            sink.accepted(to_proto.Answer(spec.request_id, spec, accepted, on_attach=True))

    # Frames -----------------------------------------------------------------------------------

    async def _write(self) -> None:
        while self._reading or self._sinks or self._dirty:
            await self._wakeup.wait()
            self._wakeup.clear()
            for frame in self._take_frames():
                await self._context.write(frame)

    def _take_frames(self) -> list[pb.AttachResponse]:
        """What gathered: usually one frame. A reader takes in its `started` events, then its columns, then the rest."""
        dirty, self._dirty = self._dirty, {}
        frames = Frames()
        for sink in dirty:
            sink.spend_credit()
            sink.add_started(frames)
        if self._columns.slots:
            frames.add_columns(self._columns)
        for sink in dirty:
            sink.add_events(frames)
            if sink.is_over:
                self._forget(sink)
        return frames.full()

    def _forget(self, sink: AttachSink) -> None:
        if self._sinks.get(sink.request_id) is sink:
            del self._sinks[sink.request_id]
            self._llm.release(sink.state)
