"""How long running streams stall while a long prompt comes, and what it costs that they do not.

    python -m tests.bench.stall [--prompt-tokens 8000] [--streams 16] [--tokens 500] [--times 1.5] [--rounds 3]

Three engines on the embedded model take turns: one that never holds prompts back, one as it is by default, and one
whose --max-inter-token-gap is so many times the gap of the streams alone, as measured right before. Each does the same
work, streams of so many tokens and a prompt that comes when all of them run. Gaps are those between two tokens of a
stream from when the prompt comes until its first token, over what the streams alone need at the same place of their
outputs, since steps take longer as outputs grow; how those spread by themselves is what the machine adds.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from dataclasses import dataclass

import uvloop

from async_engine.async_llm import AsyncLLM
from async_engine.bench.table import format_table
from protos.config import EngineConfig, build
from tests.bench.workloads import Stream

WITHOUT_LIMIT = 3600.0
AROUND = 8
"""Tokens before and behind one, whose gaps make its usual one."""


@dataclass
class Run:
    """Gaps in times of the usual one, the others in seconds."""

    p50: float
    p99: float
    worst: float
    first_token: float
    """Of the long prompt."""
    wall: float


@dataclass
class Alone:
    """Streams without the prompt."""

    usual: list[float]
    """Seconds between a token and the next, by the token's place."""
    p99: float
    """In times of that."""


async def start(gap: float) -> AsyncLLM:
    return await AsyncLLM.start(build(EngineConfig, max_inter_token_gap=gap, prefix_caching=False))


def prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(1000, 40_000) for _ in range(length)]


async def run_streams(llm: AsyncLLM, arguments: argparse.Namespace, rng: random.Random) -> list[Stream]:
    """Until all of them have tokens enough for a long prompt to come."""
    streams = [Stream(llm, prompt(rng, 128), arguments.tokens) for _ in range(arguments.streams)]
    await asyncio.gather(*(stream.is_running.wait() for stream in streams))
    return streams


def p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[-1]


async def measure_alone(llm: AsyncLLM, arguments: argparse.Namespace, seed: int) -> Alone:
    streams = await run_streams(llm, arguments, random.Random(seed))
    await asyncio.gather(*(stream.task for stream in streams))
    running = max(stream.times[0] for stream in streams)
    gaps = [[b - a for a, b in zip(s.times, s.times[1:], strict=False)] for s in streams]
    usual = [
        statistics.median(gap for of_one in gaps for gap in of_one[max(0, i - AROUND) : i + AROUND + 1])
        for i in range(arguments.tokens - 1)
    ]
    ratios = [
        gap / usual[i]
        for stream, of_one in zip(streams, gaps, strict=True)
        for i, gap in enumerate(of_one)
        if stream.times[i] >= running
    ]
    return Alone(usual, p99(ratios))


async def measure(llm: AsyncLLM, arguments: argparse.Namespace, seed: int, alone: Alone) -> Run:
    rng = random.Random(seed)
    began = time.perf_counter()
    streams = await run_streams(llm, arguments, rng)
    arrived = time.perf_counter()
    late = Stream(llm, prompt(rng, arguments.prompt_tokens), 16)
    await asyncio.gather(late.task, *(stream.task for stream in streams))
    ratios = [
        (after - before) / alone.usual[i]
        for stream in streams
        for i, (before, after) in enumerate(zip(stream.times, stream.times[1:], strict=False))
        if after > arrived and before < late.times[0]
    ]
    end = max(late.times[-1], *(stream.times[-1] for stream in streams))
    return Run(statistics.median(ratios), p99(ratios), max(ratios), late.times[0] - arrived, end - began)


def row(name: str, runs: list[Run], reference: list[Run]) -> list[object]:
    def median(values: list[float]) -> float:
        return statistics.median(values)

    return [
        name,
        median([run.p50 for run in runs]),
        median([run.p99 for run in runs]),
        median([run.worst for run in runs]),
        median([run.first_token for run in runs]),
        median([run.wall for run in runs]),
        median([run.wall / other.wall for run, other in zip(runs, reference, strict=True)]),
    ]


async def run(arguments: argparse.Namespace) -> None:
    engines = {"without a limit": await start(WITHOUT_LIMIT), "default": await start(0.0)}
    found: dict[str, list[Run]] = {name: [] for name in engines}
    alone: list[Alone] = []
    try:
        short = argparse.Namespace(**vars(arguments) | {"prompt_tokens": 512})
        first = await measure_alone(engines["default"], arguments, 0)
        gap = arguments.times * first.usual[0]
        name = f"{arguments.times:g} times, {1e3 * gap:.0f} ms"
        engines[name] = await start(gap)
        found[name] = []
        for llm in engines.values():
            await measure(llm, short, 0, first)
        for number in range(arguments.rounds):
            alone.append(await measure_alone(engines["default"], arguments, number))
            for name, llm in engines.items():
                found[name].append(await measure(llm, arguments, number, alone[-1]))
    finally:
        for llm in engines.values():
            await llm.close()
    ends = [1e3 * statistics.median(one.usual[i] for one in alone) for i in (0, -1)]
    sys.stdout.write(
        f"streams alone: {ends[0]:.1f} ms a token at their beginning, {ends[1]:.1f} at their end, "
        f"p99 {statistics.median(one.p99 for one in alone):.2f} times that\n"
    )
    headings = ["gap aimed at", "p50, times", "p99, times", "worst, times", "first token, s", "wall, s", "wall, ratio"]
    reference = found["without a limit"]
    sys.stdout.write(format_table(headings, [row(name, runs, reference) for name, runs in found.items()]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-tokens", type=int, default=8000)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=500, help="of each stream")
    parser.add_argument("--times", type=float, default=1.5)
    parser.add_argument("--rounds", type=int, default=3)
    uvloop.run(run(parser.parse_args()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
