"""Multiplexer: many requests on one Attach call, each of which is read and cancelled as if it had a call of its own.

A request may not fill this process's memory while nobody reads it: the server sends so many tokens, and more as they
are read. So the requests do not hold each other up.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import deque
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from protos.tailrace.v1 import generation_pb2 as pb
from tailrace_client.attempt import MAX_ID
from tailrace_client.errors import ProtocolError, closed_error, make_error, status_error
from tailrace_client.spec import wants_token_ids

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tailrace_client.errors import TailraceError

CREDIT = 1024
"""Tokens of one request that may wait here to be read."""
MAX_SUBMIT_BYTES = 64 << 10
"""Of a request. One that the server's limit on messages refuses would end the call, and all others with it."""


def can_share(spec: pb.GenerationSpec) -> bool:
    """Whether Attach does all for a request that a call of its own does."""
    output = spec.output
    # Tokens that are not told cannot be counted, nor those that the server gathers behind its count.
    is_counted = wants_token_ids(spec) and not output.HasField("coalesce_tokens")
    is_small = len(spec.request_id) <= MAX_ID and spec.ByteSize() <= MAX_SUBMIT_BYTES
    return is_counted and is_small and not output.HasField("progress_interval")


class AttachedCall:
    """One request. Its messages are those of GenerateStream."""

    def __init__(self, multiplexer: Multiplexer, spec: pb.GenerationSpec) -> None:
        self.request_id = spec.request_id
        self.slot: int | None = None
        self._multiplexer = multiplexer
        self._offset = len(spec.resume_from.ids)
        self._unread: deque[pb.RequestEvent] = deque()
        self._num_read = 0
        """Tokens since credit was last given."""
        self._is_over = False
        self._error: TailraceError | None = None
        self._changed = asyncio.Event()

    async def read(self) -> Any:
        """The next message, or grpc.aio.EOF. Raises TailraceError if the request or the call failed."""
        while not self._unread:
            if self._error is not None:
                raise self._error
            if self._is_over:
                return grpc.aio.EOF
            self._changed.clear()
            await self._changed.wait()
        event = self._unread.popleft()
        self._num_read += sum(len(sequence.token_ids) for sequence in event.delta.sequences)
        if self._num_read >= CREDIT // 2 and not self._is_over:
            self._multiplexer.write(
                pb.AttachRequest(credit=pb.Credit(request_id=self.request_id, tokens=self._num_read))
            )
            self._num_read = 0
        return event

    def cancel(self) -> None:
        """Ends the request. Idempotent."""
        if not self._is_over:
            self._multiplexer.write(pb.AttachRequest(cancel=self.request_id))
            self._unread.clear()
            self.end(make_error(grpc.StatusCode.CANCELLED, "the call was cancelled", (), self.request_id))

    # What the multiplexer does ----------------------------------------------------------------

    def add(self, event: pb.RequestEvent) -> None:
        if self._is_over:
            return  # cancelled here, and not yet there
        for sequence in event.delta.sequences:
            if sequence.index == 0:
                self._offset = sequence.offset + len(sequence.token_ids)
        self._unread.append(event)
        self._changed.set()

    def add_tokens(self, token_ids: Sequence[int]) -> None:
        """Those of the columns come without an offset: none is left out."""
        sequence = pb.SequenceDelta(offset=self._offset, token_ids=token_ids)
        self.add(pb.RequestEvent(delta=pb.OutputDelta(sequences=[sequence])))

    def end(self, error: TailraceError | None = None) -> None:
        if not self._is_over:
            self._is_over, self._error = True, error
            self._changed.set()


class Multiplexer:
    """One Attach call, from its first request to its last: it ends when none is left, and is not used again.

    `run` is to be running.
    """

    def __init__(self, call: Any) -> None:
        self.is_over = False
        """Whether it takes no more requests."""
        self._call = call
        self._live: dict[str, AttachedCall] = {}
        """By id. One that was cancelled stays until the server has ended it."""
        self._by_slot: dict[int, AttachedCall] = {}
        self._commands: deque[pb.AttachRequest] = deque()
        self._wakeup = asyncio.Event()

    def takes(self, request_id: str) -> bool:
        """Whether a request of this id can be told from the others."""
        return not self.is_over and request_id not in self._live

    def submit(self, spec: pb.GenerationSpec) -> AttachedCall:
        command = pb.AttachRequest(submit=spec)
        command.submit.output.initial_credit = CREDIT
        call = self._live[spec.request_id] = AttachedCall(self, spec)
        self.write(command)
        return call

    def write(self, command: pb.AttachRequest) -> None:
        self._commands.append(command)
        self._wakeup.set()

    async def run(self) -> None:
        """Until the call is over. Being cancelled ends it, and what runs with an error."""
        fail = closed_error
        writer = asyncio.create_task(self._write())
        try:
            async for frame in self._call:
                self._take(frame)
            fail = functools.partial(make_error, grpc.StatusCode.UNAVAILABLE, "the server ended the call", ())
        except grpc.aio.AioRpcError as error:
            fail = functools.partial(make_error, error.code(), error.details(), error.trailing_metadata())
        except (LookupError, ValueError) as error:
            fail = functools.partial(ProtocolError, f"a frame that cannot be read: {error!r}")
        finally:
            self.is_over = True
            self._call.cancel()
            writer.cancel()
            for call in self._live.values():
                call.end(fail(call.request_id))
            await asyncio.wait([writer])

    # Inside -----------------------------------------------------------------------------------

    async def _write(self) -> None:
        # A call that broke refuses; the reader then ends all.
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while not self.is_over:
                await self._wakeup.wait()
                self._wakeup.clear()
                while self._commands:
                    await self._call.write(self._commands.popleft())
            await self._call.done_writing()

    def _take(self, frame: pb.AttachResponse) -> None:
        """Starts, then tokens, then the rest: the order they have within a frame."""
        events = [(event.WhichOneof("event"), event, self._live[event.request_id]) for event in frame.events]
        for kind, event, call in events:
            if event.HasField("slot"):
                call.slot = event.slot
                self._by_slot[event.slot] = call
            if kind == "started":
                event.started.effective.output.ClearField("initial_credit")
                call.add(event)
        tokens, at = frame.tokens, 0
        for slot, count in zip(tokens.slots, tokens.counts or [1] * len(tokens.slots), strict=True):
            self._by_slot[slot].add_tokens(tokens.token_ids[at : at + count])
            at += count
        for kind, event, call in events:
            match kind:
                case "delta":
                    call.add(event)
                case "summary":
                    call.add(event)
                    self._forget(call, None)
                case "status":
                    self._forget(call, status_error(event.status, call.request_id))

    def _forget(self, call: AttachedCall, error: TailraceError | None) -> None:
        call.end(error)
        del self._live[call.request_id]
        if call.slot is not None:
            del self._by_slot[call.slot]
        if not self._live:
            self.is_over = True
            self._wakeup.set()
