"""ModelRunner: a step in, tokens out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from model_runner.device import make_device
from model_runner.input_batch import InputBatch
from model_runner.kv_cache import allocate_cache, fit_cache
from model_runner.models import make_model
from model_runner.sampler import Sampler
from model_runner.weights import load_weights
from protos.step import ModelRunnerOutput, WorkerInfo

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from protos.config import EngineConfig
    from protos.model_spec import ModelSpec
    from protos.step import SchedulerOutput


class ModelRunner:
    """One model on one device. Steps are carried out in the order they come, `execute` and `sample` in pairs."""

    def __init__(self, config: EngineConfig, spec: ModelSpec, eos_token_ids: tuple[int, ...]) -> None:
        """Decides what fits and allocates the model, unfilled. Raises StartupError where it does not fit."""
        self._config, self._spec = config, spec
        self._policy = make_device(config, spec)
        self._size = fit_cache(config, spec, self._policy)
        self.model = make_model(spec, self._size.max_model_len, self._policy)
        self._batch = InputBatch(
            config.scheduler.max_num_seqs,
            self._size.max_model_len,
            config.cache.block_size,
            tuple(token_id for token_id in eos_token_ids if token_id < spec.vocab_size),
            self._policy,
        )
        self._sampler = Sampler(self._policy)
        self._kv_caches = allocate_cache(self._size, spec, self._policy, config.cache.block_size)
        self._step: SchedulerOutput | None = None
        self._hidden = torch.empty(0)

    def load(self, path: Path, report: Callable[[int, int], None]) -> WorkerInfo:
        """Fills the model's weights. Raises StartupError naming the file and the tensor at fault."""
        table = self.model.weights()
        load_weights(path, self._spec, table, report)
        return WorkerInfo(
            num_blocks=self._size.num_blocks,
            max_model_len=self._size.max_model_len,
            vocab_size=self._spec.vocab_size,
            dtype=self._policy.dtype_name,
            device=self._policy.device.type,
            weight_bytes=sum(weight.nbytes for weight in table.values()),
            kv_cache_bytes=self._size.num_bytes,
            max_steps_in_flight=self._config.scheduler.max_steps_in_flight or self._policy.max_steps_in_flight,
        )

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> None:
        """Applies the step's changes and runs the forward pass; `sample` then draws its tokens."""
        self._step = step
        self._batch.apply(step)
        self._hidden = self.model.forward(self._batch.forward_batch(step, self._kv_caches))

    @torch.inference_mode()
    def sample(self) -> ModelRunnerOutput:
        """Draws a token for each row of the step last executed that is due one."""
        step = self._step
        assert step is not None, "sample without execute"
        rows, positions = step.rows[step.samples], (step.starts + step.counts)[step.samples]
        if not len(rows):
            return ModelRunnerOutput(step.step_id, rows)
        logits = self.model.logits(self._hidden)
        token_ids = self._sampler(logits, self._batch, rows, positions).cpu().numpy().astype(np.int32)
        self._batch.record(rows, positions, token_ids)
        return ModelRunnerOutput(step.step_id, token_ids)
