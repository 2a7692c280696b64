"""How long running streams stall while a long prompt comes, and what it costs that they do not.

    python -m tests.bench.stall [--prompt-tokens 8000] [--streams 16] [--tokens 500] [--times 1.5] [--rounds 3]

Three engines on the embedded model take turns: one that never holds prompts back, one as it is by default, and one
whose --max-inter-token-gap is so many times the gap of the streams alone, as measured right before. Each does the same
work, streams of so many tokens and a prompt that comes when all of them run. Gaps are those between two tokens of a
stream, alone and from when the prompt comes until its first token.
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


@dataclass
class Run:
    """Seconds."""

    usual: float
    p99: float
    worst: float
    first_token: float
    """Of the long prompt."""
    wall: float


async def start(gap: float) -> AsyncLLM:
    return await AsyncLLM.start(build(EngineConfig, max_inter_token_gap=gap, prefix_caching=False))


async def measure(llm: AsyncLLM, arguments: argparse.Namespace, seed: int) -> Run:
    rng = random.Random(seed)

    def prompt(length: int) -> list[int]:
        return [rng.randrange(1000, 40_000) for _ in range(length)]

    began = time.perf_counter()
    streams = [Stream(llm, prompt(128), arguments.tokens) for _ in range(arguments.streams)]
    await asyncio.gather(*(stream.is_running.wait() for stream in streams))
    running, arrived = max(stream.times[0] for stream in streams), time.perf_counter()
    late = Stream(llm, prompt(arguments.prompt_tokens), 16)
    await asyncio.gather(late.task, *(stream.task for stream in streams))
    before = [gap for stream in streams for gap in stream.gaps(running, arrived)]
    during = [gap for stream in streams for gap in stream.gaps(arrived, late.times[0])]
    end = max(late.times[-1], *(stream.times[-1] for stream in streams))
    p99 = statistics.quantiles(during, n=100)[-1]
    return Run(statistics.median(before), p99, max(during), late.times[0] - arrived, end - began)


def row(name: str, runs: list[Run], reference: list[Run]) -> list[object]:
    def median(values: list[float]) -> float:
        return statistics.median(values)

    return [
        name,
        1e3 * median([run.usual for run in runs]),
        median([run.p99 / run.usual for run in runs]),
        median([run.worst / run.usual for run in runs]),
        median([run.first_token for run in runs]),
        median([run.wall for run in runs]),
        median([run.wall / other.wall for run, other in zip(runs, reference, strict=True)]),
    ]


async def run(arguments: argparse.Namespace) -> None:
    engines = {"without a limit": await start(WITHOUT_LIMIT), "default": await start(0.0)}
    found: dict[str, list[Run]] = {name: [] for name in engines}
    try:
        alone = await measure(engines["default"], argparse.Namespace(**vars(arguments) | {"prompt_tokens": 512}), 0)
        name = f"{arguments.times:g} times, {1e3 * arguments.times * alone.usual:.0f} ms"
        engines[name] = await start(arguments.times * alone.usual)
        found[name] = []
        await measure(engines[name], argparse.Namespace(**vars(arguments) | {"prompt_tokens": 512}), 0)
        for number in range(arguments.rounds):
            for name, llm in engines.items():
                found[name].append(await measure(llm, arguments, number))
    finally:
        for llm in engines.values():
            await llm.close()
    headings = [
        "gap aimed at",
        "gap alone, ms",
        "p99, times",
        "worst, times",
        "first token, s",
        "wall, s",
        "wall, ratio",
    ]
    first = found["without a limit"]
    sys.stdout.write(format_table(headings, [row(name, runs, first) for name, runs in found.items()]))


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
