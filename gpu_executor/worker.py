"""Worker: one device's life, from the config to the tokens of each step."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

# Read by torch's OpenMP when it loads. A thread that waits by spinning on a core that another process
# needs makes every parallel region last a scheduler's time slice; one that sleeps costs microseconds.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

from model_runner.device import make_device
from model_runner.models import full_spec
from model_runner.runner import ModelRunner
from model_runner.shard import check_sizes
from model_runner.stage import check_stages
from model_runner.weights import check_weights
from protos.errors import StartupError
from protos.model_files import read_model_spec, resolve_model
from protos.place import ONLY

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpu_executor.executor import PendingOutput
    from protos.config import EngineConfig
    from protos.place import Place
    from protos.step import GrammarMask, SchedulerOutput, WorkerInfo


class Worker:
    """Holds a ModelRunner once loaded; `execute` and `sample` may run on another thread than `load` did."""

    def __init__(self, config: EngineConfig, eos_token_ids: tuple[int, ...], place: Place = ONLY) -> None:
        self._config = config
        self._eos_token_ids = eos_token_ids
        self._place = place
        self._runner: ModelRunner | None = None

    def load(self, report: Callable[[int, int], None]) -> WorkerInfo:
        """Finds the model, sizes the cache and reads the weights; `report(done, total)` counts their bytes.

        Raises StartupError, one line, with the root cause.
        """
        path = resolve_model(self._config.model.model)
        try:
            spec = full_spec(path, read_model_spec(path))
            check_sizes(spec, self._place)
            check_stages(spec, self._place)
            policy = make_device(self._config, spec, path, self._place)
            check_weights(path, spec, self._config.model.load_format, policy)
            policy.workers.meet()
            runner = ModelRunner(self._config, spec, self._eos_token_ids, policy)
            info = runner.load(path, report)
        except (MemoryError, RuntimeError) as error:
            cause = str(error).partition("\n")[0]
            # torch's own error for a GPU, and a plain RuntimeError of its allocator for a CPU.
            if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "allocate memory" not in cause:
                raise
            raise StartupError(
                f"{path}: out of memory while loading ({cause}); lower --kv-cache-memory or --gpu-memory-utilization, "
                "or use a 16-bit --dtype"
            ) from None
        self._runner = runner
        return info

    def execute(self, step: SchedulerOutput) -> None:
        """Runs the forward pass of a step."""
        self._loaded().execute(step)

    def sample(self, mask: GrammarMask | None = None) -> PendingOutput:
        """Draws the tokens of the step last executed, of grammars' rows among those the mask allows."""
        return self._loaded().sample(mask)

    def _loaded(self) -> ModelRunner:
        assert self._runner is not None, "load comes first"
        return self._runner
