"""StepProgram: a model's steps, of any size, as one list of kernels, on a device that shares the host's memory."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from kernels.capture import NotCapturableError

if TYPE_CHECKING:
    from kernels.cpu_program import Program
    from kernels.ops import Ops
    from model_runner.forward_batch import ForwardBuffers, KVCaches
    from model_runner.graphs import Scores
    from model_runner.models import Model
    from protos.step import SchedulerOutput

logger = logging.getLogger(__name__)
RECORDED_AT = 2
"""The step before which the program is recorded. That takes as long as a dozen small steps: nobody waits for a first
token meanwhile."""


class StepProgram:
    """From a step's columns to the logits of the rows that draw, and the largest ones' tokens, over the buffers that
    every step is put into."""

    def __init__(self, model: Model, buffers: ForwardBuffers, kv_caches: KVCaches, ops: Ops) -> None:
        self._model, self._buffers, self._kv_caches, self._ops = model, buffers, kv_caches, ops
        self._num_steps = 0
        self._program: Program | None = None

    def run(self, step: SchedulerOutput, is_special: bool, wants_largest: bool) -> Scores | None:
        """Logits [S, vocabulary] of the rows that draw, and tokens [S] int32 where wanted; None if it is to be run
        operation by operation, as `is_special` steps are: with adapters, or that tell of prompts."""
        if is_special:
            return None
        self._num_steps += 1
        if self._num_steps == RECORDED_AT:
            self._record()
        return None if self._program is None else self._program.run(self._buffers.fill_in_place(step), wants_largest)

    @torch.inference_mode()
    def _record(self) -> None:
        model, buffers, kv_caches = self._model, self._buffers, self._kv_caches
        model.logits(model.forward(buffers.padding(1, kv_caches)))  # what is made at first use is no part of it
        try:
            self._program = self._ops.program(
                lambda sizes: model.logits(model.forward(buffers.of_sizes(sizes, kv_caches))),
                buffers.most,
                then=self._ops.argmax,
            )
        except NotCapturableError as error:
            logger.warning("steps run operation by operation: %s", error)
