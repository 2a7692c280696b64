"""DeviceEngine: a core with a model of random weights on a device, in this process."""

from __future__ import annotations

import gc
import json
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from core_proc.engine_core import EngineCore
from core_proc.request import make_request
from gpu_executor.uniproc import UniprocExecutor
from gpu_executor.worker import Worker
from protos.config import EngineConfig, build
from protos.messages import EngineCoreRequest, Sampling

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpu_executor.executor import PendingOutput
    from protos.step import GrammarMask, SchedulerOutput
    from tests.gpu.device_sizes import DeviceSizes

BLOCK_SIZE = 16
GREEDY = Sampling(ignore_eos=True)


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


class DeviceEngine:
    """Greedy, and to the number of tokens asked for."""

    def __init__(self, sizes: DeviceSizes, weights: dict[str, torch.Tensor] | None = None, **options: Any) -> None:
        """`weights` by their Hugging Face names; random ones if there are none."""
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory)
            (path / "config.json").write_text(
                json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama", **sizes.model})
            )
            self.config = build(
                EngineConfig,
                **{
                    "model": str(path),
                    "load_format": "dummy",
                    "device": sizes.device.type,
                    "dtype": str(sizes.dtype).removeprefix("torch."),
                    "num_kv_blocks": 1 + sizes.kv_tokens // BLOCK_SIZE,
                    "max_num_seqs": max(sizes.batches),
                    "block_size": BLOCK_SIZE,
                    **options,
                },
            )
            self.worker = TimedWorker(self.config)
            executor = UniprocExecutor(self.config, (), self.worker)
            self.core = EngineCore(self.config, (), executor=executor)
        if weights is not None:
            self._fill(weights)
        self._num_requests = 0
        self.logprobs: list[float] = []
        """Of tokens drawn and of those of prompts, where requests ask: in the order in which they came."""
        self.prompt_logprobs: list[float] = []

    @torch.inference_mode()
    def _fill(self, weights: dict[str, torch.Tensor]) -> None:
        runner = self.worker._runner
        assert runner is not None
        for name, target in runner.model.weights().items():
            for part, view in target.pieces():
                view.copy_(weights[name][part])

    def start(self, prompts: Sequence[Sequence[int]], num_tokens: int, sampling: Sampling = GREEDY) -> range:
        """Queues a request for each prompt; their handles."""
        first = self._num_requests
        self._num_requests += len(prompts)
        for handle, prompt in enumerate(prompts, first):
            message = EngineCoreRequest(
                handle=handle,
                prompt_token_ids=np.array(prompt, "<i4").tobytes(),
                sampling=sampling,
                max_tokens=num_tokens,
            )
            self.core.scheduler.add(
                make_request(message, 0, BLOCK_SIZE, self.core.ready.max_model_len, time.monotonic())
            )
        return range(first, self._num_requests)

    def step(self) -> list[tuple[int, int]]:
        """Issues a step; (handle, token) of what came back."""
        self.core.step()
        found = []
        for outputs in self.core.scheduler.events.take().values():
            if outputs.logprobs is not None:
                self.logprobs += np.frombuffer(outputs.logprobs.logprobs, "<f4").tolist()
            for told in outputs.prompt_logprobs:
                self.prompt_logprobs += np.frombuffer(told.columns.logprobs, "<f4").tolist()
            handles = np.frombuffer(outputs.handles, "<i8").tolist()
            found += list(zip(handles, np.frombuffer(outputs.token_ids, "<i4").tolist(), strict=True))
        return found

    def generate(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, sampling: Sampling = GREEDY
    ) -> list[list[int]]:
        """What each prompt goes on with, all at once."""
        handles = self.start(prompts, num_tokens, sampling)
        texts: dict[int, list[int]] = {handle: [] for handle in handles}
        while self.core.has_work:
            for handle, token_id in self.step():
                texts[handle].append(token_id)
        return list(texts.values())

    def close(self) -> None:
        """Gives the device's memory back."""
        self.core.shutdown()
        del self.worker, self.core
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
