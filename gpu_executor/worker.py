"""Worker: one device's life, from the config to the tokens of each step."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

# Read by torch's OpenMP when it loads. A thread that waits by spinning on a core that another process
# needs makes every parallel region last a scheduler's time slice; one that sleeps costs microseconds.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

from gpu_executor.executor import WorkersDiedError
from model_runner.device import make_device
from model_runner.models import full_spec
from model_runner.runner import ModelRunner
from model_runner.shard import check_sizes
from model_runner.stage import check_stages
from model_runner.step_trace import StepTrace
from model_runner.weights import check_weights
from protos.errors import AdapterError, StartupError
from protos.model_files import read_model_spec, resolve_model
from protos.place import ONLY

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpu_executor.executor import PendingOutput
    from model_runner.device import DevicePolicy
    from protos.adapter import Adapter
    from protos.config import EngineConfig
    from protos.place import Place
    from protos.step import GrammarMask, ModelRunnerOutput, SchedulerOutput, WorkerInfo


class Worker:
    """Holds a ModelRunner once loaded; `execute` and `sample` may run on another thread than `load` did."""

    def __init__(self, config: EngineConfig, eos_token_ids: tuple[int, ...], place: Place = ONLY) -> None:
        self._config = config
        self._eos_token_ids = eos_token_ids
        self._place = place
        self._runner: ModelRunner | None = None
        self._policy: DevicePolicy | None = None
        self._trace: StepTrace | None = None

    def load(self, report: Callable[[int, int], None]) -> WorkerInfo:
        """Finds the model, sizes the cache and reads the weights; `report(done, total)` counts their bytes.

        Raises StartupError, one line, with the root cause.
        """
        path = resolve_model(self._config.model.model)
        try:
            spec = full_spec(path, read_model_spec(path))
            check_sizes(spec, self._place)
            check_stages(spec, self._place)
            policy = make_device(self._config, spec, self._place)
            check_weights(path, spec, self._config.model.load_format, policy)
            policy.workers.meet()
            runner = ModelRunner(self._config, spec, self._eos_token_ids, policy)
            info = runner.load(path, report)
        except (MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            raise StartupError(
                f"{path}: out of memory while loading ({_cause(error)}); lower --kv-cache-memory or "
                "--gpu-memory-utilization, or use a 16-bit --dtype"
            ) from None
        self._runner, self._policy = runner, policy
        return info

    def execute(self, step: SchedulerOutput) -> None:
        """Runs the forward pass of a step. Raises WorkersDiedError once the device is of no use any more."""
        if self._trace is not None:
            self._trace.step_begins()
        try:
            self._loaded().execute(step)
        except torch.AcceleratorError as error:
            raise self.what_it_means(error) from error

    def sample(self, mask: GrammarMask | None = None) -> PendingOutput:
        """Draws the tokens of the step last executed, of grammars' rows among those the mask allows; raises likewise,
        and so does what it returns."""
        try:
            return WorkerOutput(self._loaded().sample(mask), self)
        except torch.AcceleratorError as error:
            raise self.what_it_means(error) from error

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        """Raises AdapterError where it cannot be loaded, and WorkersDiedError likewise; then the slot is empty."""
        try:
            self._loaded().load_adapter(slot, adapter)
        except torch.AcceleratorError as error:
            raise self.what_it_means(error) from error
        except (MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            raise AdapterError(f"{adapter.path}: out of memory while loading ({_cause(error)})") from None

    def unload_adapter(self, slot: int) -> None:
        self._loaded().unload_adapter(slot)

    def what_it_means(self, error: torch.AcceleratorError) -> Exception:
        """The error itself where the next step may do better."""
        if self._policy is None or self._policy.answers():
            return error
        return WorkersDiedError(f"{self._policy.device} is lost: {_cause(error)}")

    def start_profile(self) -> None:
        """Begins to record what steps do on the device, on their thread."""
        self._trace = StepTrace()

    def stop_profile(self) -> dict[str, bytes]:
        """Ends that, on the same thread; files by their names."""
        if self._trace is None:
            return {}
        trace, self._trace = self._trace, None
        return {"trace.json.gz": trace.finish()}

    def _loaded(self) -> ModelRunner:
        assert self._runner is not None, "load comes first"
        return self._runner


def _is_out_of_memory(error: Exception) -> bool:
    """torch's own error for a GPU, and a plain RuntimeError of its allocator for a CPU."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in _cause(error)


def _cause(error: Exception) -> str:
    return str(error).partition("\n")[0]


class WorkerOutput:
    """A step's result; errors of the device show here, whichever step they are of."""

    def __init__(self, pending: PendingOutput, worker: Worker) -> None:
        self._pending, self._worker = pending, worker

    def result(self) -> ModelRunnerOutput:
        try:
            return self._pending.result()
        except torch.AcceleratorError as error:
            raise self._worker.what_it_means(error) from error
