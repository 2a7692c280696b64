"""Options of `tailrace bench`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from async_engine.connect_options import ConnectOptions


class ServeBenchOptions(ConnectOptions, frozen=True, kw_only=True):
    """Load and report."""

    num_requests: Annotated[int, Meta(ge=1, description="requests in all")] = 64
    concurrency: Annotated[
        int, Meta(ge=1, description="requests at once, each followed by the next; of no effect with --rate")
    ] = 16
    rate: Annotated[
        float,
        Meta(ge=0, description="requests per second, arriving at random however many still run; 0 has --concurrency"),
    ] = 0.0
    sweep: Annotated[
        tuple[float, ...],
        Meta(description="requests per second of one load after the other; instead of --rate"),
    ] = ()
    turns: Annotated[
        int,
        Meta(ge=1, description="requests of a conversation: each goes on behind the answer to the one before"),
    ] = 1
    prompt_tokens: Annotated[int, Meta(ge=1, description="tokens of each prompt, or that each turn adds")] = 128
    output_tokens: Annotated[int, Meta(ge=1, description="tokens of each output")] = 64
    shared_prefix_tokens: Annotated[int, Meta(ge=0, description="of the prompt, tokens that are the same for all")] = 0
    method: Annotated[Literal["stream", "attach"], Meta(description="one call per request, or all on one")] = "stream"
    text: Annotated[bool, Meta(description="ask for text beside the token ids")] = True
    vocab_size: Annotated[int, Meta(ge=1, description="prompts are drawn from token ids below this")] = 256
    seed: Annotated[int, Meta(ge=0, description="of prompts and arrivals")] = 0
    json: Annotated[bool, Meta(description="print one line of JSON per load instead of a table")] = False
    output: Annotated[str, Meta(description="file to write the reports to, as JSON")] = ""
    plot: Annotated[
        str, Meta(description="PNG file to draw latencies and throughput over the load to; needs matplotlib")
    ] = ""
    compare: Annotated[str, Meta(description="file that --output wrote: print the ratios to its figures")] = ""


class NullBenchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Measure and report."""

    streams: Annotated[int, Meta(ge=1, le=4096, description="requests at once on the front end")] = 256
    step_ms: Annotated[
        float, Meta(gt=0, description="milliseconds per step while CPU and latency of a token are taken")
    ] = 50.0
    device_ms: Annotated[
        float, Meta(gt=0, description="milliseconds per step while it is seen how busy steps in flight keep a device")
    ] = 5.0
    steps: Annotated[int, Meta(ge=1, le=8192, description="paced steps at a time")] = 20
    seconds: Annotated[float, Meta(gt=0, description="seconds per round as fast as it goes")] = 1.0
    core_tokens: Annotated[int, Meta(ge=1, description="tokens per round and batch size of the core alone")] = 65536
    rounds: Annotated[int, Meta(ge=1, description="of each figure the median over so many is reported")] = 3
    json: Annotated[bool, Meta(description="print one line of JSON instead of tables")] = False
