"""Options of `tailrace top`, apart from what it needs to run."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from async_engine.connect_options import ConnectOptions


class TopOptions(ConnectOptions, frozen=True, kw_only=True):
    """What to show, and how often."""

    address: Annotated[
        str, Meta(description="HOST:PORT or unix:PATH of the operators' service: the server's --admin-listen")
    ] = "127.0.0.1:50052"
    interval: Annotated[float, Meta(ge=0.1, le=3600, description="seconds between two looks")] = 1.0
    once: Annotated[bool, Meta(description="print it once, and end")] = False
