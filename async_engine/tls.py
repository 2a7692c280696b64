"""TLS: the server's credentials, from files that may be replaced while it runs."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from async_engine.reloaded import Reloaded
from protos.errors import InvalidRequestError, StartupError

if TYPE_CHECKING:
    from protos.server_config import ServerOptions


def server_credentials(options: ServerOptions) -> grpc.ServerCredentials | None:
    """None without TLS. The files are looked at in each handshake; connections that are open keep what they have.

    Raises StartupError, or InvalidRequestError where an option is missing that goes with another.
    """
    cert, key, client_ca = options.tls_cert, options.tls_key, options.tls_client_ca
    if not cert and not key and not client_ca:
        return None
    for option, value in (("tls_cert", cert), ("tls_key", key)):
        if not value:
            raise InvalidRequestError(option, "is required for TLS")
    paths = [Path(path) for path in (cert, key, client_ca) if path]
    files = Reloaded(paths, lambda: _load(*paths))

    def fetch() -> Any:
        """None is no change, which the type stubs do not know."""
        return files.value if files.refresh() else None

    return grpc.dynamic_ssl_server_credentials(files.value, fetch, require_client_authentication=bool(client_ca))


def _load(cert: Path, key: Path, client_ca: Path | None = None) -> grpc.ServerCertificateConfiguration:
    """Raises StartupError unless the key is the certificate's: gRPC would refuse every handshake without a word."""
    data = [_read(path) for path in (cert, key, client_ca) if path]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # An empty password, or OpenSSL asks for one at the terminal.
        context.load_cert_chain(cert, key, password="")
    except OSError as error:
        raise StartupError(f"{cert} and {key} are no certificate and its key in PEM: {_reason(error)}") from None
    if client_ca is not None:
        try:
            context.load_verify_locations(client_ca)
        except OSError as error:
            raise StartupError(f"{client_ca}: no certificates in PEM: {_reason(error)}") from None
    pair = [(data[1], data[0])]
    return grpc.ssl_server_certificate_configuration(pair, data[2] if client_ca is not None else None)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StartupError(f"{path}: {error.strerror}") from None


def _reason(error: OSError) -> str:
    """ssl.SSLError is an OSError."""
    reason = getattr(error, "reason", None) or error.strerror or str(error)
    return str(reason).lower().replace("_", " ")
