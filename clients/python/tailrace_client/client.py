"""Client: requests from a program without an event loop."""

from __future__ import annotations

import functools
import itertools
import time
from typing import TYPE_CHECKING, Any

import grpc

from protos.tailrace.v1 import generation_pb2 as pb
from protos.tailrace.v1 import generation_pb2_grpc, model_pb2, model_pb2_grpc
from tailrace_client.attempt import again
from tailrace_client.channel import authorization, merge_cancelled, open_channel
from tailrace_client.errors import TailraceError, closed_error, make_error
from tailrace_client.events import to_completion
from tailrace_client.resume import DEFAULT_POLICY, Route
from tailrace_client.spec import make_spec
from tailrace_client.stream_state import StreamState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import Self, TypeVar, Unpack

    from tailrace_client.attempt import Attempt
    from tailrace_client.channel import Tls
    from tailrace_client.events import Completion, Delta, Progress
    from tailrace_client.resume import ResumePolicy
    from tailrace_client.spec import ChatOptions, Options, Prompt

    T = TypeVar("T")


class Client:
    """Channels to one or several servers, each at "host:port" or "unix:path"; threads may share it.

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
        self._channels = [open_channel(grpc, address, tls, channel_options) for address in self.addresses]
        self._stubs: list[Any] = [generation_pb2_grpc.GenerationServiceStub(channel) for channel in self._channels]
        self._model_stubs: list[Any] = [model_pb2_grpc.ModelServiceStub(channel) for channel in self._channels]
        self._turn = itertools.cycle(range(len(self._stubs)))
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancels what runs and closes the connections. Idempotent."""
        self._is_closed = True
        for channel in self._channels:
            channel.close()

    def generate(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        on_progress: Callable[[Progress], None] | None = None,
        **options: Unpack[Options],
    ) -> Stream:
        """A stream of deltas, to be used with `with`: leaving the block cancels the request.

        `prompt` is text, token ids, or messages for the model's chat template. `timeout` is in seconds
        from the begin of the block; when it has passed, the request fails with DeadlineError.
        """
        return Stream(self._stub, self._metadata, make_spec(prompt, options), on_progress, self._route(), timeout)

    def complete(self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[Options]) -> Completion:
        """The whole answer at once."""
        spec = make_spec(prompt, options)
        route = self._route(timeout)
        began = time.monotonic()
        while True:
            time.sleep(route.wait())
            request = pb.GenerateRequest(spec=again(spec, None, time.monotonic() - began))
            try:
                method = self._stub(route.server).Generate
                response = _call(
                    functools.partial(method, request, timeout=route.time_left(), metadata=self._metadata()),
                    spec.request_id,
                )
                return to_completion(response, spec.request_id)
            except TailraceError as error:
                route.failed(error)

    def cancel(self, *request_ids: str, timeout: float | None = None) -> list[str]:
        """Ends requests, whoever made them, with what they have so far; returns those that were live."""
        request = pb.CancelRequest(request_ids=request_ids)
        calls = [
            self._stub(server).Cancel.future(request, timeout=timeout, metadata=self._metadata())
            for server in range(len(self._stubs))
        ]
        answers: list[list[str] | TailraceError] = []
        for call in calls:
            try:
                answers.append(list(_call(call.result).cancelled_request_ids))
            except TailraceError as error:
                answers.append(error)
        return merge_cancelled(answers)

    # What runs no model ----------------------------------------------------------------------

    def models(self, *, timeout: float | None = None) -> list[model_pb2.Model]:
        """The models served, the default first: names, limits, chat template, defaults."""
        response = self._ask("ListModels", model_pb2.ListModelsRequest(), timeout)
        return list(response.models)

    def tokenize(
        self,
        text: str,
        *,
        model: str = "",
        add_special_tokens: bool = True,
        timeout: float | None = None,
    ) -> list[int]:
        """The ids that a prompt of this text is; without those that frame a text if `add_special_tokens` is False."""
        request = model_pb2.TokenizeRequest(model=model, text=text, add_special_tokens=add_special_tokens)
        return list(self._ask("Tokenize", request, timeout).token_ids)

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str = "",
        skip_special_tokens: bool = True,
        timeout: float | None = None,
    ) -> str:
        """The text of ids. Bytes that are no UTF-8 are U+FFFD."""
        request = model_pb2.DetokenizeRequest(model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        text: str = self._ask("Detokenize", request, timeout).text
        return text

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        model: str = "",
        timeout: float | None = None,
        **options: Unpack[ChatOptions],
    ) -> tuple[str, list[int]]:
        """The prompt that a conversation is to the model, as text and as ids."""
        request = model_pb2.RenderChatRequest(model=model, chat=make_spec(messages, options).chat)
        response = self._ask("RenderChat", request, timeout)
        return response.text, list(response.token_ids)

    def _ask(self, method: str, request: Any, timeout: float | None) -> Any:
        """The answer to a call of ModelService, which may be sent again."""
        route = self._route(timeout)
        while True:
            time.sleep(route.wait())
            try:
                call = getattr(self._model_stub(route.server), method)
                return _call(functools.partial(call, request, timeout=route.time_left(), metadata=self._metadata()))
            except TailraceError as error:
                route.failed(error)

    # Inside -----------------------------------------------------------------------------------

    def _route(self, timeout: float | None = None) -> Route:
        return Route(self.resume, len(self._stubs), next(self._turn), timeout)

    def _stub(self, server: int) -> Any:
        if self._is_closed:
            raise closed_error()
        return self._stubs[server]

    def _model_stub(self, server: int) -> Any:
        self._stub(server)  # raises if we are closed
        return self._model_stubs[server]


class Stream(StreamState):
    """One request's deltas. Use it with `with`; nothing is sent before."""

    def __init__(
        self,
        stub: Callable[[int], Any],
        metadata: Callable[[], Any],
        spec: pb.GenerationSpec,
        on_progress: Callable[[Progress], None] | None,
        route: Route,
        timeout: float | None,
    ) -> None:
        super().__init__(spec, on_progress, route, timeout)
        self._stub = stub
        self._metadata = metadata

    def __enter__(self) -> Self:
        self._begin()
        self._send(self._attempts[0])
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        """The next delta. Raises TailraceError if the request fails."""
        if not self._has_begun:
            raise RuntimeError("a stream is used with `with`")
        while not self._pending:
            if self.summary is not None:
                raise StopIteration
            self._read()
        return self._pending.popleft()

    def text(self) -> str:
        """The text of the first sequence from here to its end."""
        return "".join([delta.text for delta in self if delta.index == 0])

    def _read(self) -> None:
        """Takes in a message, or the call's end; what a server lost is sent again."""
        attempt = self._attempts[0]
        try:
            if attempt.call is None:
                time.sleep(attempt.route.wait())
                self._send(attempt)
            response = _call(functools.partial(next, attempt.call, None), self.request_id)
        except TailraceError as error:
            self._lost(error)
            return
        if response is None:
            self._accept_end()
        else:
            self._accept(response)

    def _send(self, attempt: Attempt) -> None:
        route = attempt.route
        if self._has_ended:
            raise closed_error(self.request_id)
        request = pb.GenerateStreamRequest(spec=attempt.spec)
        method = self._stub(route.server).GenerateStream
        attempt.call = method(request, timeout=route.time_left(), metadata=self._metadata())


def _call(function: Callable[[], T], request_id: str = "") -> T:
    """Waits for an answer; errors of gRPC become ours."""
    try:
        return function()
    except grpc.RpcError as error:
        # What is raised is the call itself.
        call: Any = error
        raise make_error(call.code(), call.details(), call.trailing_metadata(), request_id) from None
