"""The one place where an exception of a handler becomes a gRPC status."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError

from async_engine.error_status import to_status
from async_engine.unexpected import hide_error
from protos.errors import InvalidRequestError, TailraceError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    Handler = grpc.RpcMethodHandler[Any, Any]

LIBRARY_METHODS = "/grpc."
"""Health, reflection and channelz keep their own handlers."""
KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
STATUS_DETAILS = "grpc-status-details-bin"


class HandlerInterceptor(grpc.aio.ServerInterceptor):
    """Stands around the handlers of all services but the library's own."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(LIBRARY_METHODS):
            return handler
        return self.wrap(handler, handler_call_details)

    @abstractmethod
    def wrap(self, handler: Handler, details: grpc.HandlerCallDetails) -> Handler:
        """What is called instead of the handler, for one call."""


class ErrorInterceptor(HandlerInterceptor):
    """Maps our errors to statuses with details, and hides all others behind an id that the log explains.

    Handlers must be coroutines (streams by `context.write`), not async generators: then this costs
    nothing per message.
    """

    def wrap(self, handler: Handler, details: grpc.HandlerCallDetails) -> Handler:
        # Requests are read and parsed inside the guard: grpc answers UNKNOWN, with our types, to what does not parse,
        # and nothing at all where no whole message comes.
        deserializer = handler.request_deserializer or bytes

        def around(kind: str, behavior: Any) -> Any:
            return _guard(behavior, deserializer, is_stream=kind.startswith("stream"))

        return with_behavior(handler, around, None, request_kind="stream")


def with_behavior(
    handler: Handler, around: Callable[[str, Any], Any], request_deserializer: Any, request_kind: str = ""
) -> Handler:
    """The handler with what `around(kind, behavior)` makes of its behavior; `kind` is such as "unary_stream".

    `request_kind` is how requests reach it from now on, "stream" or "unary"; empty is as before.
    """
    kind = next(kind for kind in KINDS if getattr(handler, kind) is not None)
    before, _, responses = kind.partition("_")
    make = getattr(grpc, f"{request_kind or before}_{responses}_rpc_method_handler")
    wrapped: Handler = make(
        around(kind, getattr(handler, kind)),
        request_deserializer=request_deserializer,
        response_serializer=handler.response_serializer,
    )
    return wrapped


def _parse(deserializer: Callable[[bytes], Any], data: bytes) -> Any:
    try:
        return deserializer(data)
    except DecodeError:
        raise InvalidRequestError("request", "the bytes are no message of this type") from None


async def _parse_each(deserializer: Callable[[bytes], Any], stream: AsyncIterator[bytes]) -> AsyncIterator[Any]:
    async for data in stream:
        yield _parse(deserializer, data)


def _guard(behavior: Any, deserializer: Callable[[bytes], Any], *, is_stream: bool) -> Any:
    async def guarded(stream: AsyncIterator[bytes], context: Any) -> Any:
        try:
            if is_stream:
                return await behavior(_parse_each(deserializer, stream), context)
            data = await context.read()
            if data is grpc.aio.EOF:
                raise InvalidRequestError("request", "no whole message came")
            return await behavior(_parse(deserializer, data), context)
        except TailraceError as error:
            await abort(context, error)
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            if context.cancelled() or context.done():
                raise  # the caller left: writing to it failed, and nobody hears what we say
            await abort(context, hide_error(error))

    return guarded


async def abort(context: Any, error: TailraceError) -> None:
    """Ends the call with the error's status and details."""
    status = to_status(error)
    details = (STATUS_DETAILS, status.SerializeToString())
    await context.abort(_code(status.code), status.message, trailing_metadata=(*context.trailing_metadata(), details))


def _code(number: int) -> grpc.StatusCode:
    return next(code for code in grpc.StatusCode if code.value[0] == number)
