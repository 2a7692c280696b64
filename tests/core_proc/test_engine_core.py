"""The loop's body, over executors in this process."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np
import pytest

from core_proc.engine_core import MAX_FAILED_STEPS, EngineCore
from core_proc.request import make_request
from gpu_executor.uniproc import UniprocExecutor
from protos.config import CacheOptions, EngineConfig, ModelOptions, SchedulerOptions
from protos.messages import EngineCoreRequest, FinishReason, Sampling
from protos.step import GrammarMask, ModelRunnerOutput
from tests.core_proc.harness import columns, encode_ids
from tests.fakes import EOS, PagedFakeWorker, expected_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from protos.step import GrammarMask

CONFIG = EngineConfig(cache=CacheOptions(block_size=4), scheduler=SchedulerOptions(max_num_batched_tokens=16))


class Engine:
    """An EngineCore over a fake worker, and what came out of it."""

    def __init__(self, depth: int = 1, worker: PagedFakeWorker | None = None, num_blocks: int = 17) -> None:
        self.worker = worker or PagedFakeWorker(num_blocks=num_blocks, max_model_len=64, budget=16, depth=depth)
        self.core = EngineCore(CONFIG, (EOS,), executor=UniprocExecutor(CONFIG, (EOS,), self.worker))
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.ends: dict[int, FinishReason] = {}

    def add(self, handle: int, prompt: range, max_tokens: int = 5) -> None:
        message = EngineCoreRequest(handle, encode_ids(list(prompt)), Sampling(seed=handle), max_tokens)
        self.core.scheduler.add(make_request(message, 0, 4, self.core.ready.max_model_len, 0.0))

    def step(self, apply_aborts: Callable[[], None] = lambda: None) -> bool:
        moved = self.core.step(apply_aborts)
        for outputs in self.core.scheduler.events.take().values():
            for handle, token_id in columns(outputs):
                self.tokens[handle].append(token_id)
            self.ends |= {finished.handle: finished.reason for finished in outputs.finished}
        self.core.scheduler.table.audit()
        assert not self.worker.checker.violations, self.worker.checker.violations
        return moved

    def run(self) -> None:
        while self.step():
            pass
        assert not self.core.has_work


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.core.shutdown()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_tokens_are_those_of_requests_that_run_alone(depth: int) -> None:
    engine = Engine(depth)
    for handle in range(6):
        engine.add(handle, range(handle, handle + 7), 12)
    engine.run()
    engine.core.shutdown()
    for handle in range(6):
        assert engine.tokens[handle] == expected_tokens(range(handle, handle + 7), 12, seed=handle)
    assert not engine.worker.false_reads


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_so_many_steps_are_in_flight_before_the_first_result_is_waited_for(depth: int) -> None:
    engine = Engine(depth)
    engine.add(1, range(6), 20)
    in_flight = []
    for _ in range(6):
        assert engine.step()
        in_flight.append(engine.core.num_steps_in_flight)
    assert in_flight == [*range(1, depth), *[depth - 1] * (7 - depth)]
    engine.core.scheduler.abort(0, [1])
    engine.run()
    engine.core.shutdown()


def test_ready_tells_what_the_worker_turned_out_to_hold(engine: Engine) -> None:
    ready = engine.core.ready
    assert (ready.max_model_len, ready.kv_capacity_tokens, ready.block_size) == (64, 64, 4)
    assert (ready.max_num_seqs, ready.device, ready.dtype) == (256, "fake", "none")


def test_nothing_to_do_is_told(engine: Engine) -> None:
    assert not engine.core.has_work
    assert not engine.step()


@pytest.mark.parametrize("max_tokens", [1, 5])
def test_aborts_count_before_the_results_of_the_step_that_ran(engine: Engine, max_tokens: int) -> None:
    engine.add(1, range(6), max_tokens)
    engine.step(lambda: engine.core.scheduler.abort(0, [1]))
    assert engine.ends == {1: FinishReason.ABORTED}
    assert not engine.tokens


def test_aborts_count_before_the_failure_of_the_step_that_ran(engine: Engine) -> None:
    engine.worker.fail_steps.add(0)
    engine.add(1, range(6))
    engine.add(2, range(6))
    engine.step(lambda: engine.core.scheduler.abort(0, [1]))
    assert engine.ends == {1: FinishReason.ABORTED}
    engine.run()
    assert engine.ends == {1: FinishReason.ABORTED, 2: FinishReason.MAX_TOKENS}, "the guilty one may be the other"


@pytest.mark.parametrize("depth", [1, 2])
def test_failing_step_ends_its_requests_and_the_engine_goes_on(depth: int) -> None:
    engine = Engine(depth)
    engine.worker.fail_steps.add(2)
    engine.add(1, range(6))
    engine.run()
    engine.add(2, range(6))
    engine.run()
    engine.core.shutdown()
    assert engine.ends == {1: FinishReason.ERROR, 2: FinishReason.MAX_TOKENS}
    assert engine.tokens[2] == expected_tokens(range(6), 5, seed=2)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_each_failing_step_is_logged_once_and_only_the_guilty_request_ends(
    depth: int, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(depth, num_blocks=65)
    engine.worker.poison_seeds[3] = 8
    for handle in range(6):
        engine.add(handle, range(handle, handle + 6))
    engine.run()
    engine.core.shutdown()
    assert engine.ends == dict.fromkeys(range(6), FinishReason.MAX_TOKENS) | {3: FinishReason.ERROR}
    for handle in range(6):
        expected = expected_tokens(range(handle, handle + 6), 5, seed=handle)
        assert engine.tokens[handle] == (expected[:3] if handle == 3 else expected)
    logged = [record for record in caplog.records if record.exc_info]
    assert len(logged) == engine.worker.num_failed <= depth + 4


def test_workers_whose_every_step_fails_are_given_up(engine: Engine) -> None:
    engine.worker.fail_steps |= set(range(10_000))
    for handle in range(1000):
        engine.add(handle, range(6))
    with pytest.raises(RuntimeError, match=f"{MAX_FAILED_STEPS} steps failed in a row"):
        engine.run()
    assert engine.worker.num_failed == MAX_FAILED_STEPS


def test_failing_steps_between_others_are_not_counted_against_the_workers(engine: Engine) -> None:
    engine.add(0, range(6), 50)
    for handle in range(1, 2 * MAX_FAILED_STEPS):
        engine.worker.poison_seeds[handle] = 0
        engine.add(handle, range(6))
    engine.run()
    assert engine.worker.num_failed > MAX_FAILED_STEPS
    assert engine.tokens[0] == expected_tokens(range(6), 50, seed=0)


class MiscountingWorker(PagedFakeWorker):
    """Forgets a token of its first step, or draws one too many."""

    wrong = -1

    def sample(self, mask: GrammarMask | None = None) -> ModelRunnerOutput:
        output = super().sample(mask)
        if output.step_id:
            return output
        return ModelRunnerOutput(0, np.resize(output.token_ids, len(output.token_ids) + self.wrong))


@pytest.mark.parametrize("wrong", [-1, 1])
def test_wrong_number_of_tokens_is_a_failed_step(wrong: int) -> None:
    worker = MiscountingWorker(num_blocks=17, max_model_len=64, budget=16)
    worker.wrong = wrong
    engine = Engine(worker=worker)
    engine.add(1, range(3))
    engine.add(2, range(3))
    engine.step()
    assert not engine.tokens
    engine.run()
    for handle in (1, 2):
        assert engine.tokens[handle] == expected_tokens(range(3), 5, seed=handle)
    assert engine.worker.num_failed == 0, "it was the step's result that was wrong"


def test_null_model_draws_the_same_tokens_alone_and_after_a_preemption() -> None:
    config = EngineConfig(
        model=ModelOptions(model="null"), cache=CacheOptions(block_size=8, num_kv_blocks=9), scheduler=CONFIG.scheduler
    )

    def run(*handles: int) -> dict[int, list[int]]:
        core = EngineCore(config, ())
        for handle in handles:
            message = EngineCoreRequest(handle, encode_ids([handle] * 9), Sampling(seed=handle, temperature=1.0), 30)
            core.scheduler.add(make_request(message, 0, 8, core.ready.max_model_len, 0.0))
        tokens: dict[int, list[int]] = defaultdict(list)
        while core.step():
            for outputs in core.scheduler.events.take().values():
                for handle, token_id in columns(outputs):
                    tokens[handle].append(token_id)
        if len(handles) > 1:
            assert core.scheduler.stats(0).preemptions > 0
        core.shutdown()
        return tokens

    together = run(1, 2, 3)
    assert together == run(1) | run(2) | run(3)
    assert {len(tokens) for tokens in together.values()} == {30}


def test_progress_of_loading_is_reported() -> None:
    reports = []
    worker = PagedFakeWorker(max_model_len=64)
    EngineCore(CONFIG, (EOS,), lambda done, total: reports.append((done, total)), UniprocExecutor(CONFIG, (), worker))
    assert reports == [(1, 1)]
