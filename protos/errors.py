"""The error tree: what can go wrong for a caller, and how it is told over gRPC.

Each class carries its gRPC status by name (so that nothing here needs grpc), a stable
machine-readable reason, and whether the same request may succeed when sent again.
"""

from __future__ import annotations

from typing import ClassVar

MAX_TEXT = 1000


class TailraceError(Exception):
    """Base of everything we raise on purpose. `str(error)` is safe to show to the caller."""

    status: ClassVar[str] = "INTERNAL"
    reason: ClassVar[str] = "INTERNAL"


class InvalidRequestError(TailraceError):
    """The caller's input cannot be served as it is. `field` is its path in the request message."""

    status = "INVALID_ARGUMENT"
    reason = "INVALID_REQUEST"

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.description = message


class UnsupportedFeatureError(InvalidRequestError):
    """The field is part of the API, but this server does not offer it."""

    status = "UNIMPLEMENTED"
    reason = "UNSUPPORTED_FEATURE"


class UnauthenticatedError(TailraceError):
    """The call does not prove who makes it."""

    status = "UNAUTHENTICATED"
    reason = "UNAUTHENTICATED"


class ModelNotFoundError(TailraceError):
    """The request names a model this server does not serve."""

    status = "NOT_FOUND"
    reason = "MODEL_NOT_FOUND"


class DuplicateRequestError(TailraceError):
    """A live request already has this id."""

    status = "ALREADY_EXISTS"
    reason = "DUPLICATE_REQUEST_ID"


class BusyError(TailraceError):
    """What is asked for cannot be done while requests run."""

    status = "FAILED_PRECONDITION"
    reason = "BUSY"


class WrongStateError(TailraceError):
    """What is asked for is not possible as the server is, or as it was started."""

    status = "FAILED_PRECONDITION"
    reason = "WRONG_STATE"


class OverloadedError(TailraceError):
    """The server cannot take the request now. `retry_after` is in seconds."""

    status = "RESOURCE_EXHAUSTED"
    reason = "OVERLOADED"

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QueueTimeoutError(OverloadedError):
    """The request waited longer for admission than it allowed."""

    reason = "QUEUE_TIMEOUT"


class ShedError(OverloadedError):
    """The request could not have met its deadline, or would have waited longer than it allowed: it was refused
    before it cost anything."""

    reason = "SHED"


class DeadlineError(TailraceError):
    """The caller's deadline has passed, or can no longer be met."""

    status = "DEADLINE_EXCEEDED"
    reason = "DEADLINE"


class UnavailableError(TailraceError):
    """The server is draining; another replica can serve the request."""

    status = "UNAVAILABLE"
    reason = "DRAINING"


class LoadingError(UnavailableError):
    """The server listens, but cannot serve yet."""

    reason = "LOADING"


class CoreDiedError(UnavailableError):
    """The core process ended while the request was live."""

    reason = "CORE_DIED"


class RequestFailedError(TailraceError):
    """The engine failed this request; others go on."""

    reason = "REQUEST_FAILED"


class AdapterError(TailraceError):
    """An adapter's files cannot be served with this model. One line: which file, and what is wrong with it.

    What a damaged file said may be quoted in it: it is made printable, and short.
    """

    status = "INVALID_ARGUMENT"
    reason = "INVALID_ADAPTER"
    field: ClassVar[str] = "path"
    """Of the request that names the files."""

    def __init__(self, message: str) -> None:
        self.description = _shown(message)
        super().__init__(self.description)


class AdapterNotFoundError(InvalidRequestError):
    """There is no adapter of the name that `field` has, or not any more."""

    status = "NOT_FOUND"
    reason = "ADAPTER_NOT_FOUND"


class AdapterExistsError(TailraceError):
    """The name is taken: by an adapter with other weights, or by the model."""

    status = "ALREADY_EXISTS"
    reason = "ADAPTER_EXISTS"


class AdapterLeavingError(TailraceError):
    """The adapter of that name is being unloaded."""

    status = "FAILED_PRECONDITION"
    reason = "ADAPTER_LEAVING"


class AdapterLimitError(TailraceError):
    """As many adapters are loaded as may be."""

    status = "RESOURCE_EXHAUSTED"
    reason = "ADAPTER_LIMIT"


class StartupError(TailraceError):
    """The engine could not start. The text is one line: the root cause and, where known, the fix.

    What a damaged file said may be quoted in it: it is made printable, and short.
    """

    status = "UNAVAILABLE"
    reason = "STARTUP"

    def __init__(self, message: str) -> None:
        super().__init__(_shown(message))


def _shown(message: str) -> str:
    """A text that quotes files, as it may be printed."""
    if len(message) > MAX_TEXT:
        message = message[:MAX_TEXT] + "..."
    return "".join(character if character.isprintable() else "?" for character in message)
