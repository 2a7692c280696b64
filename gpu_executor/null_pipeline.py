"""NullPipeline: the stages of a model that is none, each as long at a step as it is told."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from gpu_executor.null import DueOutput, NullWorker

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpu_executor.executor import WorkersDiedError
    from protos.adapter import Adapter
    from protos.config import EngineConfig
    from protos.step import GrammarMask, SchedulerOutput, WorkerInfo


class NullPipeline:
    """An executor. A stage takes a step when it is done with the one before and the stage before it with this one.

    Nothing runs meanwhile, so the time of many stages costs one process none: what is measured is how well
    whoever issues steps keeps the stages busy. `clock` and `sleep` are in seconds.
    """

    def __init__(
        self,
        config: EngineConfig,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._config, self._clock, self._sleep = config, clock, sleep
        at_once = msgspec.structs.replace(config.executor, null_step_ms=0.0)
        self._worker = NullWorker(msgspec.structs.replace(config, executor=at_once))
        self._stage_seconds = config.executor.null_step_ms / 1e3
        self._free_at = [0.0] * config.parallel.pipeline_parallel_size
        """When each stage is done with what it was given."""

    def start(self, report: Callable[[int, int], None], died: Callable[[WorkersDiedError], None]) -> WorkerInfo:
        num_stages = len(self._free_at)
        max_steps_in_flight = self._config.scheduler.max_steps_in_flight or num_stages
        info = self._worker.load(report)
        return msgspec.structs.replace(info, num_stages=num_stages, max_steps_in_flight=max_steps_in_flight)

    def execute(self, step: SchedulerOutput) -> None:
        done_at = self._clock()
        for stage, free_at in enumerate(self._free_at):
            done_at = max(done_at, free_at) + self._stage_seconds
            self._free_at[stage] = done_at
        self._worker.execute(step)

    def sample(self, mask: GrammarMask | None = None) -> DueOutput:
        done_at = self._free_at[-1]
        return DueOutput(self._worker.sample(mask).result(), lambda: self._wait_until(done_at))

    def _wait_until(self, done_at: float) -> None:
        if (left := done_at - self._clock()) > 0:
            self._sleep(left)

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        self._worker.load_adapter(slot, adapter)

    def unload_adapter(self, slot: int) -> None:
        self._worker.unload_adapter(slot)

    def start_profile(self) -> None:
        pass

    def stop_profile(self) -> dict[str, bytes]:
        return {}

    def shutdown(self) -> None:
        pass
