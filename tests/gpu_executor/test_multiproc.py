"""WorkerGroup over LocalWorkers: workers in processes, with the null model."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from core_proc.engine_core import EngineCore
from core_proc.request import make_request
from gpu_executor.executor import StepFailedError, WorkersDiedError
from gpu_executor.factory import make_executor
from gpu_executor.group import WorkerGroup
from gpu_executor.multiproc import LocalWorkers
from protos.config import EngineConfig, build
from protos.errors import InvalidRequestError, StartupError
from protos.messages import EngineCoreRequest, Sampling
from protos.step import GrammarMask, NewRow, SchedulerOutput
from tests.core_proc.harness import encode_ids
from tests.e2e.serving import is_alive
from tests.gpu_executor.test_uniproc import step

if TYPE_CHECKING:
    from collections.abc import Iterator

    from protos.step import WorkerInfo

PATIENCE = 30.0


def config(**options: Any) -> EngineConfig:
    return build(EngineConfig, **({"model": "null", "executor": "multiproc", "tensor_parallel_size": 2} | options))


class Started:
    """Executors that a test started, what they reported and which deaths they told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.executors: list[WorkerGroup] = []
        self.reports: list[tuple[int, int]] = []
        self.deaths: queue.SimpleQueue[WorkersDiedError] = queue.SimpleQueue()
        self.info: WorkerInfo

    def __call__(self, faults: dict[int, dict[str, Any]] | None = None, **options: Any) -> WorkerGroup:
        self._monkeypatch.setenv("FAULTS", json.dumps(faults or {}))
        stall_seconds = options.pop("stall_seconds", 5.0)
        wanted = config(**options)
        executor = WorkerGroup(wanted, LocalWorkers(wanted, (), "tests.gpu_executor.faulty_worker"), stall_seconds)
        self.executors.append(executor)
        self.info = executor.start(lambda done, total: self.reports.append((done, total)), self.deaths.put)
        return executor


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Started]:
    descriptors = open_descriptors()
    started = Started(monkeypatch)
    yield started
    for executor in started.executors:
        executor.shutdown()
        executor.shutdown()
        assert not any(is_alive(worker.pid) for worker in executor.workers)
    assert open_descriptors().items() <= descriptors.items()


def open_descriptors() -> dict[str, str]:
    """By number, what is open in this process."""
    found = {}
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found[path.name] = os.readlink(path)
    return {number: name for number, name in found.items() if not name.endswith("/fd")}  # but for the listing's own


def run_step(executor: WorkerGroup, step_id: int) -> list[int]:
    executor.execute(step(step_id))
    return executor.sample().result().token_ids.tolist()


def run_steps(executor: WorkerGroup, first: int) -> None:
    """Steps until one raises: what befalls a worker whose tokens are not taken may be told after some results."""
    for step_id in range(first, 10_000):
        run_step(executor, step_id)


def until_gone(pid: int) -> None:
    while is_alive(pid):
        time.sleep(0)


def outputs_of(core: EngineCore) -> list[bytes]:
    """All that a core tells of some requests of many kinds, step by step, but for times."""
    for handle in range(8):
        sampling = Sampling(
            temperature=float(handle % 2), seed=handle, logprobs=3 if handle == 2 else None, prompt_logprobs=2
        )
        message = EngineCoreRequest(handle, encode_ids(list(range(handle, handle + 30))), sampling, 20 + handle)
        core.scheduler.add(make_request(message, 0, 16, core.ready.max_model_len, 0.0))
    told = []
    while core.step():
        for outputs in core.scheduler.events.take().values():
            ends = [(end.handle, end.reason) for end in outputs.finished]
            told.append(repr((outputs.handles, outputs.token_ids, outputs.logprobs, outputs.prompt_logprobs, ends)))
    core.shutdown()
    return told


@pytest.mark.parametrize(("depth", "sizes"), [(1, (2, 1)), (3, (1, 3))], ids=["one step", "steps in flight"])
def test_core_tells_the_same_as_with_one_worker(depth: int, sizes: tuple[int, int]) -> None:
    # A gap so long that what is in a step depends on no time.
    options: dict[str, Any] = {"max_num_batched_tokens": 50, "max_steps_in_flight": depth, "max_inter_token_gap": 3600}
    alone = config(tensor_parallel_size=1, **options)
    many = config(tensor_parallel_size=sizes[0], pipeline_parallel_size=sizes[1], **options)
    expected = outputs_of(EngineCore(alone, ()))
    assert len(expected) > 20
    assert outputs_of(EngineCore(many, ())) == expected


def test_auto_is_one_worker_in_place_or_a_process_each() -> None:
    kinds = {
        sizes: type(make_executor(config(executor="auto", tensor_parallel_size=sizes), ())).__name__ for sizes in (1, 2)
    }
    assert kinds == {1: "UniprocExecutor", 2: "WorkerGroup"}


def test_uniproc_with_several_workers_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="executor: uniproc is one worker, not 6"):
        config(executor="uniproc", pipeline_parallel_size=3)


def test_ray_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "gpu_executor.ray_executor", raising=False)
    with pytest.raises(StartupError, match=r"^--executor ray needs Ray: pip install 'tailrace\[ray\]'$"):
        make_executor(config(executor="ray"), ())


class TestStart:
    def test_tells_what_all_workers_hold_together(self, start: Started) -> None:
        start()
        assert start.reports[-1] == (20, 20)
        assert start.reports == sorted(start.reports)
        assert (start.info.weight_bytes, start.info.kv_cache_bytes) == (20, 2000)
        assert (start.info.num_blocks, start.info.vocab_size) == (32769, 512)

    @pytest.mark.parametrize(
        ("faults", "problem"),
        [
            ({1: {"load": "known"}}, r"^the weights are broken$"),
            ({0: {"load": "unknown"}, 1: {"load": "known"}}, r"^the weights are broken$"),
            ({1: {"load": "unknown"}}, r"^worker 1 \(pid \d+\): InjectedError: load$"),
            ({0: {"load": "killed"}}, r"^worker 0 \(pid \d+\) was ended by SIGKILL while it was loading$"),
            ({1: {"num_blocks": 7}}, r"^worker 1 holds 7 KV blocks .* worker 0 32769 .*; set --num-kv-blocks"),
        ],
    )
    def test_that_fails_says_why_and_leaves_nothing(
        self, start: Started, monkeypatch: pytest.MonkeyPatch, faults: Any, problem: str
    ) -> None:
        monkeypatch.setattr("gpu_executor.group.ROOT_CAUSE_SECONDS", 0.2)
        with pytest.raises(StartupError, match=problem):
            start(faults)
        (executor,) = start.executors
        assert len(executor.workers) == 2
        assert not any(is_alive(worker.pid) for worker in executor.workers)
        with pytest.raises(queue.Empty):
            start.deaths.get_nowait()

    def test_two_engines_at_once(self, start: Started) -> None:
        first, second = start(), start()
        assert run_step(first, 0) == run_step(second, 0)
        assert run_step(first, 1) == run_step(second, 1)

    def test_one_worker_may_have_a_process_too(self, start: Started, monkeypatch: pytest.MonkeyPatch) -> None:
        executor = make_executor(config(executor="multiproc", tensor_parallel_size=1), ())
        executor.start(lambda done, total: None, start.deaths.put)
        executor.execute(step(0))
        assert len(executor.sample().result().token_ids) == 1
        executor.shutdown()


class TestSteps:
    def test_masks_reach_their_steps(self, start: Started) -> None:
        executor = start()
        bits = np.zeros((1, 16), np.int32)
        bits[0, 2] = 1 << 5
        executor.execute(step(0))
        pending = executor.sample(GrammarMask(np.array([0], np.int32), bits))
        executor.execute(step(1))
        unmasked = executor.sample()
        assert pending.result().token_ids.tolist() == [69]
        assert unmasked.result().token_ids.tolist() != [69]

    def test_that_fails_on_all_workers_is_told_and_the_next_goes_on(self, start: Started) -> None:
        executor = start({0: {"fail": 1}, 1: {"fail": 1}})
        run_step(executor, 0)
        with pytest.raises(StepFailedError, match=r"^InjectedError: step 1$"):
            run_step(executor, 1)
        assert len(run_step(executor, 2)) == 1

    @pytest.mark.parametrize("guilty", [(1,), (0, 1)], ids=["the last stage", "both"])
    def test_that_fails_from_some_stage_on_is_told_and_the_next_goes_on(
        self, start: Started, guilty: tuple[int, ...]
    ) -> None:
        faults = {rank: {"fail": 1} for rank in guilty}
        executor = start(faults, tensor_parallel_size=1, pipeline_parallel_size=2)
        for step_id in range(20):
            if step_id == 1:
                with pytest.raises(StepFailedError, match=r"^InjectedError: step 1$"):
                    run_step(executor, step_id)
            else:
                assert len(run_step(executor, step_id)) == 1

    def test_that_failed_is_over_before_an_early_stage_has_told_of_its_part(self, start: Started) -> None:
        executor = start({0: {"fail": 1}, 1: {"fail": 1}}, tensor_parallel_size=1, pipeline_parallel_size=2)
        run_step(executor, 0)
        os.kill(executor.workers[0].pid, signal.SIGSTOP)
        with pytest.raises(StepFailedError):
            run_step(executor, 1)
        os.kill(executor.workers[0].pid, signal.SIGCONT)
        executor._take_in(PATIENCE)
        assert len(run_step(executor, 2)) == 1

    def test_that_fails_in_an_early_stage_alone_ends_all(self, start: Started, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("gpu_executor.group.FAILURE_SECONDS", 0.1)
        executor = start({0: {"fail": 1}}, tensor_parallel_size=1, pipeline_parallel_size=2)
        with pytest.raises(WorkersDiedError, match=r"worker 0 .* failed in step 1"):
            run_steps(executor, 0)

    @pytest.mark.parametrize(("guilty", "innocent"), [(0, 1), (1, 0)])
    def test_that_fails_on_one_worker_ends_all(
        self, start: Started, monkeypatch: pytest.MonkeyPatch, guilty: int, innocent: int
    ) -> None:
        monkeypatch.setattr("gpu_executor.group.FAILURE_SECONDS", 0.1)
        executor = start({guilty: {"fail": 1}})
        run_step(executor, 0)
        problem = rf"worker {guilty} .* failed in step 1 \(InjectedError: step 1\), not so worker {innocent} "
        with pytest.raises(WorkersDiedError, match=problem) as raised:
            run_steps(executor, 1)
        assert not raised.value.was_killed

    def test_larger_than_the_ring_both_ways(self, start: Started) -> None:
        """The core is writing when the worker is, too: neither waits for the other for ever."""
        executor = start({0: {"large": 3 << 20}}, max_num_seqs=1, max_steps_in_flight=2, max_model_len=1 << 20)
        results = []
        prompt = np.arange(1 << 20, dtype=np.int32)
        for step_id in range(3):
            row = NewRow(0, prompt, len(prompt), [1], Sampling())
            first = step(0)
            executor.execute(
                SchedulerOutput(step_id, first.rows, first.starts, first.counts, first.samples, new_rows=[row])
            )
            results.append(executor.sample())
        outputs = [pending.result() for pending in results]
        assert [output.step_id for output in outputs] == [0, 1, 2]
        assert all(output.logprobs is not None and output.logprobs.top_ids.nbytes == 3 << 20 for output in outputs)


class TestDeath:
    @pytest.mark.parametrize("rank", [0, 1])
    def test_while_steps_run_is_told_with_worker_and_step(self, start: Started, rank: int) -> None:
        executor = start(null_step_ms=20)
        for step_id in range(3):
            run_step(executor, step_id)
        executor.execute(step(3))
        executor.sample()
        os.kill(executor.workers[rank].pid, signal.SIGKILL)
        # One whose tokens are not taken may be behind.
        last = "its last step was [23]" if rank == 0 else "(its last step was [0-3]|it had no step yet)"
        problem = rf"^worker {rank} \(pid \d+\) was ended by SIGKILL; {last}$"
        with pytest.raises(WorkersDiedError, match=problem):
            run_steps(executor, 4)
        with pytest.raises(WorkersDiedError, match=problem):
            executor.execute(step(1000))
        death = start.deaths.get(timeout=PATIENCE)
        assert str(death).startswith(f"worker {rank} ")
        assert death.was_killed

    def test_while_there_is_nothing_to_do_is_told_too_and_ends_the_others(self, start: Started) -> None:
        executor = start()
        run_step(executor, 0)
        os.kill(executor.workers[1].pid, signal.SIGKILL)
        assert "worker 1 " in str(start.deaths.get(timeout=PATIENCE))
        until_gone(executor.workers[0].pid)
        with pytest.raises(WorkersDiedError, match="worker 1 "):
            run_step(executor, 1)

    def test_worker_that_hangs_is_named_in_the_log(self, start: Started, caplog: pytest.LogCaptureFixture) -> None:
        executor = start(stall_seconds=0.05)
        run_step(executor, 0)
        os.kill(executor.workers[0].pid, signal.SIGSTOP)
        executor.execute(step(1))
        pending = executor.sample()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("gpu_executor.group.WATCH_SECONDS", 0.02)
            patch.setattr(WorkerGroup, "_tell_stall", _tell_and_go_on(executor))
            assert len(pending.result().token_ids) == 1
        told = next(text for text in map(logging.LogRecord.getMessage, caplog.records) if text.startswith("step 1 "))
        assert told.startswith("step 1 is not back after 0 s. worker 0 (pid ")
        assert "state T: its last step was 0; worker 1 (pid " in told

    def test_worker_that_does_not_leave_is_made_to(self, start: Started, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("gpu_executor.group.STOP_SECONDS", 0.05)
        executor = start()
        os.kill(executor.workers[1].pid, signal.SIGSTOP)
        executor.shutdown()
        assert not any(is_alive(worker.pid) for worker in executor.workers)


def _tell_and_go_on(executor: WorkerGroup) -> Any:
    tell = WorkerGroup._tell_stall

    def told(self: WorkerGroup, step_id: int, seconds: float) -> None:
        tell(self, step_id, seconds)
        os.kill(executor.workers[0].pid, signal.SIGCONT)

    return told
