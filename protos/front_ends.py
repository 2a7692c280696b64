"""Messages between the front ends of a server, over the one socket that each has to the first of them.

Either side asks and answers. Times are seconds.
"""

from __future__ import annotations

from typing import Any

import msgspec

from protos.config import ServeConfig
from protos.messages import ControlOp


class Begin(msgspec.Struct, frozen=True, tag="begin", array_like=True):
    """The first question to a new front end: to serve. Answered, with an error or none, when it does."""

    config: ServeConfig
    """What the first one serves, its address resolved."""
    cores: tuple[str, ...]
    """Where the cores are."""
    secret: bytes


class Cancel(msgspec.Struct, frozen=True, tag="cancel", array_like=True):
    """Ends a request, if it is the caller's or none is given. The answer: whether it was live."""

    request_id: str
    caller: str


class Pause(msgspec.Struct, frozen=True, tag="pause", array_like=True):
    """pause, freeze or resume."""

    op: ControlOp


class Drain(msgspec.Struct, frozen=True, tag="drain", array_like=True):
    """No new requests, and so long for those that are live. The answer: how many were cut."""

    seconds: float


class ListLive(msgspec.Struct, frozen=True, tag="list", array_like=True):
    """The answer: LiveRequests."""

    limit: int


class GetReport(msgspec.Struct, frozen=True, tag="report", array_like=True):
    """The answer: a Report."""


class Scrape(msgspec.Struct, frozen=True, tag="scrape", array_like=True):
    """The answer: list[Sample]."""


class LiveRequests(msgspec.Struct, frozen=True, array_like=True):
    """The oldest live requests, each a `tailrace.v1.LiveRequest`, and how many there are in all."""

    requests: list[bytes]
    total: int


class Report(msgspec.Struct, frozen=True, array_like=True):
    """How a front end does."""

    live_requests: int
    finished: dict[str, int]
    """By the name of the reason."""
    time_to_first_token: list[float]
    inter_token: list[float]
    end_to_end: list[float]


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """One number of a metric."""

    family: str
    name: str
    labels: dict[str, str]
    value: float


Question = Begin | Cancel | Pause | Drain | ListLive | GetReport | Scrape


class Ask(msgspec.Struct, frozen=True, tag="ask", array_like=True):
    number: int
    question: Question


class Answer(msgspec.Struct, frozen=True, tag="answer", array_like=True):
    """To the question of that number."""

    number: int
    answer: Any = None
    error: str = ""
    """Why there is none: one line."""


decoder = msgspec.msgpack.Decoder(Ask | Answer)
