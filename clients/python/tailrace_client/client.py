"""Client: requests from a program without an event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc

from protos.tailrace.v1 import generation_pb2 as pb
from protos.tailrace.v1 import generation_pb2_grpc
from tailrace_client.channel import merge_options
from tailrace_client.errors import make_error
from tailrace_client.events import to_completion
from tailrace_client.spec import make_spec
from tailrace_client.stream_state import StreamState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import Self, TypeVar, Unpack

    from tailrace_client.events import Completion, Delta, Progress
    from tailrace_client.spec import Options, Prompt

    T = TypeVar("T")


class Client:
    """One channel to a server at "host:port" or "unix:path"; threads may share it.

    `channel_options` are gRPC's, by name.
    """

    def __init__(self, address: str, *, channel_options: Mapping[str, Any] | None = None) -> None:
        self.address = address
        self._channel = grpc.insecure_channel(address, options=merge_options(channel_options))
        self._stub: Any = generation_pb2_grpc.GenerationServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancels what runs and closes the connection. Idempotent."""
        self._channel.close()

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
        return Stream(self._stub.GenerateStream, make_spec(prompt, options), timeout, on_progress)

    def complete(self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[Options]) -> Completion:
        """The whole answer at once."""
        spec = make_spec(prompt, options)
        request = pb.GenerateRequest(spec=spec)
        response: pb.GenerateResponse = _call(lambda: self._stub.Generate(request, timeout=timeout), spec.request_id)
        return to_completion(response, spec.request_id)

    def cancel(self, *request_ids: str, timeout: float | None = None) -> list[str]:
        """Ends requests, whoever made them, with what they have so far; returns those that were live."""
        request = pb.CancelRequest(request_ids=request_ids)
        response: pb.CancelResponse = _call(lambda: self._stub.Cancel(request, timeout=timeout))
        return list(response.cancelled_request_ids)


class Stream(StreamState):
    """One request's deltas. Use it with `with`; nothing is sent before."""

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

    def __enter__(self) -> Self:
        self._call = self._method(pb.GenerateStreamRequest(spec=self.spec), timeout=self._timeout)
        return self

    def __exit__(self, *_: object) -> None:
        self._call.cancel()

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        """The next delta. Raises TailraceError if the request fails."""
        if self._call is None:
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
        """Takes in a message; after the last one also the call's status."""
        response = _call(lambda: next(self._call, None), self.request_id)
        if response is None:
            self._accept_end()
            return
        self._accept(response)
        if self.summary is not None and _call(lambda: next(self._call, None), self.request_id) is not None:
            raise self._violation("something came after the summary")


def _call(function: Callable[[], T], request_id: str = "") -> T:
    """Waits for an answer; errors of gRPC become ours."""
    try:
        return function()
    except grpc.RpcError as error:
        # What is raised is the call itself.
        call: Any = error
        raise make_error(call.code(), call.details(), call.trailing_metadata(), request_id) from None
