"""AsyncClient: requests from an event loop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from protos.tailrace.v1 import generation_pb2 as pb
from protos.tailrace.v1 import generation_pb2_grpc
from tailrace_client.channel import merge_options
from tailrace_client.errors import make_error
from tailrace_client.events import to_completion
from tailrace_client.spec import make_spec
from tailrace_client.stream_state import StreamState

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
    from typing import Self, TypeVar, Unpack

    from tailrace_client.events import Completion, Delta, Progress
    from tailrace_client.spec import Options, Prompt

    T = TypeVar("T")


class AsyncClient:
    """One channel to a server at "host:port" or "unix:path"; to be made and used in one event loop.

    `channel_options` are gRPC's, by name.
    """

    def __init__(self, address: str, *, channel_options: Mapping[str, Any] | None = None) -> None:
        self.address = address
        self._channel = grpc.aio.insecure_channel(address, options=merge_options(channel_options))
        self._stub: Any = generation_pb2_grpc.GenerationServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancels what runs and closes the connection. Idempotent."""
        await self._channel.close()

    def generate(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        on_progress: Callable[[Progress], None] | None = None,
        **options: Unpack[Options],
    ) -> AsyncStream:
        """A stream of deltas, to be used with `async with`: leaving the block cancels the request.

        `prompt` is text, token ids, or messages for the model's chat template. `timeout` is in seconds
        from the begin of the block; when it has passed, the request fails with DeadlineError.
        """
        return AsyncStream(self._stub.GenerateStream, make_spec(prompt, options), timeout, on_progress)

    # These timeouts are not only ours: the server hears of them and does not start what cannot end in time.

    async def complete(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,  # noqa: ASYNC109
        **options: Unpack[Options],
    ) -> Completion:
        """The whole answer at once. A cancelled task cancels the request."""
        spec = make_spec(prompt, options)
        call = self._stub.Generate(pb.GenerateRequest(spec=spec), timeout=timeout)
        response: pb.GenerateResponse = await _call(call, spec.request_id)
        return to_completion(response, spec.request_id)

    async def cancel(self, *request_ids: str, timeout: float | None = None) -> list[str]:  # noqa: ASYNC109
        """Ends requests, whoever made them, with what they have so far; returns those that were live."""
        call = self._stub.Cancel(pb.CancelRequest(request_ids=request_ids), timeout=timeout)
        response: pb.CancelResponse = await _call(call)
        return list(response.cancelled_request_ids)


class AsyncStream(StreamState):
    """One request's deltas. Use it with `async with`; nothing is sent before."""

    def __init__(
        self,
        method: Any,
        spec: pb.GenerationSpec,
        timeout: float | None,
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        super().__init__(spec, on_progress)
        self._method = method
        self._timeout = timeout
        self._call: Any = None

    async def __aenter__(self) -> Self:
        self._call = self._method(pb.GenerateStreamRequest(spec=self.spec), timeout=self._timeout)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._call.cancel()

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        """The next delta. Raises TailraceError if the request fails."""
        if self._call is None:
            raise RuntimeError("a stream is used with `async with`")
        while not self._pending:
            if self.summary is not None:
                raise StopAsyncIteration
            await self._read()
        return self._pending.popleft()

    async def text(self) -> str:
        """The text of the first sequence from here to its end."""
        return "".join([delta.text async for delta in self if delta.index == 0])

    async def _read(self) -> None:
        """Takes in a message; after the last one also the call's status."""
        response = await _call(self._call.read(), self.request_id)
        if response is grpc.aio.EOF:
            self._accept_end()
            return
        self._accept(response)
        if self.summary is not None and await _call(self._call.read(), self.request_id) is not grpc.aio.EOF:
            raise self._violation("something came after the summary")


async def _call(awaitable: Awaitable[T], request_id: str = "") -> T:
    """Waits for an answer; errors of gRPC become ours."""
    try:
        return await awaitable
    except grpc.aio.AioRpcError as error:
        raise make_error(error.code(), error.details(), error.trailing_metadata(), request_id) from None
    except asyncio.CancelledError:
        # grpc.aio raises this also where another task closed the client or left the stream's block.
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise make_error(grpc.StatusCode.CANCELLED, "the call was cancelled", (), request_id) from None
