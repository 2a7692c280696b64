"""Errors of ours as google.rpc.Status: the code, a stable reason, and the details a client can act on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
from google.rpc import error_details_pb2, status_pb2

from protos.errors import AdapterError, InvalidRequestError, OverloadedError, TailraceError, UnavailableError

if TYPE_CHECKING:
    from google.protobuf.message import Message

DOMAIN = "tailrace"
MAX_TEXT = 512
"""Bytes of a message, and of a field's description: they travel in headers, whose size peers limit."""
RESTART_SECONDS = 1.0
"""After which a client may try a server that is going away, or another one, again."""


def to_status(error: TailraceError, request_id: str = "") -> status_pb2.Status:
    """ErrorInfo always; BadRequest with the field, RetryInfo and RequestInfo where they apply."""
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)]
    if isinstance(error, InvalidRequestError | AdapterError):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=_short(error.description)
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, OverloadedError | UnavailableError):
        retry = error_details_pb2.RetryInfo()
        seconds = error.retry_after if isinstance(error, OverloadedError) else RESTART_SECONDS
        retry.retry_delay.FromMilliseconds(int(seconds * 1000))
        details.append(retry)
    if request_id:
        details.append(error_details_pb2.RequestInfo(request_id=request_id))
    status = status_pb2.Status(code=grpc.StatusCode[error.status].value[0], message=_short(str(error)))
    for detail in details:
        status.details.add().Pack(detail)
    return status


def _short(text: str) -> str:
    data = text.encode(errors="replace")
    return text if len(data) <= MAX_TEXT else data[:MAX_TEXT].decode(errors="ignore") + "..."
