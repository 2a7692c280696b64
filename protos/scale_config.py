"""Options of several processes that serve as one: front ends of a server, and cores elsewhere."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

SECRET_HELP = "FILE with the secret of --core: at least 16 bytes, the same on both sides"


class ScaleOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Front ends, and cores elsewhere."""

    frontends: Annotated[
        int, Meta(ge=1, le=64, description="processes that take calls, all on the port of --listen and over all cores")
    ] = 1
    core: Annotated[
        tuple[str, ...],
        Meta(description="HOST:PORT of a core that runs already (`tailrace core`), to serve instead of starting one"),
    ] = ()
    secret_file: Annotated[str, Meta(description=SECRET_HELP)] = ""


class CoreServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The core's server."""

    listen: Annotated[
        str,
        Meta(
            description="HOST:PORT, :PORT for all interfaces, where front ends reach it; what they say is not encrypted"
        ),
    ] = "127.0.0.1:50052"
    secret_file: Annotated[
        str,
        Meta(description="FILE with the secret that front ends must know: at least 16 bytes, the same on both sides"),
    ] = ""
    hang_timeout: Annotated[
        float, Meta(gt=0, le=1e6, description="seconds the core may be silent before it is replaced")
    ] = 120.0
    max_core_restarts: Annotated[
        int, Meta(ge=0, le=1000, description="times in a row that a core which died is replaced")
    ] = 5
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Meta(description="the least that is logged")] = (
        "info"
    )
    log_format: Annotated[Literal["text", "json"], Meta(description="form of a line of the log")] = "text"
