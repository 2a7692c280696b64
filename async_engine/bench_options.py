"""Options of `tailrace bench`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from async_engine.flags import values
from protos.errors import InvalidRequestError

if TYPE_CHECKING:
    import argparse


class ServeBenchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Load and report."""

    address: Annotated[str, Meta(description="HOST:PORT of the server")] = "127.0.0.1:50051"
    num_requests: Annotated[int, Meta(ge=1, description="requests in all")] = 64
    concurrency: Annotated[int, Meta(ge=1, description="requests at once at most")] = 16
    rate: Annotated[
        float, Meta(ge=0, description="requests per second, arriving at random; 0 is as fast as allowed")
    ] = 0.0
    prompt_tokens: Annotated[int, Meta(ge=1, description="tokens of each prompt")] = 128
    output_tokens: Annotated[int, Meta(ge=1, description="tokens of each output")] = 64
    shared_prefix_tokens: Annotated[int, Meta(ge=0, description="of the prompt, tokens that are the same for all")] = 0
    method: Annotated[Literal["stream", "attach"], Meta(description="one call per request, or all on one")] = "stream"
    vocab_size: Annotated[int, Meta(ge=1, description="prompts are drawn from token ids below this")] = 256
    seed: Annotated[int, Meta(ge=0, description="of prompts and arrivals")] = 0
    json: Annotated[bool, Meta(description="print one line of JSON instead of a table")] = False


class NullBenchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Measure and report."""

    json: Annotated[bool, Meta(description="print one line of JSON instead of tables")] = False


OptionsT = TypeVar("OptionsT", ServeBenchOptions, NullBenchOptions)


def parse(kind: type[OptionsT], arguments: argparse.Namespace) -> OptionsT:
    """Validated options. Raises InvalidRequestError naming the flag."""
    try:
        return msgspec.convert(values(arguments, kind), kind)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at ")
        raise InvalidRequestError(path.strip("`$."), problem) from None
