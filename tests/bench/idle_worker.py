"""A worker's process that computes nothing, to time what is around it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import numpy as np

from gpu_executor import worker_proc
from gpu_executor.null import NullWorker
from protos.step import ModelRunnerOutput, SchedulerOutput

if TYPE_CHECKING:
    from protos.config import EngineConfig
    from protos.place import Place
    from protos.step import GrammarMask


class IdleWorker(NullWorker):
    """Draws the same token for every row."""

    def __init__(self, config: EngineConfig, eos_token_ids: tuple[int, ...], place: Place) -> None:
        super().__init__(config)
        self._tokens = np.full(config.scheduler.max_num_seqs, 65, np.int32)
        self._executing: SchedulerOutput

    def execute(self, step: SchedulerOutput) -> None:
        self._executing = step

    def sample(self, mask: GrammarMask | None = None) -> ModelRunnerOutput:
        step = self._executing
        return ModelRunnerOutput(step.step_id, self._tokens[: len(step.rows)])


if __name__ == "__main__":
    sys.exit(worker_proc.main(IdleWorker))
