"""Soak: random clients against a real server for minutes or hours; at the end everything must be back, and every
text must be what the same request gives alone.

    python -m tests.bench.soak [--seconds 120 | --hours 8] [--seed 0] [--clients 16] [--kill-cores 10]

A first quarter of the time warms the server up: what it holds then, idle, is what it must hold at the end. Streams
are audited while the soak runs, each by the same request on a second, quiet server. The last line is JSON; the exit
code is 1 if an audit failed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import grpc

import async_engine  # noqa: F401  first, so that grpc is imported as the server imports it
from protos.tailrace.v1 import generation_pb2 as pb
from protos.tailrace.v1 import generation_pb2_grpc
from tests.bench.soak_clients import KINDS, Record, Sequence, collect, random_spec
from tests.e2e.serving import ServerProcess

SETTLE_SECONDS = 30.0
MAX_WAITING_AUDITS = 200
KV_BLOCKS = "400"
"""Few, so that requests are preempted."""


def metric(address: str, name: str) -> float:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
        found = re.search(rf"^{name} (\S+)$", answer.read().decode(), re.MULTILINE)
    assert found, name
    return float(found[1])


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Target:
    """The server under load, and what its processes hold."""

    def __init__(self) -> None:
        self._metrics = f"127.0.0.1:{free_port()}"
        arguments = ("--listen", "127.0.0.1:0", "--metrics-listen", self._metrics, "--log-level", "error")
        limits = ("--num-kv-blocks", KV_BLOCKS, "--max-num-seqs", "24", "--null-step-ms", "1")
        keepalive = ("--keepalive-time", "1", "--keepalive-timeout", "5")
        self.process = ServerProcess("null", *arguments, *limits, *keepalive).wait_ready()
        self.address = self.process.address

    async def metric(self, name: str) -> float:
        return await asyncio.to_thread(metric, self._metrics, f"tailrace_{name}")

    async def settle(self) -> list[str]:
        """Waits until nothing is live; what is still there after long enough."""
        end = time.monotonic() + SETTLE_SECONDS
        left = ["?"]
        while left and time.monotonic() < end:
            names = ("live_requests", "running", "waiting", "steps_in_flight", "kv_usage")
            left = [f"{name}={value}" for name in names if (value := await self.metric(name))]
            await asyncio.sleep(0.1)
        return left

    def tree(self) -> list[int]:
        """The server, its core, and what that started."""
        pids = [self.process.process.pid]
        for pid in pids:
            for task in os.listdir(f"/proc/{pid}/task"):
                pids += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
        return pids

    def held(self) -> dict[str, int]:
        pids = self.tree()
        return {
            "processes": len(pids),
            "fds": sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids),
            "threads": sum(len(os.listdir(f"/proc/{pid}/task")) for pid in pids),
            "shared_memory": len(os.listdir("/dev/shm")),
            "rss": sum(_resident(pid) for pid in pids),
        }


def _resident(pid: int) -> int:
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found
    return int(found[1]) << 10


class Audit:
    """Repeats each request on a quiet server, one at a time, and compares."""

    def __init__(self) -> None:
        self.process = ServerProcess("null", "--listen", "127.0.0.1:0", "--log-level", "error").wait_ready()
        self.queue: asyncio.Queue[Record] = asyncio.Queue(MAX_WAITING_AUDITS)
        self.failures: list[str] = []
        self.num_streams = 0
        self.num_tokens = 0

    async def run(self) -> None:
        async with grpc.aio.insecure_channel(self.process.address) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            while True:
                record = await self.queue.get()
                try:
                    response = await stub.Generate(pb.GenerateRequest(spec=record.spec))
                    self._compare(record, collect(response.output))
                except Exception as error:
                    self.failures.append(f"{record.kind}: the quiet server failed: {error!r}"[:300])
                finally:
                    self.queue.task_done()

    def _compare(self, record: Record, alone: dict[int, Sequence]) -> None:
        for index, sequence in record.sequences.items():
            self.num_streams += 1
            self.num_tokens += len(sequence.token_ids)
            if problem := sequence.differs(alone.get(index, Sequence()), record):
                self.failures.append(f"{record.kind}[{index}]: {problem}: {record.spec}"[:1500])


async def soak(options: argparse.Namespace) -> dict[str, Any]:
    """The report; its `failures` are empty if all is well."""
    target, audit = Target(), Audit()
    counts: Counter[str] = Counter()
    try:
        auditing = asyncio.create_task(audit.run())
        start = time.monotonic()
        warm = [await _phase(target, audit, options, options.seconds / 4, 0, counts)]
        before = target.held()
        left = await _phase(target, audit, options, options.seconds * 3 / 4, 1, counts)
        after = target.held()
        auditing.cancel()
        await asyncio.wait([auditing])
        preemptions = await target.metric("preemptions_total")
    finally:
        codes = [process.stop() for process in (target.process, audit.process)]
    growth = after["rss"] / before["rss"] - 1
    failures = [*audit.failures, *(f"not over: {what}" for what in (*warm[0], *left))]
    failures += [f"{what}: {before[what]} before, {after[what]} after" for what in _grown(before, after)]
    failures += [f"a server ended with code {code}" for code in codes if code]
    if growth > options.max_growth:
        failures.append(f"memory grew by {growth:.1%}")
    return {
        "seconds": round(time.monotonic() - start, 1),
        "seed": options.seed,
        "requests": dict(sorted(counts.items())),
        "audited_streams": audit.num_streams,
        "audited_tokens": audit.num_tokens,
        "preemptions": int(preemptions),
        "memory_growth": round(growth, 4),
        "before": before,
        "after": after,
        "failures": failures[:20],
        "num_failures": len(failures),
    }


def _grown(before: dict[str, int], after: dict[str, int]) -> list[str]:
    """Pools of threads are still filling up at the end of a short soak; nothing else may grow at all."""
    slack = {"threads": 8}
    return [what for what in before if what != "rss" and after[what] > before[what] + slack.get(what, 0)]


async def _phase(
    target: Target, audit: Audit, options: argparse.Namespace, seconds: float, phase: int, counts: Counter[str]
) -> list[str]:
    """Clients for so long; then what is not over when all have left."""
    end = time.monotonic() + seconds
    killing = asyncio.create_task(_kill_cores(target, options.kill_cores, counts))
    async with asyncio.TaskGroup() as clients:
        for index in range(options.clients):
            rng = random.Random(f"{options.seed} {phase} {index}")
            clients.create_task(_client(target.address, rng, end, audit, counts))
    killing.cancel()
    await audit.queue.join()
    return await target.settle()


async def _kill_cores(target: Target, interval: float, counts: Counter[str]) -> None:
    """Takes the core away every so many seconds. No stream may show it."""
    while interval:
        await asyncio.sleep(interval)
        with contextlib.suppress(ValueError):  # there is none yet after the last time
            os.kill(target.process.core_pid, signal.SIGKILL)
            counts["core killed"] += 1


async def _client(address: str, rng: random.Random, end: float, audit: Audit, counts: Counter[str]) -> None:
    """One client after the other, on connections that last for a few requests."""
    while time.monotonic() < end:
        async with grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            for _ in range(rng.randrange(1, 12)):
                kind = rng.choice(sorted(KINDS))
                try:
                    records = await KINDS[kind](stub, rng, random_spec(rng))
                except grpc.aio.AioRpcError as error:
                    counts[f"{kind} {error.code().name.lower()}"] += 1
                    if error.code() not in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED):
                        audit.failures.append(f"{kind}: {error.code().name} {error.details()}")
                    continue
                counts[kind] += 1
                for record in records:
                    await audit.queue.put(record)
                if time.monotonic() > end:
                    return


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--hours", type=float, help="instead of --seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--kill-cores", type=float, default=0.0, help="seconds between two kills of the core; 0: none")
    parser.add_argument("--max-growth", type=float, default=0.02, help="of memory after the first quarter")
    options = parser.parse_args(argv)
    if options.hours:
        options.seconds = options.hours * 3600
    with contextlib.suppress(KeyboardInterrupt):
        report = asyncio.run(soak(options))
        sys.stdout.write(json.dumps(report) + "\n")
        return 1 if report["num_failures"] else 0
    return 130


if __name__ == "__main__":
    sys.exit(main())
