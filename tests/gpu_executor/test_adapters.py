"""Adapters: every kind of executor has all its workers load one, or none."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from gpu_executor import wire
from gpu_executor.executor import StepFailedError, WorkersDiedError
from gpu_executor.factory import make_executor
from gpu_executor.null import NullWorker
from gpu_executor.step_loop import StepLoop
from gpu_executor.uniproc import UniprocExecutor
from gpu_executor.worker import Worker
from protos.adapter import Adapter
from protos.adapter_files import read_adapter
from protos.config import EngineConfig, build
from protos.errors import AdapterError
from protos.messages import Sampling
from protos.model_files import read_model_spec
from protos.step import NewRow, SchedulerOutput
from tests.fakes import InjectedError
from tests.gpu_executor.test_multiproc import start  # noqa: F401 - a fixture
from tests.model_runner.adapted import save_adapted
from tests.model_runner.driver import Driver
from tests.model_runner.greedy import assert_greedy
from tests.model_runner.test_tiny_models import TOKENS
from tests.model_runner.tiny import save_tiny

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from gpu_executor.executor import Executor
    from tests.gpu_executor.test_multiproc import Started

ONE, TWO = (Adapter(f"number {n}", "/nowhere", f"{n:032x}", 4, 100) for n in (1 << 100, 2 << 100))
KINDS: dict[str, dict[str, Any]] = {
    "in place": {},
    "on a thread": {"max_steps_in_flight": 2},
    "two workers": {"tensor_parallel_size": 2},
    "two stages": {"executor": "multiproc", "pipeline_parallel_size": 2},
    "stages that are none": {"pipeline_parallel_size": 2},
}


def started(**options: Any) -> Executor:
    executor = make_executor(build(EngineConfig, **options), ())
    executor.start(lambda done, total: None, lambda error: None)
    return executor


def draw(executor: Executor, *slots: int) -> list[int]:
    """A step of rows with one prompt, by the slots of their adapters."""
    rows = np.arange(len(slots), dtype=np.int32)
    prompt = np.array([5, 6, 7], np.int32)
    new_rows = [NewRow(row, prompt, 3, [1], Sampling(), adapter=slot) for row, slot in enumerate(slots)]
    counts, samples = np.full(len(slots), 3, np.int32), np.ones(len(slots), np.bool_)
    executor.execute(SchedulerOutput(1, rows, np.zeros_like(rows), counts, samples, new_rows))
    return executor.sample().result().token_ids.tolist()


@pytest.fixture(params=KINDS)
def null(request: pytest.FixtureRequest) -> Iterator[Executor]:
    executor = started(model="null", **KINDS[request.param])
    yield executor
    executor.shutdown()


def test_the_null_model_draws_by_the_digest_in_the_slot(null: Executor) -> None:
    null.load_adapter(1, ONE)
    null.load_adapter(3, TWO)
    null.load_adapter(2, ONE)
    plain, one, again, two = draw(null, 0, 1, 2, 3)
    assert len({plain, one, two}) == 3
    assert one == again
    null.unload_adapter(1)
    null.load_adapter(1, TWO)
    assert draw(null, 1, 0) == [two, plain]


def test_a_worker_that_cannot_leaves_it_with_none(start: Started) -> None:  # noqa: F811
    executor = start({1: {"adapter": "known"}})
    plain = draw(executor, 0)
    for _ in range(2):
        with pytest.raises(AdapterError, match=r"^there is no room for it$"):
            executor.load_adapter(1, ONE)
    assert draw(executor, 0) == plain
    # Worker 0, whose tokens are taken, could have: it has let go of it.
    with pytest.raises(StepFailedError, match=r"^KeyError: 1$"):
        draw(executor, 1)


def test_what_else_goes_wrong_is_told_too(start: Started) -> None:  # noqa: F811
    executor = start({0: {"adapter": "unknown"}, 1: {"adapter": "unknown"}})
    with pytest.raises(AdapterError, match=r"^InjectedError: adapter$"):
        executor.load_adapter(1, ONE)
    executor.unload_adapter(1)
    assert len(draw(executor, 0)) == 1


def test_a_worker_that_dies_is_told(start: Started) -> None:  # noqa: F811
    executor = start()
    os.kill(executor.workers[1].pid, signal.SIGSTOP)
    threading.Timer(0.05, executor.workers[1].kill).start()
    with pytest.raises(WorkersDiedError, match=r"worker 1 .* was ended by SIGKILL"):
        executor.load_adapter(1, ONE)


def test_results_of_steps_in_flight_come_in_meanwhile(start: Started) -> None:  # noqa: F811
    executor = start(tensor_parallel_size=1, pipeline_parallel_size=2, max_steps_in_flight=2, null_step_ms=20)
    pending = []
    for step_id in range(2):
        rows = np.zeros(1, np.int32)
        new_rows = [NewRow(0, np.array([5], np.int32), 1, [1], Sampling())]
        executor.execute(SchedulerOutput(step_id, rows, rows, rows + 1, rows == 0, new_rows))
        pending.append(executor.sample())
    executor.load_adapter(1, ONE)
    assert [one.result().step_id for one in pending] == [0, 1]
    assert draw(executor, 1) != draw(executor, 0)


def test_a_device_that_is_lost_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lost(NullWorker):
        def load_adapter(self, slot: int, adapter: Adapter) -> None:
            raise WorkersDiedError("the device is lost")

    def leave(code: int) -> None:
        raise InjectedError(f"exit {code}")

    monkeypatch.setattr("gpu_executor.step_loop.os._exit", leave)
    monkeypatch.setattr("gpu_executor.step_loop.logging.shutdown", lambda: None)
    told: list[Any] = []
    loop = StepLoop(Lost(build(EngineConfig, model="null")), True, told.append, 1)
    with pytest.raises(InjectedError, match="exit 1"):
        loop.handle(wire.LoadAdapter(1, ONE))
    assert told == []


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapted")


@pytest.fixture(scope="module")
def models(directory: Path) -> list[Any]:
    model = save_tiny(directory, "LlamaForCausalLM", attention_bias=True, num_key_value_heads=1)
    return [model, *save_adapted(directory, model)]


def adapter(directory: Path, name: str) -> Adapter:
    return read_adapter(name, directory / name, read_model_spec(directory), 64)


@pytest.mark.parametrize("kind", ["in place", "two workers", "two stages"])
def test_a_model_draws_what_merged_weights_draw(directory: Path, models: list[Any], kind: str) -> None:
    """Over workers that have a slice of each layer, or some of the layers."""
    executor = started(model=str(directory), num_kv_blocks=128, max_num_seqs=16, num_threads=1, **KINDS[kind])
    try:
        for slot, name in ((1, "one"), (2, "two")):
            executor.load_adapter(slot, adapter(directory, name))
        for budget in (4096, 20):
            driver = Driver(executor, 128, 16, is_pipeline=kind == "two stages")
            rows = [driver.add(TOKENS[:size], 8, adapter=slot) for size in (1, 7, 40) for slot in (0, 1, 2)]
            driver.run(rows, budget)
            for row in rows:
                assert_greedy(models[row.adapter], row.token_ids[: row.num_prompt_tokens], row.output)
        with pytest.raises(AdapterError, match="have changed since adapter one was read"):
            executor.load_adapter(3, Adapter("one", str(directory / "one"), "0" * 32, 4, 1))
    finally:
        executor.shutdown()


def test_memory_that_is_not_there_is_told(directory: Path, models: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(build(EngineConfig, model=str(directory), num_kv_blocks=16), ())
    executor = UniprocExecutor(build(EngineConfig), (), worker)
    executor.start(lambda done, total: None, lambda error: None)

    def fails(error: Exception) -> None:
        def load(*_: Any) -> None:
            raise error

        monkeypatch.setattr(worker._loaded(), "load_adapter", load)

    for error in (MemoryError("no room"), RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes")):
        fails(error)
        with pytest.raises(AdapterError, match=rf"^{directory}/one: out of memory while loading \("):
            executor.load_adapter(1, adapter(directory, "one"))
    fails(RuntimeError("another"))
    with pytest.raises(RuntimeError, match=r"^another$"):
        executor.load_adapter(1, adapter(directory, "one"))
