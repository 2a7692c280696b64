"""What both clients do alike with their channels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tailrace_client.errors import TailraceError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# Log-probabilities of a long answer pass gRPC's own 4 MiB; the server's default is this, too.
_DEFAULTS: dict[str, Any] = {
    "grpc.max_receive_message_length": 64 << 20,
    # A server that is back is found soon. Meanwhile gRPC fails calls at once; how often to try is the policy's.
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.max_reconnect_backoff_ms": 1000,
}


def merge_options(channel_options: Mapping[str, Any] | None) -> list[tuple[str, Any]]:
    """The caller's options over the defaults, as gRPC takes them."""
    return list({**_DEFAULTS, **(channel_options or {})}.items())


def merge_cancelled(answers: Sequence[list[str] | TailraceError]) -> list[str]:
    """The ids that any server cancelled. One that is not there has no live requests, unless that is all of them."""
    errors = [answer for answer in answers if isinstance(answer, TailraceError)]
    for error in errors:
        if not isinstance(error, UnavailableError) or len(errors) == len(answers):
            raise error
    return [request_id for answer in answers if isinstance(answer, list) for request_id in answer]
