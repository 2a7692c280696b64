"""UniprocExecutor: the worker called in place, or on a thread of its own when steps are in flight."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from gpu_executor.factory import make_executor
from gpu_executor.null import DueOutput, NullWorker
from gpu_executor.uniproc import UniprocExecutor, make_worker
from protos.config import CacheOptions, EngineConfig, ModelOptions, SchedulerOptions
from protos.errors import StartupError
from protos.messages import Sampling
from protos.step import GrammarMask, NewRow, SchedulerOutput
from tests.fakes import InjectedError, PagedFakeWorker, expected_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from protos.step import ModelRunnerOutput, WorkerInfo

CONFIG = EngineConfig()
PROMPT = (5, 6, 7)
GREEDY = Sampling()
DEPTHS = pytest.mark.parametrize("depth", [1, 2], ids=["in place", "on a thread"])


class ObservedWorker(PagedFakeWorker):
    """Says which thread it ran on, and waits where it is told to."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.calls: list[tuple[str, str]] = []
        self.masks: list[GrammarMask | None] = []
        self.gate = threading.Event()
        self.gate.set()
        self.fail_sample = False

    def execute(self, step: SchedulerOutput) -> None:
        self.calls.append(("execute", threading.current_thread().name))
        assert self.gate.wait(timeout=30)
        super().execute(step)

    def sample(self, mask: GrammarMask | None = None) -> ModelRunnerOutput:
        self.calls.append(("sample", threading.current_thread().name))
        self.masks.append(mask)
        output = super().sample(mask)
        if self.fail_sample:
            raise InjectedError("sample")
        return output


def step(step_id: int, prompt: Sequence[int] = PROMPT, sampling: Sampling = GREEDY) -> SchedulerOutput:
    """The prefill of three tokens in row 0, then one token a step."""
    first = step_id == 0
    return SchedulerOutput(
        step_id=step_id,
        rows=np.array([0], np.int32),
        starts=np.array([0 if first else len(prompt) + step_id - 1], np.int32),
        counts=np.array([len(prompt) if first else 1], np.int32),
        samples=np.array([True]),
        new_rows=[NewRow(0, np.array(prompt, np.int32), len(prompt), [1], sampling)] if first else [],
        block_rows=np.array([0] if step_id == 2 else [], np.int32),
        block_ids=np.array([2] if step_id == 2 else [], np.int32),
    )


Start = Callable[[int], tuple[ObservedWorker, UniprocExecutor]]


@pytest.fixture
def start() -> Iterator[Start]:
    started = []

    def start(depth: int) -> tuple[ObservedWorker, UniprocExecutor]:
        worker = ObservedWorker(depth=depth)
        executor = UniprocExecutor(CONFIG, (), worker)
        executor.start(lambda done, total: None, lambda error: None)
        started.append((worker, executor))
        return worker, executor

    yield start
    for worker, executor in started:
        worker.gate.set()
        executor.shutdown()


@DEPTHS
def test_steps_are_carried_out_in_the_order_given(start: Start, depth: int) -> None:
    worker, executor = start(depth)
    results = []
    for step_id in range(4):
        executor.execute(step(step_id))
        results.append(executor.sample())
    outputs = [pending.result() for pending in results]
    assert [output.step_id for output in outputs] == [0, 1, 2, 3]
    assert [int(output.token_ids[0]) for output in outputs] == expected_tokens(PROMPT, 4)
    assert [name for name, _ in worker.calls] == ["execute", "sample"] * 4
    assert not worker.checker.violations


@DEPTHS
def test_each_mask_reaches_the_step_it_was_given_for(start: Start, depth: int) -> None:
    worker, executor = start(depth)
    masks = [GrammarMask(np.array([0], np.int32), np.full((1, 8), step_id, np.int32)) for step_id in range(3)]
    given = [masks[0], None, masks[2]]
    results = []
    for step_id, mask in enumerate(given):
        executor.execute(step(step_id))
        results.append(executor.sample(mask) if mask is not None else executor.sample())
    assert [pending.result().step_id for pending in results] == [0, 1, 2]
    assert all(found is mask for found, mask in zip(worker.masks, given, strict=True))


def test_one_step_at_a_time_needs_no_thread(start: Start) -> None:
    worker, executor = start(1)
    executor.execute(step(0))
    executor.sample()
    assert worker.calls == [(name, threading.current_thread().name) for name in ("execute", "sample")]


def test_steps_in_flight_do_not_hold_up_the_caller(start: Start) -> None:
    worker, executor = start(2)
    worker.gate.clear()
    executor.execute(step(0))
    first = executor.sample()
    executor.execute(step(1))
    second = executor.sample()
    assert not first.sampled.done()
    worker.gate.set()
    assert second.result().step_id == 1
    assert first.sampled.done()
    assert {thread for _, thread in worker.calls} == {"worker_0"}


@DEPTHS
def test_failing_forward_pass_surfaces_in_the_result(start: Start, depth: int) -> None:
    worker, executor = start(depth)
    worker.fail_steps.add(1)
    for step_id in range(3):
        executor.execute(step(step_id))
        pending = executor.sample()
        if step_id == 1:
            with pytest.raises(InjectedError, match="step 1"):
                pending.result()
        else:
            assert pending.result().step_id == step_id
    assert [name for name, _ in worker.calls] == ["execute", "sample", "execute", "execute", "sample"]


@DEPTHS
def test_failing_sampling_surfaces_in_the_result(start: Start, depth: int) -> None:
    worker, executor = start(depth)
    worker.fail_sample = True
    executor.execute(step(0))
    pending = executor.sample()
    with pytest.raises(InjectedError, match="sample"):
        pending.result()


def test_sample_without_execute_is_a_mistake(start: Start) -> None:
    _, executor = start(1)
    executor.execute(step(0))
    executor.sample()
    with pytest.raises(AssertionError, match="sample without execute"):
        executor.sample()


@DEPTHS
def test_shutdown_is_idempotent(start: Start, depth: int) -> None:
    _, executor = start(depth)
    executor.execute(step(0))
    executor.sample().result()
    executor.shutdown()
    executor.shutdown()


def test_shutdown_before_start_does_nothing() -> None:
    executor = UniprocExecutor(CONFIG, (), ObservedWorker())
    executor.shutdown()


def test_shutdown_does_not_wait_for_steps_in_flight(start: Start) -> None:
    worker, executor = start(2)
    worker.gate.clear()
    executor.execute(step(0))
    pending = executor.sample()
    executor.shutdown()
    assert pending.sampled.cancelled()


def test_start_failure_reaches_the_caller() -> None:
    class BrokenWorker(PagedFakeWorker):
        def load(self, report: Callable[[int, int], None]) -> WorkerInfo:
            raise StartupError("no such file")

    with pytest.raises(StartupError, match="no such file"):
        UniprocExecutor(CONFIG, (), BrokenWorker()).start(lambda done, total: None, lambda error: None)


class TestNullModel:
    CONFIG = EngineConfig(model=ModelOptions(model="null"))

    def test_needs_no_model(self) -> None:
        assert isinstance(make_worker(self.CONFIG, ()), NullWorker)
        executor = make_executor(self.CONFIG, ())
        info = executor.start(lambda done, total: None, lambda error: None)
        assert info.max_steps_in_flight == 1
        executor.shutdown()

    @pytest.mark.parametrize(("num_blocks", "asked", "given"), [(5, 0, 32), (5, 100, 32), (5, 20, 20), (0, 40, 40)])
    def test_context_always_fits_its_cache(self, num_blocks: int, asked: int, given: int) -> None:
        config = EngineConfig(
            model=ModelOptions(model="null", max_model_len=asked),
            cache=CacheOptions(block_size=8, num_kv_blocks=num_blocks),
            scheduler=SchedulerOptions(max_steps_in_flight=2),
        )
        info = NullWorker(config).load(lambda done, total: None)
        assert info.max_model_len == given <= (info.num_blocks - 1) * 8
        assert info.max_steps_in_flight == 2

    def test_draws_printable_characters_by_prompt_seed_and_position(self) -> None:
        def draw(seed: int, prompt: Sequence[int] = PROMPT, temperature: float = 1.0) -> list[int]:
            worker = NullWorker(self.CONFIG)
            worker.load(lambda done, total: None)
            drawn = []
            for step_id in range(20):
                worker.execute(step(step_id, prompt, Sampling(temperature=temperature, seed=seed)))
                drawn += worker.sample().result().token_ids.tolist()
            return drawn

        assert draw(1) == draw(1)
        assert draw(1) != draw(2)
        assert draw(1, (5, 6, 8)) != draw(1)
        assert draw(1, temperature=0.0) == draw(2, temperature=0.0)
        assert all(32 <= token_id < 127 for token_id in draw(1))
        assert len(set(draw(1))) > 10


def test_next_step_is_issued_while_the_device_is_at_the_last_one() -> None:
    """Of a worker that does not wait for its device."""

    class DeviceWorker(ObservedWorker):
        def sample(self, mask: GrammarMask | None = None) -> Any:
            output, done = super().sample(mask), threading.Event()
            devices.append(done)
            return DueOutput(output, lambda: done.wait(timeout=30))

    devices: list[threading.Event] = []
    worker = DeviceWorker(depth=2)
    executor = UniprocExecutor(CONFIG, (), worker)
    executor.start(lambda done, total: None, lambda error: None)
    results = []
    for step_id in range(2):
        executor.execute(step(step_id))
        results.append(executor.sample())
    for launched in results:
        launched.sampled.result(timeout=30)
    assert [name for name, _ in worker.calls] == ["execute", "sample"] * 2
    assert not any(done.is_set() for done in devices)
    for done in devices:
        done.set()
    assert [launched.result().step_id for launched in results] == [0, 1]
    executor.shutdown()
