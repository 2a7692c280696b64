"""What a call can fail with: one tree, a class per kind of gRPC status."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc

from tailrace_client.status import STATUS_DETAILS, Details, decode_details, decode_status

if TYPE_CHECKING:
    from collections.abc import Iterable


class TailraceError(Exception):
    """A call failed. What the server did not say is empty or None."""

    def __init__(self, code: grpc.StatusCode, message: str, details: Details | None = None) -> None:
        super().__init__(f"{code.name}: {message}")
        details = details or Details()
        self.code = code
        self.message = message
        self.reason = details.reason
        """Stable and machine-readable, such as "OVERLOADED"."""
        self.field = details.field
        """Path in the request of the field that is wrong, such as "sampling.top_p"."""
        self.retry_after = details.retry_after
        """Seconds after which the same request may succeed."""
        self.request_id = details.request_id


class InvalidRequestError(TailraceError):
    """The server cannot do what the request says; `field` names the place."""


class UnsupportedError(InvalidRequestError):
    """The server does not offer what the request asks for."""


class NotFoundError(TailraceError):
    """No such model."""


class DuplicateRequestError(TailraceError):
    """A live request has this id already."""


class OverloadedError(TailraceError):
    """The server cannot take the request now: after `retry_after`, or on another server, it may."""


class DeadlineError(TailraceError):
    """The call took longer than its timeout, or the server sees that it would."""


class UnavailableError(TailraceError):
    """The server cannot be reached, or is going away."""


class RequestCancelledError(TailraceError):
    """The call was cancelled: by the server, or because another task closed the client or left the block."""


class AuthenticationError(TailraceError):
    """The server does not let this caller do this."""


class ServerError(TailraceError):
    """The fault is the server's."""


class ProtocolError(ServerError):
    """The server broke the rules of the stream."""

    def __init__(self, message: str, request_id: str = "") -> None:
        super().__init__(grpc.StatusCode.INTERNAL, message, Details("PROTOCOL_VIOLATION", request_id=request_id))


_CLASSES = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequestError,
    grpc.StatusCode.FAILED_PRECONDITION: InvalidRequestError,
    grpc.StatusCode.UNIMPLEMENTED: UnsupportedError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.ALREADY_EXISTS: DuplicateRequestError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.CANCELLED: RequestCancelledError,
    grpc.StatusCode.UNAUTHENTICATED: AuthenticationError,
    grpc.StatusCode.PERMISSION_DENIED: AuthenticationError,
}


def make_error(
    code: grpc.StatusCode,
    message: str | None,
    trailing_metadata: Iterable[tuple[str, str | bytes]] | None,
    request_id: str = "",
) -> TailraceError:
    """The error a status describes. `request_id` is taken where the status does not name one."""
    details = decode_details(trailing_metadata or ())
    if not details.request_id:
        details = details._replace(request_id=request_id)
    return _CLASSES.get(code, ServerError)(code, message or "", details)


def status_error(status: bytes, request_id: str) -> TailraceError:
    """The error of a serialized google.rpc.Status."""
    code, message = decode_status(status)
    name = next((code_.name for code_ in grpc.StatusCode if code_.value[0] == code), "UNKNOWN")
    return make_error(grpc.StatusCode[name], message, ((STATUS_DETAILS, status),), request_id)


def explain_resumption(error: TailraceError, cause: TailraceError) -> TailraceError:
    """Says of an error that it came when the request was to go on after another one."""
    error.message = f"{error.message} (when resuming after {cause})"
    error.args = (f"{error.code.name}: {error.message}",)
    error.__cause__ = cause
    return error


def closed_error(request_id: str = "") -> TailraceError:
    """The caller itself ended what was to go on."""
    return make_error(grpc.StatusCode.CANCELLED, "the client or the stream was closed", (), request_id)
