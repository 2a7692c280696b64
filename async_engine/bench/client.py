"""Requests of a benchmark: what is sent, and a record of what came back when.

The stubs are used as they are: what a client library adds is not the server's.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from google.rpc import status_pb2

from protos.tailrace.v1 import generation_pb2 as pb
from protos.tailrace.v1 import generation_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType
    from typing import Self

    Metadata = tuple[tuple[str, str], ...]


class Record:
    """One request. Times are of the monotonic clock, in seconds."""

    __slots__ = (
        "ended",
        "goal",
        "message",
        "milestone",
        "num_tokens",
        "opened",
        "prompt_tokens",
        "receipts",
        "sent",
        "status",
        "token_ids",
    )

    def __init__(self, prompt_tokens: int = 0, keep_ids: bool = False) -> None:
        self.prompt_tokens = prompt_tokens
        self.token_ids: list[int] | None = [] if keep_ids else None
        """Of the output, where they are kept."""
        self.sent = 0.0
        self.opened = asyncio.Event()
        """The server has taken the request in (on Attach: it is sent), or has refused it."""
        self.ended = 0.0
        self.status = ""
        """Of gRPC, by name, once it is over."""
        self.message = ""
        """What the server said to it."""
        self.receipts: list[tuple[float, int]] = []
        """(time, new tokens) of each message that brought some."""
        self.num_tokens = 0
        self.goal = 0
        self.milestone: Milestone | None = None
        """Is told when the record has `goal` tokens."""

    def add(self, now: float, token_ids: Sequence[int]) -> None:
        num_tokens = len(token_ids)
        self.receipts.append((now, num_tokens))
        self.num_tokens += num_tokens
        if self.token_ids is not None:
            self.token_ids += token_ids
        if self.milestone is not None and self.num_tokens >= self.goal:
            self.milestone.reached()
            self.milestone = None

    def end(self, status: str, message: str | None = None) -> None:
        self.status = status
        self.message = message or ""
        self.ended = time.monotonic()
        self.opened.set()


class Milestone:
    """Is passed when each of some records has got so many tokens more."""

    def __init__(self, records: list[Record], num_tokens: int) -> None:
        self.passed = asyncio.Event()
        self._missing = len(records)
        for record in records:
            record.goal = record.num_tokens + num_tokens
            record.milestone = self

    def reached(self) -> None:
        self._missing -= 1
        if not self._missing:
            self.passed.set()


class StreamSender:
    """A GenerateStream call per request. `metadata` goes with each."""

    def __init__(self, channel: grpc.aio.Channel, metadata: Metadata = ()) -> None:
        self._stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
        self._metadata = metadata

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        return

    async def run(self, spec: pb.GenerationSpec, record: Record) -> None:
        """Until the request is over. Its failure is recorded, not raised; a cancelled task cancels it."""
        record.sent = time.monotonic()
        call = self._stub.GenerateStream(pb.GenerateStreamRequest(spec=spec), metadata=self._metadata)
        try:
            await call.initial_metadata()
            record.opened.set()
            async for response in call:
                for sequence in response.delta.sequences:
                    if sequence.token_ids:
                        record.add(time.monotonic(), sequence.token_ids)
        except grpc.aio.AioRpcError as error:
            record.end(error.code().name, error.details())
        else:
            record.end("OK")
        finally:
            call.cancel()


class AttachSender:
    """All requests on one Attach call, while the context is open. `metadata` goes with it."""

    def __init__(self, channel: grpc.aio.Channel, metadata: Metadata = ()) -> None:
        self._stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
        self._metadata = metadata
        self._live: dict[str, tuple[Record, asyncio.Event]] = {}
        self._by_slot: dict[int, Record] = {}
        self._over: tuple[str, str] | None = None
        """Status and message of the call, once it is over."""
        self._writing = asyncio.Lock()
        self._call: Any = None
        self._reader: asyncio.Task[None]

    async def __aenter__(self) -> Self:
        self._call = self._stub.Attach(metadata=self._metadata)
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._call.cancel()
        self._reader.cancel()
        await asyncio.wait([self._reader])

    async def run(self, spec: pb.GenerationSpec, record: Record) -> None:
        """Until the request is over. Its failure is recorded, not raised."""
        over = asyncio.Event()
        self._live[spec.request_id] = record, over
        record.sent = time.monotonic()
        async with self._writing:
            if self._over is None:
                # A call that broke meanwhile refuses; the reader then ends the record.
                with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    await self._call.write(pb.AttachRequest(submit=spec))
        if self._over is not None and not over.is_set():
            self._end(spec.request_id, *self._over)
        record.opened.set()
        await over.wait()

    async def _read(self) -> None:
        over = "UNKNOWN", "the server ended the call"
        try:
            async for frame in self._call:
                self._take(frame, time.monotonic())
        except grpc.aio.AioRpcError as error:
            over = error.code().name, error.details() or ""
        finally:
            # So is all that the call carried, and all that is still to be sent on it.
            self._over = over
            for request_id in list(self._live):
                self._end(request_id, *over)

    def _take(self, frame: pb.AttachResponse, now: float) -> None:
        for event in frame.events:
            if event.HasField("slot") and event.request_id in self._live:
                self._by_slot[event.slot] = self._live[event.request_id][0]
        slots, token_ids, start = frame.tokens.slots, frame.tokens.token_ids, 0
        for slot, count in zip(slots, frame.tokens.counts or [1] * len(slots), strict=True):
            self._by_slot[slot].add(now, token_ids[start : start + count])
            start += count
        for event in frame.events:
            match event.WhichOneof("event"):
                case "delta" if event.request_id in self._live:
                    for sequence in event.delta.sequences:
                        if sequence.token_ids:
                            self._live[event.request_id][0].add(now, sequence.token_ids)
                case "summary":
                    self._end(event.request_id, "OK")
                case "status":
                    status = status_pb2.Status.FromString(event.status)
                    self._end(event.request_id, _status_name(status.code), status.message)

    def _end(self, request_id: str, status: str, message: str = "") -> None:
        record, over = self._live.pop(request_id)
        record.end(status, message)
        over.set()


def _status_name(number: int) -> str:
    return next((code.name for code in grpc.StatusCode if code.value[0] == number), "UNKNOWN")


SENDERS: dict[str, type[StreamSender] | type[AttachSender]] = {"stream": StreamSender, "attach": AttachSender}
