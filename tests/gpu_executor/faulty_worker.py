"""A worker's process whose null worker has the faults that the environment names: FAULTS is JSON, by rank, of

load: "known" | "unknown" | "killed"   how it fails to start
num_blocks: n                          that it claims to hold
fail: n                                step whose forward pass raises
adapter: "known" | "unknown"           how it fails to load one
large: n                               bytes of log-probabilities added to every output
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from gpu_executor import worker_proc
from gpu_executor.null import NullWorker
from protos.errors import AdapterError, StartupError
from protos.step import Logprobs
from tests.fakes import InjectedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from protos.adapter import Adapter
    from protos.config import EngineConfig
    from protos.place import Place
    from protos.step import GrammarMask, ModelRunnerOutput, SchedulerOutput, WorkerInfo


class FaultyWorker(NullWorker):
    def __init__(self, config: EngineConfig, eos_token_ids: tuple[int, ...], place: Place) -> None:
        super().__init__(config)
        self._place = place
        self._faults = json.loads(os.environ.get("FAULTS", "{}")).get(str(place.rank), {})

    def load(self, report: Callable[[int, int], None]) -> WorkerInfo:
        assert (self._place.local_rank, self._place.local_size) == (self._place.rank, self._config.parallel.num_workers)
        assert os.path.exists(self._place.rendezvous.removeprefix("file://"))
        report(0, 10)
        match self._faults.get("load"):
            case "known":
                raise StartupError("the weights are broken")
            case "unknown":
                raise InjectedError("load\nand more lines")
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
        info = super().load(lambda done, total: None)
        report(10, 10)
        return msgspec.structs.replace(
            info, num_blocks=self._faults.get("num_blocks", info.num_blocks), weight_bytes=10, kv_cache_bytes=1000
        )

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        match self._faults.get("adapter"):
            case "known":
                raise AdapterError("there is no room for it")
            case "unknown":
                raise InjectedError("adapter\nand more lines")
        super().load_adapter(slot, adapter)

    def execute(self, step: SchedulerOutput) -> None:
        if step.step_id == self._faults.get("fail"):
            raise InjectedError(f"step {step.step_id}")
        super().execute(step)

    def sample(self, mask: GrammarMask | None = None) -> ModelRunnerOutput:
        output = super().sample(mask).result()
        if size := self._faults.get("large"):
            cells = np.zeros(size // 4, np.int32)
            output = msgspec.structs.replace(output, logprobs=Logprobs(*([np.zeros(0, np.int32)] * 4), cells, cells))
        return output


if __name__ == "__main__":
    sys.exit(worker_proc.main(FaultyWorker))
