"""`tailrace bench serve`: loads a running server and reports what its clients see.

Closed loop: so many conversations run at once, and each is followed by the next. Open loop: conversations
arrive at random, at a given rate, whether or not the server keeps up. One of a single turn is a request.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import grpc.aio
import msgspec
import uvloop
from tqdm import tqdm

from async_engine.bench.client import SENDERS, Record
from async_engine.bench.report import (
    check_plot,
    format_comparison,
    make_report,
    plot,
    read_reports,
    tell,
    write_reports,
)
from async_engine.bench.workload import make_conversations
from async_engine.connect import authorization, open_channel
from protos.errors import InvalidRequestError, UnavailableError

if TYPE_CHECKING:
    from async_engine.bench.client import AttachSender, StreamSender
    from async_engine.bench.options import ServeBenchOptions
    from async_engine.bench.report import Report
    from async_engine.bench.workload import Conversation

CONNECT_SECONDS = 5.0


def main(options: ServeBenchOptions) -> int:
    """Runs the loads and prints their reports; exit code 1 if a request failed, 130 if Ctrl-C cut a load short.

    Raises InvalidRequestError for options that make no sense, and what `measure` raises.
    """
    _check(options)
    earlier = read_reports(options.compare) if options.compare else []
    loads = [msgspec.structs.replace(options, rate=rate) for rate in options.sweep] or [options]
    reports: list[Report] = []
    for load in loads:
        reports.append(uvloop.run(measure(load)))
        tell(reports[-1], options.json)
        if reports[-1]["interrupted"]:
            break
    if options.output:
        write_reports(options.output, reports)
    if options.plot:
        plot(reports, options.plot)
    if earlier:
        sys.stdout.write("\n" + format_comparison(reports, earlier))
    if reports[-1]["interrupted"]:
        return 130
    return 1 if any(report["errors"] for report in reports) else 0


def _check(options: ServeBenchOptions) -> None:
    if options.shared_prefix_tokens > options.prompt_tokens:
        raise InvalidRequestError(
            "shared_prefix_tokens", f"must be at most --prompt-tokens, which is {options.prompt_tokens}"
        )
    if options.plot:
        check_plot(options.plot)
    if options.output and not Path(options.output).resolve().parent.is_dir():
        raise InvalidRequestError("output", f"{options.output}: there is no such folder")
    if not all(rate > 0 for rate in options.sweep):
        raise InvalidRequestError("sweep", "rates must be more than 0")


async def measure(options: ServeBenchOptions) -> Report:
    """The whole report; when cancelled, that of what is over by then. Raises UnavailableError if nothing serves,
    InvalidRequestError for a file that is of no use."""
    records: list[Record] = []
    interrupted = False
    metadata = authorization(options)
    async with open_channel(grpc.aio, options) as channel:
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await channel.channel_ready()
        except TimeoutError:
            raise UnavailableError(
                f"nothing serves gRPC on {options.address}{' with these certificates' * bool(options.tls_ca)}; "
                "start it, or name another"
            ) from None
        async with SENDERS[options.method](channel, metadata) as sender:
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


async def _run_load(options: ServeBenchOptions, sender: StreamSender | AttachSender, records: list[Record]) -> None:
    """Adds a record for each request that it sends."""
    conversations = make_conversations(options)
    # disable=None: no bar where stderr is no terminal.
    with tqdm(total=options.num_requests, desc="requests", leave=False, disable=None) as bar:

        async def run_one(conversation: Conversation) -> None:
            for spec in conversation.specs():
                record = Record(len(spec.token_ids.ids), keep_ids=options.turns > 1)
                records.append(record)
                await sender.run(spec, record)
                bar.update()
                if record.status != "OK":
                    break  # there is nothing to answer
                conversation.answered(record.token_ids or [])

        async def run_next() -> None:
            for conversation in conversations:
                await run_one(conversation)

        async with asyncio.TaskGroup() as tasks:
            if options.rate:
                chance = random.Random(options.seed)
                due = time.monotonic()
                for conversation in conversations:
                    tasks.create_task(run_one(conversation))
                    due += chance.expovariate(options.rate / options.turns)
                    await asyncio.sleep(due - time.monotonic())
            else:
                for _ in range(min(options.concurrency, options.num_requests)):
                    tasks.create_task(run_next())
