"""DeviceEngine: a core with a model of random weights on a device, in this process."""

from __future__ import annotations

import gc
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gpu_executor.uniproc import UniprocExecutor
from gpu_executor.worker import Worker
from protos.config import EngineConfig, build
from tests.model_runner.staged import Engine
from tests.model_runner.tiny import save_shape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpu_executor.executor import PendingOutput
    from protos.step import GrammarMask, SchedulerOutput
    from tests.gpu.device_sizes import DeviceSizes

BLOCK_SIZE = 16


class TimedWorker(Worker):
    """Counts the seconds that the host takes to begin what is asked of it."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, ())
        self.host_seconds = 0.0

    def execute(self, step: SchedulerOutput) -> None:
        start = time.perf_counter()
        super().execute(step)
        self.host_seconds += time.perf_counter() - start

    def sample(self, mask: GrammarMask | None = None) -> PendingOutput:
        start = time.perf_counter()
        pending = super().sample(mask)
        self.host_seconds += time.perf_counter() - start
        return pending


class DeviceEngine(Engine):
    """Greedy, and to the number of tokens asked for."""

    def __init__(self, sizes: DeviceSizes, weights: dict[str, torch.Tensor] | None = None, **options: Any) -> None:
        """`weights` by their Hugging Face names; random ones if there are none."""
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory)
            save_shape(path, **sizes.model)
            given = {
                "model": str(path),
                "load_format": "dummy",
                "device": sizes.device.type,
                "dtype": str(sizes.dtype).removeprefix("torch."),
                "num_kv_blocks": 1 + sizes.kv_tokens // BLOCK_SIZE,
                "max_num_seqs": max(sizes.batches),
                "block_size": BLOCK_SIZE,
            }
            config = build(EngineConfig, **given | options)
            self.worker = TimedWorker(config)
            super().__init__(path, config, executor=UniprocExecutor(config, (), self.worker))
        if weights is not None:
            self._fill(weights)

    @torch.inference_mode()
    def _fill(self, weights: dict[str, torch.Tensor]) -> None:
        runner = self.worker._runner
        assert runner is not None
        for name, target in runner.model.weights().items():
            for part, view in target.pieces():
                view.copy_(weights[name][part])

    def start(self, prompts: Sequence[Sequence[int]], num_tokens: int, **sampling: Any) -> list[int]:
        """Queues a request for each prompt; their handles."""
        return [self.add(prompt, num_tokens, **sampling) for prompt in prompts]

    def step_until(self, num_tokens: int) -> int:
        """Steps that bring at least so many tokens; how many they brought."""
        events = self.scheduler.events
        before = events.num_tokens
        while events.num_tokens < before + num_tokens:
            self.step()
        return events.num_tokens - before

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int, **sampling: Any) -> list[list[int]]:
        """What each prompt goes on with, all at once."""
        handles = self.start(prompts, num_tokens, **sampling)
        self.run()
        return [self.tokens[handle] for handle in handles]

    def close(self) -> None:
        """Gives the device's memory back."""
        self.core.shutdown()
        del self.worker, self.core, self.scheduler, self.executor
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
