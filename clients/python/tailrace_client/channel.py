"""Options of the channel, the same for every client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

# Log-probabilities of a long answer pass gRPC's own 4 MiB; the server's default is this, too.
_DEFAULTS: dict[str, Any] = {"grpc.max_receive_message_length": 64 << 20}


def merge_options(channel_options: Mapping[str, Any] | None) -> list[tuple[str, Any]]:
    """The caller's options over the defaults, as gRPC takes them."""
    return list({**_DEFAULTS, **(channel_options or {})}.items())
