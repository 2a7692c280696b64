"""AsyncClient: requests from an event loop."""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from protos.tailrace.v1 import generation_pb2 as pb
from protos.tailrace.v1 import generation_pb2_grpc, model_pb2, model_pb2_grpc
from tailrace_client.attempt import again
from tailrace_client.channel import authorization, merge_cancelled, open_channel
from tailrace_client.errors import TailraceError, closed_error, make_error
from tailrace_client.events import to_completion
from tailrace_client.multiplexer import Multiplexer, can_share
from tailrace_client.resume import DEFAULT_POLICY, Route
from tailrace_client.spec import make_spec
from tailrace_client.stream_state import StreamState

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
    from typing import Self, TypeVar, Unpack

    from tailrace_client.attempt import Attempt
    from tailrace_client.channel import Tls
    from tailrace_client.events import Completion, Delta, Progress
    from tailrace_client.resume import ResumePolicy
    from tailrace_client.spec import ChatOptions, Options, Prompt

    T = TypeVar("T")


MANY = 8
"""Streams open at once, above which further ones share a call."""


class AsyncClient:
    """Channels to one or several servers, each at "host:port" or "unix:path"; to be made and used in one event loop.

    Requests go to the servers in turn. One that a server loses goes on with the next as `resume` says; None leaves
    it lost. `token` is sent with each call as a bearer token, and asked for each time if it is a function; it travels
    in the clear without `tls`. `channel_options` are gRPC's, by name.
    """

    def __init__(
        self,
        address: str,
        *more_addresses: str,
        resume: ResumePolicy | None = DEFAULT_POLICY,
        tls: Tls | None = None,
        token: str | Callable[[], str] | None = None,
        channel_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.addresses = (address, *more_addresses)
        self.resume = resume
        self._metadata = functools.partial(authorization, token)
        self._channels = [open_channel(grpc.aio, address, tls, channel_options) for address in self.addresses]
        self._stubs: list[Any] = [generation_pb2_grpc.GenerationServiceStub(channel) for channel in self._channels]
        self._model_stubs: list[Any] = [model_pb2_grpc.ModelServiceStub(channel) for channel in self._channels]
        self._turn = itertools.cycle(range(len(self._stubs)))
        self._multiplexers: dict[int, Multiplexer] = {}
        """By server, where many streams are open."""
        self._running: set[asyncio.Task[None]] = set()
        """What runs them."""
        self._streams: set[AsyncStream] = set()
        """Those whose blocks are entered."""
        self._is_closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancels what runs and closes the connections. Idempotent."""
        self._is_closed = True
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)
        for channel in self._channels:
            await channel.close()

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
        return AsyncStream(self, make_spec(prompt, options), on_progress, self._route(), timeout)

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
        route = self._route(timeout)
        began = time.monotonic()
        while True:
            await asyncio.sleep(route.wait())
            request = pb.GenerateRequest(spec=again(spec, None, time.monotonic() - began))
            try:
                method = self._stub(route.server).Generate
                call = method(request, timeout=route.time_left(), metadata=self._metadata())
                return to_completion(await _call(call, spec.request_id), spec.request_id)
            except TailraceError as error:
                route.failed(error)

    async def cancel(self, *request_ids: str, timeout: float | None = None) -> list[str]:  # noqa: ASYNC109
        """Ends requests, whoever made them, with what they have so far; returns those that were live."""
        request = pb.CancelRequest(request_ids=request_ids)

        async def ask(server: int) -> list[str] | TailraceError:
            try:
                response: pb.CancelResponse = await _call(
                    self._stub(server).Cancel(request, timeout=timeout, metadata=self._metadata())
                )
            except TailraceError as error:
                return error
            return list(response.cancelled_request_ids)

        return merge_cancelled(await asyncio.gather(*map(ask, range(len(self._stubs)))))

    # What runs no model ----------------------------------------------------------------------

    async def models(self, *, timeout: float | None = None) -> list[model_pb2.Model]:  # noqa: ASYNC109
        """The models served, the default first: names, limits, chat template, defaults."""
        response = await self._ask("ListModels", model_pb2.ListModelsRequest(), timeout)
        return list(response.models)

    async def tokenize(
        self,
        text: str,
        *,
        model: str = "",
        add_special_tokens: bool = True,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> list[int]:
        """The ids that a prompt of this text is; without those that frame a text if `add_special_tokens` is False."""
        request = model_pb2.TokenizeRequest(model=model, text=text, add_special_tokens=add_special_tokens)
        return list((await self._ask("Tokenize", request, timeout)).token_ids)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str = "",
        skip_special_tokens: bool = True,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> str:
        """The text of ids. Bytes that are no UTF-8 are U+FFFD."""
        request = model_pb2.DetokenizeRequest(model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        text: str = (await self._ask("Detokenize", request, timeout)).text
        return text

    async def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        model: str = "",
        timeout: float | None = None,  # noqa: ASYNC109
        **options: Unpack[ChatOptions],
    ) -> tuple[str, list[int]]:
        """The prompt that a conversation is to the model, as text and as ids."""
        request = model_pb2.RenderChatRequest(model=model, chat=make_spec(messages, options).chat)
        response = await self._ask("RenderChat", request, timeout)
        return response.text, list(response.token_ids)

    async def _ask(self, method: str, request: Any, timeout: float | None) -> Any:  # noqa: ASYNC109
        """The answer to a call of ModelService, which may be sent again."""
        route = self._route(timeout)
        while True:
            await asyncio.sleep(route.wait())
            try:
                call = getattr(self._model_stub(route.server), method)
                return await _call(call(request, timeout=route.time_left(), metadata=self._metadata()))
            except TailraceError as error:
                route.failed(error)

    # Inside -----------------------------------------------------------------------------------

    def _route(self, timeout: float | None = None) -> Route:
        return Route(self.resume, len(self._stubs), next(self._turn), timeout)

    def _open(self, spec: pb.GenerationSpec, route: Route) -> Any:
        """A call of GenerateStream; where many streams are open, a part of a call of Attach, which costs far less.

        That has no deadline for each, and outlives a connection's age: without `resume` it would take all with it.
        """
        stub = self._stub(route.server)
        is_shared = len(self._streams) > MANY and route.may_retry and route.time_left() is None and can_share(spec)
        if is_shared:
            multiplexer = self._multiplexers.get(route.server)
            if multiplexer is None or multiplexer.is_over:
                multiplexer = self._multiplexers[route.server] = Multiplexer(stub.Attach(metadata=self._metadata()))
                task = asyncio.create_task(multiplexer.run())
                self._running.add(task)
                task.add_done_callback(self._running.discard)
            if multiplexer.takes(spec.request_id):
                return multiplexer.submit(spec)
        request = pb.GenerateStreamRequest(spec=spec)
        return stub.GenerateStream(request, timeout=route.time_left(), metadata=self._metadata())

    def _stub(self, server: int) -> Any:
        if self._is_closed:
            raise closed_error()
        return self._stubs[server]

    def _model_stub(self, server: int) -> Any:
        self._stub(server)  # raises if we are closed
        return self._model_stubs[server]


class AsyncStream(StreamState):
    """One request's deltas. Use it with `async with`; nothing is sent before."""

    def __init__(
        self,
        client: AsyncClient,
        spec: pb.GenerationSpec,
        on_progress: Callable[[Progress], None] | None,
        route: Route,
        timeout: float | None,
    ) -> None:
        super().__init__(spec, on_progress, route, timeout)
        self._client = client

    async def __aenter__(self) -> Self:
        self._begin()
        self._client._streams.add(self)
        self._send(self._attempts[0])
        return self

    async def __aexit__(self, *_: object) -> None:
        self._client._streams.discard(self)
        self._end()

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        """The next delta. Raises TailraceError if the request fails."""
        if not self._has_begun:
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
        """Takes in a message, or the call's end; what a server lost is sent again."""
        attempt = self._attempts[0]
        try:
            if attempt.call is None:
                await asyncio.sleep(attempt.route.wait())
                self._send(attempt)
            response = await _call(attempt.call.read(), self.request_id)
        except TailraceError as error:
            self._lost(error)
            return
        if response is grpc.aio.EOF:
            self._accept_end()
        else:
            self._accept(response)

    def _send(self, attempt: Attempt) -> None:
        route = attempt.route
        if self._has_ended:
            raise closed_error(self.request_id)
        attempt.call = self._client._open(attempt.spec, route)


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
