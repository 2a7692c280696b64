"""How the commands that are clients reach a server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from protos.errors import InvalidRequestError

if TYPE_CHECKING:
    from async_engine.connect_options import ConnectOptions

CHANNEL_OPTIONS = (("grpc.max_receive_message_length", 64 << 20),)


def open_channel(library: Any, options: ConnectOptions) -> Any:
    """A channel of `library`, grpc or grpc.aio.

    Raises InvalidRequestError for a file that cannot be read or options that make no sense.
    """
    scheme, is_url, _ = options.address.partition("://")
    if is_url and scheme != "unix":
        raise InvalidRequestError("address", f"must be HOST:PORT, without {scheme}://")
    if not options.tls_ca:
        for option in ("tls_cert", "tls_key"):
            if getattr(options, option):
                raise InvalidRequestError(option, "needs --tls-ca")
        return library.insecure_channel(options.address, options=CHANNEL_OPTIONS)
    ca, key, cert = (_read(options, option) for option in ("tls_ca", "tls_key", "tls_cert"))
    if (key is None) is not (cert is None):
        raise InvalidRequestError(
            "tls_key" if key is None else "tls_cert", "is required: a certificate goes with its key"
        )
    return library.secure_channel(options.address, grpc.ssl_channel_credentials(ca, key, cert), options=CHANNEL_OPTIONS)


def authorization(options: ConnectOptions) -> tuple[tuple[str, str], ...]:
    """The metadata of every call. Raises InvalidRequestError if the file cannot be read or has no token."""
    data = _read(options, "token_file")
    if data is None:
        return ()
    token = data.decode("ascii", "replace").strip()
    if not token or not all("!" <= character <= "~" for character in token):
        raise InvalidRequestError("token_file", f"{options.token_file}: not one token")
    return (("authorization", f"Bearer {token}"),)


def _read(options: ConnectOptions, option: str) -> Any:
    path = getattr(options, option)
    if not path:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidRequestError(option, f"{path}: {error.strerror}") from None
