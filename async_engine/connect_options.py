"""How the commands that are clients are told where a server is, apart from what reaching it needs."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class ConnectOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The server to connect to."""

    address: Annotated[str, Meta(description="HOST:PORT of the server")] = "127.0.0.1:50051"
    tls_ca: Annotated[
        str, Meta(description="FILE with the authorities in PEM that the server has a certificate of; default: no TLS")
    ] = ""
    tls_cert: Annotated[str, Meta(description="FILE with our own certificate chain in PEM, if it wants one")] = ""
    tls_key: Annotated[str, Meta(description="FILE with the private key of that, in PEM")] = ""
    token_file: Annotated[str, Meta(description="FILE with our bearer token, if the server wants one")] = ""
