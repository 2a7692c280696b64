"""Overload: a server under more and more load, up to three times what it can do; who is served in time, and who waits.

    python -m tests.bench.overload [--seconds 12] [--deadline 2] [--plot FILE.png] [--model ''] [--json]

Open loop: requests arrive at random moments at a given rate, each with a deadline, whether or not the server keeps
up. The peak is first found with a closed loop. Goodput counts the requests that were whole within their deadline.
`--patient` sends requests without deadlines instead, against a server with that `--queue-timeout`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np

import async_engine  # noqa: F401  first, so that grpc is imported as the server imports it
from protos.tailrace.v1 import generation_pb2 as pb
from protos.tailrace.v1 import generation_pb2_grpc
from tests.e2e.serving import ServerProcess

LOADS = (0.5, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0)
"""Of the peak."""
PROMPT_TOKENS = (20, 100)
OUTPUT_TOKENS = (8, 56)


@dataclass
class Sent:
    """One request as its client saw it, in seconds."""

    began: float
    ttft: float | None = None
    ended: float = 0.0
    status: str = "OK"


class Load:
    """Requests of random sizes to one server, over a few connections."""

    def __init__(self, address: str, deadline: float, patient: bool) -> None:
        apart = [("grpc.use_local_subchannel_pool", 1)]
        self._channels = [grpc.aio.insecure_channel(address, options=apart) for _ in range(4)]
        self._stubs = [generation_pb2_grpc.GenerationServiceStub(channel) for channel in self._channels]
        self._deadline, self._patient = deadline, patient
        self._chance = random.Random(0)

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()

    async def one(self, deadline: float | None) -> Sent:
        chance = self._chance
        spec = pb.GenerationSpec(
            token_ids=pb.TokenIds(ids=[chance.randrange(200) for _ in range(chance.randint(*PROMPT_TOKENS))]),
            stop=pb.StopOptions(max_tokens=chance.randint(*OUTPUT_TOKENS), ignore_eos=True),
            output=pb.OutputOptions(text=False),
        )
        sent = Sent(time.monotonic())
        call = chance.choice(self._stubs).GenerateStream(pb.GenerateStreamRequest(spec=spec), timeout=deadline)
        try:
            async for message in call:
                if message.WhichOneof("event") == "delta" and sent.ttft is None:
                    sent.ttft = time.monotonic() - sent.began
        except grpc.aio.AioRpcError as error:
            sent.status = error.code().name
        sent.ended = time.monotonic()
        return sent

    async def peak(self, seconds: float, at_once: int) -> float:
        """Requests a second with so many at once, each followed by the next."""
        until, done = time.monotonic() + seconds, 0

        async def worker() -> None:
            nonlocal done
            while time.monotonic() < until:
                await self.one(None)
                done += 1

        began = time.monotonic()
        await asyncio.gather(*[worker() for _ in range(at_once)])
        return done / (time.monotonic() - began)

    async def open_loop(self, rate: float, seconds: float) -> list[Sent]:
        tasks: list[asyncio.Task[Sent]] = []
        due = time.monotonic()
        end = due + seconds
        while due < end:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            tasks.append(asyncio.create_task(self.one(None if self._patient else self._deadline)))
            due += self._chance.expovariate(rate)
        return list(await asyncio.gather(*tasks))


def row(load: float, rate: float, sent: list[Sent], seconds: float, deadline: float) -> dict[str, Any]:
    """One line of the table. The first quarter of the time is not counted: the queue is filling."""
    began = sent[0].began + seconds / 4
    counted = [each for each in sent if each.began >= began]
    good = [each for each in counted if each.status == "OK" and each.ended - each.began <= deadline]
    waits = [each.ttft for each in counted if each.ttft is not None] or [0.0]
    refused = [each.ended - each.began for each in counted if each.status == "RESOURCE_EXHAUSTED"]
    return {
        "load": load,
        "offered_per_s": round(rate, 1),
        "goodput_per_s": round(len(good) / (seconds * 3 / 4), 1),
        "refused": round(len(refused) / len(counted), 3),
        "timed_out": round(sum(each.status == "DEADLINE_EXCEEDED" for each in counted) / len(counted), 3),
        "ttft_p50_ms": round(1e3 * float(np.percentile(waits, 50))),
        "ttft_p99_ms": round(1e3 * float(np.percentile(waits, 99))),
        "refused_after_p50_ms": round(1e3 * float(np.median(refused))) if refused else 0,
    }


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    flags = ["--log-level", "error", "--max-num-seqs", "16"]
    flags += ["--null-step-ms", "5"] if options.model == "null" else []
    flags += ["--queue-timeout", str(options.deadline)] if options.patient else []
    with ServerProcess(options.model, *flags) as server:
        load = Load(server.wait_ready().address, options.deadline, options.patient)
        await load.peak(2, 16)
        peak = await load.peak(options.seconds / 2, 24)
        rows = []
        for share in LOADS:
            sent = await load.open_loop(share * peak, options.seconds)
            limit = float("inf") if options.patient else options.deadline
            rows.append(row(share, share * peak, sent, options.seconds, limit))
            sys.stderr.write(f"{json.dumps(rows[-1])}\n")
        await load.close()
    return {"peak_per_s": round(peak, 1), "deadline_s": options.deadline, "patient": options.patient, "rows": rows}


def plot(report: dict[str, Any], path: str) -> None:
    """Goodput and time to first token over the load offered, as PNG. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows, peak = report["rows"], report["peak_per_s"]
    offered = [each["offered_per_s"] for each in rows]
    figure, (above, below) = pyplot.subplots(2, sharex=True, figsize=(7, 6))
    above.plot(offered, offered, "--", color="grey", label="offered")
    above.plot(offered, [each["goodput_per_s"] for each in rows], "o-", label="whole in time")
    above.axhline(0.9 * peak, color="grey", lw=0.5)
    above.set_ylim(0, 1.4 * peak)
    above.set_ylabel("requests/s")
    above.legend()
    for percentile in ("p50", "p99"):
        below.plot(offered, [each[f"ttft_{percentile}_ms"] / 1e3 for each in rows], "o-", label=percentile)
    below.axhline(report["deadline_s"], color="grey", ls="--", label="limit")
    below.set_ylabel("time to first token, s")
    below.set_xlabel(f"requests offered/s (peak {peak:g})")
    below.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=12.0, help="of each load")
    parser.add_argument("--deadline", type=float, default=2.0, help="seconds; with --patient the queue timeout")
    parser.add_argument("--patient", action="store_true", help="requests without deadlines, a queue timeout instead")
    parser.add_argument("--model", default="null", help="as of `tailrace serve`; '' is the embedded one")
    parser.add_argument("--plot", metavar="FILE.png", help="needs matplotlib")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    report = asyncio.run(measure(options))
    if options.plot:
        plot(report, options.plot)
    if options.json:
        sys.stdout.write(json.dumps(report) + "\n")
    else:
        names = list(report["rows"][0])
        lines = [names, *([str(each[name]) for name in names] for each in report["rows"])]
        sys.stdout.write(f"peak {report['peak_per_s']} requests/s\n")
        sys.stdout.writelines(" ".join(f"{word:>20}" for word in line) + "\n" for line in lines)


if __name__ == "__main__":
    main()
