"""How busy the core keeps the stages of a pipeline: null stages of equal time, in real time.

    python -m tests.bench.pipeline [--seconds 3] [--step-ms 10] [--rows 32] [--rounds 3]

A model whose step takes --step-ms on one device is split over S of them, S times as fast each. Every device has
--rows requests at once, as it has memory for; there are always more that wait. Ideal is S times the tokens; what is
missing are bubbles: a stage that waited for the core, or for a step that another one was late with.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time

import numpy as np

from async_engine.bench.table import format_table
from core_proc.engine_core import EngineCore
from core_proc.request import make_request
from gpu_executor.null_pipeline import NullPipeline
from protos.config import EngineConfig, build
from protos.messages import EngineCoreRequest, Sampling

BLOCK_SIZE = 16
WORKLOADS = {"decode": ((16, 17), (4000, 4001)), "mixed": ((1, 600), (1, 200))}
"""Tokens of prompts and of outputs, each drawn from a range."""


class Run:
    """One pipeline under one workload. `backlog` requests wait at all times."""

    def __init__(self, workload: str, stages: int, arguments: argparse.Namespace) -> None:
        self._prompts, self._outputs = WORKLOADS[workload]
        self._rng = np.random.default_rng(0)
        self._handles = itertools.count()
        self._backlog = 2 * arguments.rows * stages
        config = build(
            EngineConfig,
            model="null",
            num_kv_blocks=1 << 17,
            max_model_len=8192,
            max_num_seqs=arguments.rows * stages,
            max_num_batched_tokens=512,
            pipeline_parallel_size=stages,
            null_step_ms=arguments.step_ms / stages,
        )
        self._core = EngineCore(config, (), executor=NullPipeline(config))

    def measure(self, seconds: float) -> tuple[float, float]:
        """(tokens, steps) a second."""
        self._run(seconds / 3)
        return self._run(seconds)

    def _run(self, seconds: float) -> tuple[float, float]:
        start, tokens = time.monotonic(), 0
        first = self._core.scheduler.stats(0).steps
        while (now := time.monotonic()) < start + seconds:
            for _ in range(self._backlog - self._core.scheduler.stats(0).waiting):
                self._add(now)
            self._core.step()
            tokens += sum(len(out.token_ids) // 4 for out in self._core.scheduler.events.take().values())
        elapsed = time.monotonic() - start
        return tokens / elapsed, (self._core.scheduler.stats(0).steps - first) / elapsed

    def _add(self, now: float) -> None:
        length, max_tokens = int(self._rng.integers(*self._prompts)), int(self._rng.integers(*self._outputs))
        prompt = self._rng.integers(0, 256, length, np.int32)
        message = EngineCoreRequest(next(self._handles), prompt.tobytes(), Sampling(ignore_eos=True), max_tokens)
        self._core.scheduler.add(make_request(message, 0, BLOCK_SIZE, 8192, now))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 4])
    arguments = parser.parse_args()
    lines = []
    for workload in WORKLOADS:
        rates: dict[int, list[tuple[float, float]]] = {stages: [] for stages in arguments.stages}
        for _ in range(arguments.rounds):
            for stages, found in rates.items():
                found.append(Run(workload, stages, arguments).measure(arguments.seconds))
        alone = statistics.median(tokens for tokens, _ in rates[arguments.stages[0]])
        for stages, found in rates.items():
            tokens = statistics.median(tokens for tokens, _ in found)
            busy = statistics.median(steps for _, steps in found) * arguments.step_ms / 1e3 / stages
            lines.append([workload, stages, round(tokens), f"{tokens / alone:.2f}", f"{100 * busy:.0f} %"])
    print(format_table(["workload", "stages", "tokens/s", "times one", "stages busy"], lines))  # noqa: T201


if __name__ == "__main__":
    main()
