"""What both clients do alike with their channels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from tailrace_client.errors import TailraceError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

# Log-probabilities of a long answer pass gRPC's own 4 MiB; the server's default is this, too.
_DEFAULTS: dict[str, Any] = {
    "grpc.max_receive_message_length": 64 << 20,
    # A server that is back is found soon. Meanwhile gRPC fails calls at once; how often to try is the policy's.
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.max_reconnect_backoff_ms": 1000,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """TLS, with files in PEM that are read when a client is made. `Tls()` trusts the authorities gRPC comes with."""

    ca: str | Path | None = None
    """The authorities whose certificates a server may have, instead."""
    cert: str | Path | None = None
    """The client's own certificate chain, where servers ask for one."""
    key: str | Path | None = None
    """Its private key."""

    def __post_init__(self) -> None:
        if (self.cert is None) is not (self.key is None):
            raise ValueError("a certificate goes with its key")

    def credentials(self) -> grpc.ChannelCredentials:
        """Raises OSError if a file cannot be read."""
        ca, cert, key = (path and Path(path).read_bytes() for path in (self.ca, self.cert, self.key))
        return grpc.ssl_channel_credentials(ca or None, key or None, cert or None)


def open_channel(library: Any, address: str, tls: Tls | None, channel_options: Mapping[str, Any] | None) -> Any:
    """A channel of `library`, grpc or grpc.aio, with the caller's options over the defaults."""
    options = merge_options(channel_options)
    if tls is None:
        return library.insecure_channel(address, options=options)
    return library.secure_channel(address, tls.credentials(), options=options)


def merge_options(channel_options: Mapping[str, Any] | None) -> list[tuple[str, Any]]:
    """The caller's options over the defaults, as gRPC takes them."""
    return list({**_DEFAULTS, **(channel_options or {})}.items())


def authorization(token: str | Callable[[], str] | None) -> tuple[tuple[str, str], ...]:
    """The metadata of a call that carries a bearer token.

    Not gRPC's call credentials: those refuse to send a token where there is no TLS, as behind a proxy that adds it.
    """
    if token is None:
        return ()
    return (("authorization", f"Bearer {token() if callable(token) else token}"),)


def merge_cancelled(answers: Sequence[list[str] | TailraceError]) -> list[str]:
    """The ids that any server cancelled. One that is not there has no live requests, unless that is all of them."""
    errors = [answer for answer in answers if isinstance(answer, TailraceError)]
    for error in errors:
        if not isinstance(error, UnavailableError) or len(errors) == len(answers):
            raise error
    return [request_id for answer in answers if isinstance(answer, list) for request_id in answer]
