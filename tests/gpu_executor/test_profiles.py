"""What workers record of their time, in the core's thread, on one of their own, and in processes."""

from __future__ import annotations

import gzip
import json
import marshal
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from gpu_executor.factory import make_executor
from gpu_executor.uniproc import UniprocExecutor
from model_runner.step_trace import MAX_TRACED_STEPS
from protos.config import EngineConfig, build
from protos.messages import Sampling
from protos.python_profile import PythonProfile
from protos.step import NewRow, SchedulerOutput
from tests.model_runner.tiny import save_tiny

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from gpu_executor.executor import Executor


def steps(first: int, count: int) -> Iterator[SchedulerOutput]:
    """Of one row, a token each."""
    row, yes = np.zeros(1, np.int32), np.ones(1, np.bool_)
    for number in range(first, first + count):
        new_rows = [] if number else [NewRow(0, np.array([5], np.int32), 1, list(range(1, 5)), Sampling())]
        yield SchedulerOutput(number, row, np.array([number], np.int32), np.array([1], np.int32), yes, new_rows)


def run(executor: Executor, first: int, count: int) -> None:
    for step in steps(first, count):
        executor.execute(step)
        executor.sample().result()


def functions(file: bytes) -> set[str]:
    """Names of those that a profile has."""
    return {name for _, _, name in marshal.loads(file)}


def started(**options: Any) -> Executor:
    executor = make_executor(build(EngineConfig, **options), ())
    executor.start(lambda done, total: None, lambda error: None)
    return executor


def test_a_profile_has_what_its_thread_did_meanwhile() -> None:
    sorted([2, 1])
    profile = PythonProfile()
    functions(marshal.dumps({}))
    found = functions(profile.stop())
    assert "functions" in found
    assert not any("sorted" in name for name in found)


@pytest.mark.parametrize(
    ("options", "files"),
    [
        ({"max_steps_in_flight": 1}, {}),  # it is the core's thread
        ({"max_steps_in_flight": 2}, {"worker0.pstats"}),
        ({"executor": "multiproc", "tensor_parallel_size": 2}, {"worker0.pstats", "worker1.pstats"}),
        ({"executor": "multiproc", "max_steps_in_flight": 2}, {"worker0.pstats"}),
    ],
)
def test_workers_tell_what_they_did_again_and_again(options: dict[str, Any], files: set[str]) -> None:
    executor = started(model="null", **options)
    try:
        run(executor, 0, 2)
        assert executor.stop_profile() == {}
        for first in (2, 4):
            executor.start_profile()
            run(executor, first, 2)
            found = executor.stop_profile()
            assert found.keys() == set(files)
            for data in found.values():
                assert {"execute", "sample"} <= functions(data)
        run(executor, 6, 2)
    finally:
        executor.shutdown()


@pytest.mark.parametrize("depth", [1, 2])
def test_the_first_steps_of_a_model_are_traced(tmp_path: Path, depth: int) -> None:
    save_tiny(tmp_path, "LlamaForCausalLM")
    config = build(EngineConfig, model=str(tmp_path), num_kv_blocks=16, max_steps_in_flight=depth)
    executor = UniprocExecutor(config, ())
    executor.start(lambda done, total: None, lambda error: None)
    try:
        counts = []
        for first, count in ((0, 3), (3, MAX_TRACED_STEPS), (3 + MAX_TRACED_STEPS, MAX_TRACED_STEPS + 9)):
            executor.start_profile()
            run(executor, first, count)
            trace = json.loads(gzip.decompress(executor.stop_profile()["worker0.trace.json.gz"]))
            names = [event.get("name", "") for event in trace["traceEvents"]]
            counts.append(sum(name.startswith("aten::") for name in names))
    finally:
        executor.shutdown()
    assert 0 < counts[0] < counts[1]
    assert counts[2] == counts[1], "what comes after is not recorded"
