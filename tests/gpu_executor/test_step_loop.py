"""StepLoop: with steps in flight the next one is begun before the last one's result is there; results come in order."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from gpu_executor import wire
from gpu_executor.executor import WorkersDiedError
from gpu_executor.null import DueOutput
from gpu_executor.step_loop import StepLoop
from protos.step import ModelRunnerOutput
from tests.fakes import InjectedError
from tests.gpu_executor.test_uniproc import step

if TYPE_CHECKING:
    from protos.step import GrammarMask, SchedulerOutput


class Device:
    """A worker whose results are there when the test says so. `faults` name what fails, by step."""

    def __init__(self, **faults: int) -> None:
        self.begun: list[int] = []
        self.done = threading.Event()
        self._faults = faults

    def load(self, report: Any) -> Any:
        raise AssertionError("not used")

    def execute(self, step: SchedulerOutput) -> None:
        self.begun.append(step.step_id)
        self._fail("execute", step.step_id)

    def sample(self, mask: GrammarMask | None = None) -> DueOutput:
        step_id = self.begun[-1]
        self._fail("sample", step_id)

        def wait() -> None:
            assert self.done.wait(timeout=30)
            self._fail("result", step_id)

        return DueOutput(ModelRunnerOutput(step_id, np.array([step_id], np.int32)), wait)

    def _fail(self, what: str, step_id: int) -> None:
        if self._faults.get(what) == step_id:
            raise InjectedError(what)


def run(loop: StepLoop, num_steps: int) -> None:
    for step_id in range(num_steps):
        assert loop.handle(wire.Execute(step(step_id)))
        assert loop.handle(wire.Sample())


def test_steps_are_begun_before_the_first_result_is_there_and_told_in_order() -> None:
    device, told = Device(), []
    loop = StepLoop(device, True, told.append, 4)
    run(loop, 4)
    assert device.begun == [0, 1, 2, 3]
    assert told == []
    device.done.set()
    loop.close()
    assert [message.output.step_id for message in told] == [0, 1, 2, 3]
    assert not loop.handle(wire.Stop())


@pytest.mark.parametrize("fault", ["execute", "sample", "result"])
@pytest.mark.parametrize("num_steps", [1, 3], ids=["one at a time", "in flight"])
def test_step_that_fails_anywhere_is_told_in_its_place(fault: str, num_steps: int) -> None:
    device, told = Device(**{fault: 1}), []
    device.done.set()
    loop = StepLoop(device, True, told.append, num_steps)
    run(loop, 3)
    loop.close()
    assert [type(message).__name__ for message in told] == ["Drawn", "StepFailed", "Drawn"]
    assert told[1] == wire.StepFailed(1, f"InjectedError: {fault}")


@pytest.mark.parametrize("num_steps", [1, 2])
def test_worker_whose_tokens_are_not_taken_tells_failures_alone(num_steps: int) -> None:
    device, told = Device(result=1), []
    device.done.set()
    loop = StepLoop(device, False, told.append, num_steps)
    run(loop, 3)
    loop.close()
    assert [type(message).__name__ for message in told] == ["StepFailed"]


@pytest.mark.parametrize("num_steps", [1, 2])
def test_worker_whose_device_is_lost_ends(num_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Lost(Device):
        def execute(self, step: SchedulerOutput) -> None:
            super().execute(step)
            raise WorkersDiedError("the device is lost")

    told: list[wire.FromWorker] = []

    def end(code: int) -> None:
        ends.append(code)
        raise OSError

    ends: list[int] = []
    monkeypatch.setattr("os._exit", end)
    loop = StepLoop(Lost(), True, told.append, num_steps)
    with contextlib.suppress(OSError):
        run(loop, 1)
    loop.close()
    assert (ends, told) == ([1], [])


def test_core_that_is_gone_ends_the_sending_quietly() -> None:
    def send(message: wire.FromWorker) -> None:
        raise BrokenPipeError

    device = Device()
    device.done.set()
    loop = StepLoop(device, True, send, 2)
    run(loop, 2)
    loop.close()
