"""`tailrace bench serve`: loads a running server and reports what its clients see.

Closed loop: so many requests run at once, and each is followed by the next. Open loop: requests
arrive at random, at a given rate, whether or not the server keeps up.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
import uuid
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import uvloop
from tqdm import tqdm

from async_engine.bench.client import SENDERS, Record, open_channel
from async_engine.bench.table import format_table
from protos.errors import InvalidRequestError, UnavailableError
from protos.tailrace.v1 import generation_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterator

    from async_engine.bench.client import AttachSender, StreamSender
    from async_engine.bench.options import ServeBenchOptions

CONNECT_SECONDS = 5.0
PERCENTILES = (50, 90, 99)
LATENCIES = {"ttft_ms": "time to first token", "inter_token_ms": "inter-token latency", "e2e_ms": "end to end"}


def main(options: ServeBenchOptions) -> int:
    """Runs the load and prints the report; exit code 1 if a request failed, 130 if Ctrl-C cut the load short.

    Raises InvalidRequestError for options that make no sense, and what `measure` raises.
    """
    if options.shared_prefix_tokens > options.prompt_tokens:
        raise InvalidRequestError(
            "shared_prefix_tokens", f"must be at most --prompt-tokens, which is {options.prompt_tokens}"
        )
    scheme, is_url, _ = options.address.partition("://")
    if is_url and scheme != "unix":
        raise InvalidRequestError("address", f"must be HOST:PORT, without {scheme}://")
    report = uvloop.run(measure(options))
    sys.stdout.write(msgspec.json.encode(report).decode() + "\n" if options.json else format_report(report))
    return 130 if report["interrupted"] else 1 if report["errors"] else 0


async def measure(options: ServeBenchOptions) -> dict[str, Any]:
    """The whole report; when cancelled, that of what is over by then. Raises UnavailableError if nothing serves."""
    records: list[Record] = []
    interrupted = False
    async with open_channel(options.address) as channel:
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await channel.channel_ready()
        except TimeoutError:
            raise UnavailableError(f"nothing serves gRPC on {options.address}; start it, or name another") from None
        async with SENDERS[options.method](channel) as sender:
            start = time.monotonic()
            try:
                await _run_load(options, sender, records)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                assert task is not None
                task.uncancel()
                interrupted = True
            seconds = time.monotonic() - start
            records = [record for record in records if record.status]
    return make_report(options, records, seconds) | {"interrupted": interrupted}


def make_specs(options: ServeBenchOptions) -> Iterator[pb.GenerationSpec]:
    """The requests: prompts of random ids behind a common prefix, outputs of exactly the length asked for."""
    chance = random.Random(options.seed)
    run_id = uuid.uuid4().hex

    def token_ids(count: int) -> list[int]:
        return [chance.randrange(options.vocab_size) for _ in range(count)]

    prefix = token_ids(options.shared_prefix_tokens)
    for index in range(options.num_requests):
        yield pb.GenerationSpec(
            request_id=f"bench-{run_id}-{index}",
            token_ids=pb.TokenIds(ids=prefix + token_ids(options.prompt_tokens - len(prefix))),
            stop=pb.StopOptions(max_tokens=options.output_tokens, ignore_eos=True),
            output=pb.OutputOptions(text=options.text),
        )


async def _run_load(options: ServeBenchOptions, sender: StreamSender | AttachSender, records: list[Record]) -> None:
    """Adds a record for each request that it sends."""
    specs = make_specs(options)
    # disable=None: no bar where stderr is no terminal.
    with tqdm(total=options.num_requests, desc="requests", leave=False, disable=None) as bar:

        async def run_one(spec: pb.GenerationSpec) -> None:
            record = Record()
            records.append(record)
            await sender.run(spec, record)
            bar.update()

        async def run_next() -> None:
            for spec in specs:
                await run_one(spec)

        async with asyncio.TaskGroup() as tasks:
            if options.rate:
                chance = random.Random(options.seed)
                due = time.monotonic()
                for spec in specs:
                    tasks.create_task(run_one(spec))
                    due += chance.expovariate(options.rate)
                    await asyncio.sleep(due - time.monotonic())
            else:
                for _ in range(min(options.concurrency, options.num_requests)):
                    tasks.create_task(run_next())


def make_report(options: ServeBenchOptions, records: list[Record], seconds: float) -> dict[str, Any]:
    completed = [record for record in records if record.status == "OK"]
    first_tokens = [record.receipts[0][0] - record.sent for record in completed if record.receipts]
    return {
        "requests": len(records),
        "completed": len(completed),
        "errors": dict(Counter(record.status for record in records if record.status != "OK")),
        "first_error": next((record.message for record in records if record.status != "OK"), ""),
        "seconds": round(seconds, 3),
        "requests_per_s": round(len(completed) / seconds, 3),
        "prompt_tokens_per_s": round(len(completed) * options.prompt_tokens / seconds, 1),
        "output_tokens_per_s": round(sum(record.num_tokens for record in completed) / seconds, 1),
        "ttft_ms": _distribution(first_tokens),
        "inter_token_ms": _distribution([gap for record in completed for gap in inter_token_gaps(record)]),
        "e2e_ms": _distribution([record.ended - record.sent for record in completed]),
        "options": msgspec.structs.asdict(options),
    }


def inter_token_gaps(record: Record) -> Iterator[float]:
    """Seconds per token after the first message. Tokens that come together share the wait for them."""
    for (before, _), (now, num_tokens) in zip(record.receipts, record.receipts[1:], strict=False):
        for _ in range(num_tokens):
            yield (now - before) / num_tokens


def _distribution(seconds: list[float]) -> dict[str, float]:
    """Milliseconds; empty where there is nothing to tell."""
    if not seconds:
        return {}
    values = np.array(seconds) * 1e3
    figures = {"mean": values.mean(), **{f"p{p}": np.percentile(values, p) for p in PERCENTILES}}
    return {name: round(float(figure), 3) for name, figure in figures.items()}


def format_report(report: dict[str, Any]) -> str:
    options = report["options"]
    load = f"{options['rate']:g} requests/s" if options["rate"] else f"{options['concurrency']} at once"
    errors = ", ".join(f"{count} {status}" for status, count in report["errors"].items())
    errors = f"{errors} ({report['first_error']})" if errors else "none"
    if not report["completed"]:
        return f"no request completed in {report['seconds']:.2f} s; errors: {errors}\n"
    names = ("mean", *(f"p{p}" for p in PERCENTILES))
    latencies = format_table(
        ["ms", *names],
        [[text, *(report[key].get(name, "-") for name in names)] for key, text in LATENCIES.items()],
    )
    return (
        f"{report['completed']} of {report['requests']} requests in {report['seconds']:.2f} s, {load}, "
        f"{options['prompt_tokens']} + {options['output_tokens']} tokens each, by {options['method']}; "
        f"errors: {errors}{'; interrupted' * report['interrupted']}\n"
        f"{report['requests_per_s']:.2f} requests/s, {report['prompt_tokens_per_s']:,.0f} prompt tokens/s in, "
        f"{report['output_tokens_per_s']:,.0f} tokens/s out\n\n{latencies}"
    )
