"""The details of a google.rpc.Status, as they come in the trailer `grpc-status-details-bin`.

The few messages are declared here, in a pool of their own: so this library needs no package for
them, and does not clash with one that a program loads besides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

if TYPE_CHECKING:
    from collections.abc import Iterable

STATUS_DETAILS = "grpc-status-details-bin"

_Field = descriptor_pb2.FieldDescriptorProto
# Name, number and type of each field that is read; an upper-case type is a message of this list, [] a list of it.
_MESSAGES: dict[str, tuple[tuple[str, int, str], ...]] = {
    "Any": (("type_url", 1, "string"), ("value", 2, "bytes")),
    "Duration": (("seconds", 1, "int64"), ("nanos", 2, "int32")),
    "Status": (("code", 1, "int32"), ("message", 2, "string"), ("details", 3, "[]Any")),
    "ErrorInfo": (("reason", 1, "string"),),
    "FieldViolation": (("field", 1, "string"),),
    "BadRequest": (("field_violations", 1, "[]FieldViolation"),),
    "RetryInfo": (("retry_delay", 1, "Duration"),),
    "RequestInfo": (("request_id", 1, "string"),),
}
_SCALARS = {
    "string": _Field.TYPE_STRING,
    "bytes": _Field.TYPE_BYTES,
    "int64": _Field.TYPE_INT64,
    "int32": _Field.TYPE_INT32,
}


class Details(NamedTuple):
    """What a client can act on."""

    reason: str = ""
    field: str = ""
    retry_after: float | None = None
    request_id: str = ""


def _declare() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="tailrace_client/status.proto", package="status", syntax="proto3")
    for message_name, fields in _MESSAGES.items():
        message = file.message_type.add(name=message_name)
        for name, number, kind in fields:
            element = kind.removeprefix("[]")
            label = _Field.LABEL_OPTIONAL if kind == element else _Field.LABEL_REPEATED
            field = message.field.add(name=name, number=number, label=label)
            if element in _SCALARS:
                field.type = _SCALARS[element]
            else:
                field.type = _Field.TYPE_MESSAGE
                field.type_name = f".status.{element}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"status.{name}")) for name in _MESSAGES}


_CLASSES = _declare()


def decode_status(status: bytes) -> tuple[int, str]:
    """Code and message; UNKNOWN's where it is malformed."""
    try:
        decoded = _CLASSES["Status"].FromString(status)
    except DecodeError:
        return 2, "a malformed status"
    return decoded.code, decoded.message


def decode_details(trailing_metadata: Iterable[tuple[str, str | bytes]]) -> Details:
    """What the trailer says; nothing where there is none or it is malformed."""
    found: dict[str, Any] = {}
    for key, value in trailing_metadata:
        if key == STATUS_DETAILS and isinstance(value, bytes):
            try:
                for detail in _CLASSES["Status"].FromString(value).details:
                    name = detail.type_url.rpartition(".")[2]
                    if name in _CLASSES:
                        found[name] = _CLASSES[name].FromString(detail.value)
            except DecodeError:
                return Details()
    retry_after = None
    if "RetryInfo" in found:
        delay = found["RetryInfo"].retry_delay
        retry_after = delay.seconds + delay.nanos / 1e9
    violations = found["BadRequest"].field_violations if "BadRequest" in found else []
    return Details(
        reason=found["ErrorInfo"].reason if "ErrorInfo" in found else "",
        field=violations[0].field if violations else "",
        retry_after=retry_after,
        request_id=found["RequestInfo"].request_id if "RequestInfo" in found else "",
    )
