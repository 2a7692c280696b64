"""From a status and its details to an exception."""

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from tailrace_client import errors
from tailrace_client.errors import make_error
from tailrace_client.status import STATUS_DETAILS, Details, decode_details


def trailer(*details):
    status = status_pb2.Status(code=3, message="no")
    for detail in details:
        status.details.add().Pack(detail)
    return ((STATUS_DETAILS, status.SerializeToString()),)


def test_details_are_decoded():
    violations = [error_details_pb2.BadRequest.FieldViolation(field="sampling.top_p", description="no")]
    retry = error_details_pb2.RetryInfo()
    retry.retry_delay.FromMilliseconds(1250)
    metadata = trailer(
        error_details_pb2.ErrorInfo(reason="OVERLOADED", domain="tailrace", metadata={"a": "b"}),
        error_details_pb2.BadRequest(field_violations=violations),
        error_details_pb2.RequestInfo(request_id="r1", serving_data="x"),
        error_details_pb2.DebugInfo(detail="of a kind nobody reads"),
        retry,
    )
    assert decode_details([("other", "text"), *metadata]) == Details("OVERLOADED", "sampling.top_p", 1.25, "r1")


def test_a_status_without_details_has_none():
    assert decode_details(()) == Details()
    assert decode_details(trailer()) == Details()
    assert decode_details(trailer(error_details_pb2.BadRequest())) == Details()


@pytest.mark.parametrize("data", [b"\xff\xff", trailer(error_details_pb2.ErrorInfo(reason="A"))[0][1][:-1]])
def test_malformed_details_are_as_none(data):
    assert decode_details([(STATUS_DETAILS, data)]) == Details()


def test_malformed_detail_is_as_none():
    status = status_pb2.Status()
    status.details.add(type_url="type.googleapis.com/google.rpc.ErrorInfo", value=b"\xff")
    assert decode_details([(STATUS_DETAILS, status.SerializeToString())]) == Details()


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("INVALID_ARGUMENT", "InvalidRequestError"),
        ("UNIMPLEMENTED", "UnsupportedError"),
        ("NOT_FOUND", "NotFoundError"),
        ("ALREADY_EXISTS", "DuplicateRequestError"),
        ("RESOURCE_EXHAUSTED", "OverloadedError"),
        ("DEADLINE_EXCEEDED", "DeadlineError"),
        ("UNAVAILABLE", "UnavailableError"),
        ("CANCELLED", "RequestCancelledError"),
        ("UNAUTHENTICATED", "AuthenticationError"),
        ("PERMISSION_DENIED", "AuthenticationError"),
        ("INTERNAL", "ServerError"),
        ("UNKNOWN", "ServerError"),
    ],
)
def test_a_status_has_its_class(code, kind):
    error = make_error(grpc.StatusCode[code], "words", ())
    assert type(error) is getattr(errors, kind)
    assert isinstance(error, errors.TailraceError)
    assert (error.code, error.message, str(error)) == (grpc.StatusCode[code], "words", f"{code}: words")


def test_the_status_names_the_request_else_the_caller_does():
    named = trailer(error_details_pb2.RequestInfo(request_id="theirs"))
    assert make_error(grpc.StatusCode.INTERNAL, None, named, "ours").request_id == "theirs"
    assert make_error(grpc.StatusCode.INTERNAL, None, None, "ours").request_id == "ours"
