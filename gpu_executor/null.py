"""NullWorker: scripted tokens and no model, to run and to time everything above the model."""

from __future__ import annotations

import time
import zlib
from typing import TYPE_CHECKING

import numpy as np

from protos.step import ModelRunnerOutput, NewRow, SchedulerOutput, WorkerInfo

if TYPE_CHECKING:
    from collections.abc import Callable

    from protos.config import EngineConfig
    from protos.messages import Sampling

VOCAB_SIZE = 512
"""At least the byte tokenizer's."""
DEFAULT_MODEL_LEN = 32768
FIRST_PRINTABLE, NUM_PRINTABLE = 32, 95
"""Drawn ids are printable ASCII, which the byte tokenizer spells as itself."""


class NullWorker:
    """Draws a token from (prompt, seed, position): the same alone, in a batch and after a preemption."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        rows = config.scheduler.max_num_seqs
        self._keys = np.zeros(rows, np.uint32)
        self._step_seconds = config.executor.null_step_ms / 1e3
        self._free_at = 0.0
        self._step: SchedulerOutput | None = None

    def load(self, report: Callable[[int, int], None]) -> WorkerInfo:
        block_size = self._config.cache.block_size
        max_model_len = self._config.model.max_model_len or DEFAULT_MODEL_LEN
        num_blocks = self._config.cache.num_kv_blocks
        if num_blocks:
            max_model_len = min(max_model_len, (num_blocks - 1) * block_size)
        else:
            num_blocks = 1 + 16 * -(-max_model_len // block_size)
        report(1, 1)
        return WorkerInfo(
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            vocab_size=VOCAB_SIZE,
            dtype="none",
            device="null",
            weight_bytes=0,
            kv_cache_bytes=0,
            max_steps_in_flight=self._config.scheduler.max_steps_in_flight or 1,
        )

    def execute(self, step: SchedulerOutput) -> None:
        for new_row in step.new_rows:
            self._keys[new_row.row] = _key(new_row)
        self._step = step
        self._free_at = max(time.monotonic(), self._free_at) + self._step_seconds

    def sample(self) -> ModelRunnerOutput:
        step = self._step
        assert step is not None
        drawing = step.samples
        positions = (step.starts + step.counts)[drawing].astype(np.uint32)
        token_ids = FIRST_PRINTABLE + _mix(self._keys[step.rows[drawing]] ^ positions) % np.uint32(NUM_PRINTABLE)
        if self._step_seconds and (left := self._free_at - time.monotonic()) > 0:
            time.sleep(left)
        return ModelRunnerOutput(step.step_id, token_ids.astype(np.int32))


def _key(new_row: NewRow) -> int:
    sampling: Sampling = new_row.sampling
    key = zlib.crc32(new_row.token_ids[: new_row.num_prompt_tokens].tobytes())
    return key if sampling.temperature == 0 else key ^ (sampling.seed & 0xFFFFFFFF)


def _mix(values: np.ndarray[tuple[int], np.dtype[np.uint32]]) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    """The finalizer of MurmurHash3: every bit of the input changes half of the output's."""
    values = (values ^ (values >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    values = (values ^ (values >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return values ^ (values >> np.uint32(16))
