"""What it costs the core to have its steps run by workers in processes: `python -m tests.bench.ring`.

The workers compute nothing, so all that is left is the way: encoding, the ring, waking, decoding, the answer. Beside
it, the same steps over a pipe to each worker, pickled (`multiprocessing.Pipe`). The two take turns, so that a slow
moment of the machine hits both.

    dispatch    µs the core's thread takes until a step is on its way: `execute` and `sample`
    round trip  µs until its tokens are back
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from async_engine.bench.table import format_table
from gpu_executor.group import WorkerGroup
from gpu_executor.multiproc import LocalWorkers
from protos.config import EngineConfig, build
from protos.place import ONLY
from protos.step import SchedulerOutput
from tests.bench.idle_worker import IdleWorker
from tests.gpu_executor.ray_cluster import ray_cluster

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    from gpu_executor.group import Way
    from protos.step import ModelRunnerOutput

WARM_UP = 200


class Executor:
    """Ours, with idle workers."""

    def __init__(self, config: EngineConfig, way: Way) -> None:
        self._executor = WorkerGroup(config, way)
        self._executor.start(lambda done, total: None, lambda error: None)

    def dispatch(self, step: SchedulerOutput) -> Any:
        self._executor.execute(step)
        return self._executor.sample()

    def result(self, pending: Any) -> ModelRunnerOutput:
        output: ModelRunnerOutput = pending.result()
        return output

    def close(self) -> None:
        self._executor.shutdown()


def local(num_workers: int) -> Executor:
    config = build(EngineConfig, model="null", tensor_parallel_size=num_workers)
    return Executor(config, LocalWorkers(config, (), "tests.bench.idle_worker"))


def over_ray(num_workers: int) -> Executor:
    """In two stages, over the nodes of the cluster at RAY_ADDRESS."""
    from gpu_executor.ray_executor import RayWorkers
    from tests.bench.idle_actor import IdleActor

    config = build(EngineConfig, model="null", tensor_parallel_size=num_workers // 2, pipeline_parallel_size=2)
    return Executor(config, RayWorkers(config, (), IdleActor))


class Pipes:
    """A pipe to each worker, and pickle: a step, then that it is to be sampled; the first one answers."""

    def __init__(self, num_workers: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(num_workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=answer_steps, args=(theirs, rank == 0), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def dispatch(self, step: SchedulerOutput) -> Any:
        for message in (step, None):
            for pipe in self._pipes:
                pipe.send(message)

    def result(self, pending: Any) -> ModelRunnerOutput:
        output: ModelRunnerOutput = self._pipes[0].recv()
        return output

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def answer_steps(pipe: Connection, is_output: bool) -> None:
    worker = IdleWorker(build(EngineConfig, model="null"), (), ONLY)
    while True:
        worker.execute(pipe.recv())
        pipe.recv()
        if is_output:
            pipe.send(worker.sample().result())


def decode_step(step_id: int, num_rows: int) -> SchedulerOutput:
    """Every row decodes, and one in sixteen gets a block."""
    rows = np.arange(num_rows, dtype=np.int32)
    ones = np.ones(num_rows, np.int32)
    few = rows[::16]
    return SchedulerOutput(step_id, rows, rows + 100, ones, ones > 0, block_rows=few, block_ids=few + 7)


def measure(way: Executor | Pipes, first: int, num_steps: int, num_rows: int) -> tuple[float, float]:
    """Medians of the dispatch and of the round trip, in microseconds."""
    dispatches, trips = [], []
    for step_id in range(first, first + num_steps):
        step = decode_step(step_id, num_rows)
        start = time.perf_counter()
        pending = way.dispatch(step)
        sent = time.perf_counter()
        way.result(pending)
        trips.append(time.perf_counter() - start)
        dispatches.append(sent - start)
    return statistics.median(dispatches) * 1e6, statistics.median(trips) * 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 256])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=500, help="of a round")
    parser.add_argument("--ray", action="store_true", help="also over a Ray cluster of two nodes on this machine")
    options = parser.parse_args()
    make: dict[str, Callable[[int], Executor | Pipes]] = {"ring": local, "pipes": Pipes}
    with contextlib.ExitStack() as stack:
        if options.ray:
            os.environ["RAY_ADDRESS"] = stack.enter_context(ray_cluster()).address
            make["ray"] = over_ray
        sys.stdout.write(format_table(*table(make, options)))
    return 0


def table(
    make: dict[str, Callable[[int], Executor | Pipes]], options: argparse.Namespace
) -> tuple[list[str], list[list[object]]]:
    """Header and rows: of each way, dispatch and round trip."""
    lines: list[list[object]] = []
    for num_workers in options.workers:
        ways = [make_way(num_workers) for make_way in make.values()]
        first = 0
        for num_rows in options.rows:
            found: list[list[tuple[float, float]]] = [[] for _ in ways]
            for round_number in range(-1, options.rounds):
                num_steps = options.steps if round_number >= 0 else WARM_UP
                for way, results in zip(ways, found, strict=True):
                    results.append(measure(way, first, num_steps, num_rows))
                    first += num_steps
            numbers = [statistics.median(column) for results in found for column in zip(*results[1:], strict=True)]
            lines.append([f"{num_workers} workers, {num_rows} rows", *numbers])
        for way in ways:
            way.close()
    return ["µs", *(column for name in make for column in (f"{name}: dispatch", "round trip"))], lines


if __name__ == "__main__":
    sys.exit(main())
