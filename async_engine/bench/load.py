"""The load of `tailrace bench null`: many streams that are measured from one moment to another.

    python -m async_engine.bench.load

reads jobs from standard input and answers each with a result, one line of JSON both.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
import uuid
from typing import TYPE_CHECKING

import grpc
import grpc.aio
import msgspec
import numpy as np
import uvloop

from async_engine.bench.client import SENDERS, Milestone, Record
from async_engine.bench.stamps import latencies
from async_engine.connect import open_channel
from async_engine.connect_options import ConnectOptions
from protos.child_process import die_with_parent
from protos.tailrace.v1 import generation_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterator

WARM_TOKENS = 8
"""Of each stream before it is measured: what a start costs is another question."""
JOB_SECONDS = 30.0


class Job(msgspec.Struct, frozen=True):
    """Measures until each stream has got `num_tokens` more, or for `seconds` if that is not 0."""

    address: str
    server_pid: int
    method: str
    num_streams: int
    num_tokens: int = 1 << 31
    seconds: float = 0.0
    text: bool = True
    logprobs: int | None = None
    """Log-probabilities asked for with each token."""
    stamps: str = ""
    """File of the server's stamps; empty measures no latency."""
    hold_pid: int = 0
    """Core process that stands still until all streams are open; 0 for none."""
    settle_seconds: float = 0.0
    """Waited between opening, running and measuring, for what cannot be waited for otherwise."""


class Result(msgspec.Struct, frozen=True):
    """Of the time measured."""

    num_tokens: int
    num_messages: int
    """That had tokens; on Attach counted once per request."""
    seconds: float
    server_cpu: float
    """Seconds."""
    load_cpu: float
    latency_ms: dict[str, float]


class _Mark:
    """A moment."""

    def __init__(self, job: Job, records: list[Record]) -> None:
        self.server_cpu = process_cpu_seconds(job.server_pid)
        self.load_cpu = time.process_time()
        self.time = time.monotonic()
        self.num_tokens = sum(record.num_tokens for record in records)
        self.num_messages = sum(len(record.receipts) for record in records)


def process_cpu_seconds(pid: int) -> float:
    """CPU time of all threads of a process: the clock that clock_getcpuclockid(3) names."""
    return time.clock_gettime((~pid << 3) | 2)


def make_spec(run_id: str, index: int, text: bool, logprobs: int | None) -> pb.GenerationSpec:
    """A short prompt of its own, and no end but the context's."""
    return pb.GenerationSpec(
        request_id=f"load-{run_id}-{index}",
        token_ids=pb.TokenIds(ids=[index // 256, index % 256]),
        sampling=pb.SamplingOptions(temperature=0),
        stop=pb.StopOptions(ignore_eos=True),
        output=pb.OutputOptions(text=text, logprobs=logprobs),
    )


@contextlib.contextmanager
def _stopped(pid: int) -> Iterator[None]:
    """Stops a process meanwhile, if there is one."""
    if pid:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        if pid:
            os.kill(pid, signal.SIGCONT)


async def run(job: Job) -> Result:
    records = [Record() for _ in range(job.num_streams)]
    run_id = uuid.uuid4().hex  # of the last job a request may still be on its way out
    async with (
        asyncio.timeout(JOB_SECONDS),
        open_channel(grpc.aio, ConnectOptions(address=job.address)) as channel,
        SENDERS[job.method](channel) as sender,
    ):
        streams = [
            asyncio.create_task(sender.run(make_spec(run_id, index, job.text, job.logprobs), record))
            for index, record in enumerate(records)
        ]
        try:
            with _stopped(job.hold_pid):
                await asyncio.gather(*(record.opened.wait() for record in records))
                await asyncio.sleep(job.settle_seconds)
            begin, end = await _watch(job, records, streams)
        finally:
            for stream in streams:
                stream.cancel()
            await asyncio.wait(streams)
    found = latencies(job.stamps, records, begin.time, end.time) if job.stamps else np.zeros(0)
    return Result(
        num_tokens=end.num_tokens - begin.num_tokens,
        num_messages=end.num_messages - begin.num_messages,
        seconds=end.time - begin.time,
        server_cpu=end.server_cpu - begin.server_cpu,
        load_cpu=end.load_cpu - begin.load_cpu,
        latency_ms={f"p{p}": float(np.percentile(found, p)) * 1e3 for p in (50, 99)} if len(found) else {},
    )


async def _watch(job: Job, records: list[Record], streams: list[asyncio.Task[None]]) -> tuple[_Mark, _Mark]:
    """The two moments. Raises RuntimeError if a stream ends before the second."""
    marks: list[_Mark] = []
    for num_tokens in (WARM_TOKENS, job.num_tokens):
        if not marks:
            await asyncio.sleep(job.settle_seconds)
        milestone = asyncio.create_task(Milestone(records, num_tokens).passed.wait())
        done, _ = await asyncio.wait(
            [milestone, *streams],
            timeout=job.seconds or None if marks else None,
            return_when=asyncio.FIRST_COMPLETED,
        )
        milestone.cancel()
        for stream in done - {milestone}:
            stream.result()
            ended = [f"{record.status} {record.message}" for record in records if record.status]
            raise RuntimeError(f"{len(ended)} streams ended early: {ended[0]}")
        marks.append(_Mark(job, records))
    return marks[0], marks[1]


def main() -> None:
    decode = msgspec.json.Decoder(Job).decode
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        for line in sys.stdin:
            result = runner.run(run(decode(line)))
            sys.stdout.write(msgspec.json.encode(result).decode() + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    die_with_parent()
    main()
