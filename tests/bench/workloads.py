"""Five workloads that engines are compared on, carried out by this one: a line of JSON for each.

    python -m tests.bench.workloads --prompts FILE [--workload W1] [engine flags]

  W1  one stream                                             tokens a second
  W2  32 requests at once, distinct prompts                  tokens a second
  W3  32 requests with a common prefix                       tokens a second
  W4  one long prompt                                        time to its first token
  W5  16 streams while a long prompt arrives                 longest gap between two of their tokens

FILE is JSON with token ids: {"W1": [prompt], "W2": [...], "W3": [...], "W4": [prompt], "W5": {"decodes": [...],
"long": prompt}}. Greedy, and the model's own end is ignored.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from pathlib import Path

import uvloop

from async_engine.async_llm import AsyncLLM
from async_engine.flags import add_flags, values
from async_engine.outputs import Delta
from async_engine.request import GenerationRequest
from protos.config import CacheOptions, EngineConfig, ExecutorOptions, ModelOptions, SchedulerOptions, build
from protos.params import SamplingParams

SECTIONS = (ModelOptions, CacheOptions, SchedulerOptions, ExecutorOptions)
NEW_TOKENS = {"W1": 128, "W2": 128, "W3": 64, "W4": 16, "W5": 96}
ARRIVES_AFTER = 24
"""Tokens that every stream of W5 has when the long prompt comes."""


class Stream:
    """One request, and when its tokens came."""

    def __init__(self, llm: AsyncLLM, prompt: list[int], max_tokens: int) -> None:
        self.times: list[float] = []
        self.is_running = asyncio.Event()
        """Set when it has tokens enough for a long prompt to come."""
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self.task = asyncio.create_task(self._run(llm, GenerationRequest(prompt=prompt, params=params)))

    async def _run(self, llm: AsyncLLM, request: GenerationRequest) -> None:
        async for event in llm.generate(request):
            if isinstance(event, Delta):
                self.times += [time.perf_counter()] * len(event.token_ids)
                if len(self.times) >= ARRIVES_AFTER:
                    self.is_running.set()

    def gaps(self, start: float, end: float) -> list[float]:
        """Between two tokens, of those gaps that overlap a time."""
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False) if b > start and a < end]


async def throughput(llm: AsyncLLM, prompts: list[list[int]], max_tokens: int) -> dict[str, float]:
    start = time.perf_counter()
    streams = [Stream(llm, prompt, max_tokens) for prompt in prompts]
    await asyncio.gather(*(stream.task for stream in streams))
    end = max(stream.times[-1] for stream in streams)
    gaps = [gap for stream in streams for gap in stream.gaps(start, end)]
    return {
        "wall_s": round(end - start, 4),
        "tok_s": round(sum(len(stream.times) for stream in streams) / (end - start), 2),
        "ttft_ms_p50": round(1e3 * statistics.median(stream.times[0] - start for stream in streams), 1),
        "itl_ms_p50": round(1e3 * statistics.median(gaps), 2),
        "itl_ms_max": round(1e3 * max(gaps), 2),
    }


async def interruption(llm: AsyncLLM, decodes: list[list[int]], long: list[int]) -> dict[str, float]:
    streams = [Stream(llm, prompt, NEW_TOKENS["W5"]) for prompt in decodes]
    await asyncio.gather(*(stream.is_running.wait() for stream in streams))
    began, arrived = max(stream.times[0] for stream in streams), time.perf_counter()
    late = Stream(llm, long, NEW_TOKENS["W4"])
    await asyncio.gather(late.task, *(stream.task for stream in streams))
    before = [gap for stream in streams for gap in stream.gaps(began, arrived)]
    during = [gap for stream in streams for gap in stream.gaps(arrived, late.times[0])]
    return {
        "gap_before_ms_p50": round(1e3 * statistics.median(before), 1),
        "gap_during_ms_p50": round(1e3 * statistics.median(during), 1),
        "gap_during_ms_max": round(1e3 * max(during), 1),
        "long_ttft_ms": round(1e3 * (late.times[0] - arrived), 1),
    }


async def run(arguments: argparse.Namespace) -> None:
    prompts = json.loads(arguments.prompts.read_text())
    config = build(EngineConfig, **values(arguments, *SECTIONS))
    async with await AsyncLLM.start(config) as llm:
        await throughput(llm, [prompts["W2"][0][:16]], 2)
        for name in arguments.workload or sorted(NEW_TOKENS):
            await llm.reset_prefix_cache(restart_running=False)
            if name == "W5":
                best = await interruption(llm, prompts[name]["decodes"], prompts[name]["long"])
            else:
                best = await throughput(llm, prompts[name], NEW_TOKENS[name])
            sys.stdout.write(json.dumps({"peer": "tailrace", "workload": name, "best": best}) + "\n")
            sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--workload", action="append", choices=sorted(NEW_TOKENS), help="default: all")
    for section in SECTIONS:
        add_flags(parser, section)
    uvloop.run(run(parser.parse_args()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
