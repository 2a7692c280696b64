"""NullWorker: scripted tokens and no model, to run and to time everything above the model."""

from __future__ import annotations

import time
import zlib
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gpu_executor.null_logprobs import scripted_logprobs
from model_runner.prompt_spans import prompt_spans
from protos.messages import Sampling
from protos.step import ModelRunnerOutput, NewRow, PromptLogprobs, SchedulerOutput, WorkerInfo

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpu_executor.executor import PendingOutput
    from protos.adapter import Adapter
    from protos.config import EngineConfig
    from protos.step import GrammarMask, Logprobs

Int32s = npt.NDArray[np.int32]
VOCAB_SIZE = 512
"""At least the byte tokenizer's."""
DEFAULT_MODEL_LEN = 32768
FIRST_PRINTABLE, NUM_PRINTABLE = 32, 95
"""Drawn ids are printable ASCII, which the byte tokenizer spells as itself."""


class NullWorker:
    """Draws a token from (prompt, seed, position, adapter): the same alone, in a batch and after a preemption.

    Where a grammar allows n tokens, the draw is one of those. Log-probabilities are scripted too.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        rows = config.scheduler.max_num_seqs
        self._keys = np.zeros(rows, np.uint32)
        self._sampling = [Sampling()] * rows
        self._reports = np.zeros(rows, np.bool_)
        self._reports_prompt = np.zeros(rows, np.bool_)
        self._prompts: dict[int, NewRow] = {}
        """Of rows that report their prompt's log-probabilities."""
        self._adapters: dict[int, Adapter] = {}
        self._step_seconds = config.executor.null_step_ms / 1e3
        self._free_at = 0.0
        """When the simulated device is done with the steps it was given; nobody waits for it but results."""
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
            row, sampling = new_row.row, new_row.sampling
            self._keys[row] = _key(new_row)
            if new_row.adapter:
                self._keys[row] ^= int(self._adapters[new_row.adapter].digest[:8], 16)
            self._sampling[row] = sampling
            self._reports[row] = sampling.logprobs is not None or bool(sampling.logprob_token_ids)
            self._reports_prompt[row] = sampling.prompt_logprobs is not None
            if self._reports_prompt[row]:
                self._prompts[row] = new_row
        self._step = step
        self._free_at = max(time.monotonic(), self._free_at) + self._step_seconds

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        self._adapters[slot] = adapter

    def unload_adapter(self, slot: int) -> None:
        self._adapters.pop(slot, None)

    def start_profile(self) -> None:
        pass

    def stop_profile(self) -> dict[str, bytes]:
        return {}

    def sample(self, mask: GrammarMask | None = None) -> PendingOutput:
        step = self._step
        assert step is not None
        drawing = step.samples
        rows = step.rows[drawing]
        positions = (step.starts + step.counts)[drawing].astype(np.uint32)
        numbers = _mix(self._keys[rows] ^ positions)
        token_ids = (FIRST_PRINTABLE + numbers % np.uint32(NUM_PRINTABLE)).astype(np.int32)
        if mask is not None and len(mask.index):
            token_ids[mask.index] = _nth_allowed(mask.bits, numbers[mask.index])
        logprobs = self._logprobs(rows, token_ids) if self._reports[rows].any() else None
        of_prompts = self._prompt_logprobs(step) if self._reports_prompt[step.rows].any() else []
        output = ModelRunnerOutput(step.step_id, token_ids, logprobs, of_prompts)
        due = self._free_at
        return DueOutput(output, lambda: _sleep_until(due)) if self._step_seconds else output

    def _logprobs(self, rows: Int32s, token_ids: Int32s) -> Logprobs:
        index = np.flatnonzero(self._reports[rows] & (token_ids >= 0))
        asked = [self._sampling[row] for row in rows[index].tolist()]
        num_top = np.array([sampling.logprobs or 0 for sampling in asked], np.int32)
        extra_ids = [sampling.logprob_token_ids for sampling in asked]
        return scripted_logprobs(index, token_ids[index], num_top, extra_ids, VOCAB_SIZE)

    def _prompt_logprobs(self, step: SchedulerOutput) -> list[PromptLogprobs]:
        told: list[PromptLogprobs] = []
        first, lengths = np.zeros(len(step.rows), np.int32), np.zeros(len(step.rows), np.int32)
        asking = self._reports_prompt[step.rows]
        for index in np.flatnonzero(asking).tolist():
            new_row = self._prompts[int(step.rows[index])]
            first[index], lengths[index] = new_row.prompt_logprobs_from, new_row.num_prompt_tokens
        spans = prompt_spans(step, asking, first, lengths)
        if spans is None:
            return told
        for row, start, count in zip(spans.rows.tolist(), spans.starts.tolist(), spans.counts.tolist(), strict=True):
            token_ids, sampling = self._prompts[row].token_ids[start : start + count], self._sampling[row]
            num_top = np.full(count, sampling.prompt_logprobs, np.int32)
            extra_ids = [sampling.logprob_token_ids] * count
            logprobs = scripted_logprobs(np.arange(count), token_ids, num_top, extra_ids, VOCAB_SIZE)
            told.append(PromptLogprobs(row, start, logprobs))
        return told


class DueOutput:
    """A step's result that is held back until the simulated device is done with it."""

    def __init__(self, output: ModelRunnerOutput, wait: Callable[[], None]) -> None:
        self._output = output
        self._wait = wait

    def result(self) -> ModelRunnerOutput:
        self._wait()
        return self._output


def _sleep_until(due: float) -> None:
    if (left := due - time.monotonic()) > 0:
        time.sleep(left)


def _nth_allowed(bits: Int32s, numbers: npt.NDArray[np.uint32]) -> Int32s:
    """Of the n tokens that each row of a mask allows, the one at its number modulo n; -1 where n is 0."""
    allowed = np.unpackbits(np.ascontiguousarray(bits).view(np.uint8), axis=1, bitorder="little")[:, :VOCAB_SIZE]
    counts = allowed.sum(1, dtype=np.uint32)
    nth = numbers % np.maximum(counts, 1)
    token_ids = (allowed.cumsum(1) == nth[:, None] + 1).argmax(1)
    return np.where(counts > 0, token_ids, -1).astype(np.int32)


def _key(new_row: NewRow) -> int:
    sampling: Sampling = new_row.sampling
    key = zlib.crc32(new_row.token_ids[: new_row.num_prompt_tokens].tobytes())
    return key if sampling.temperature == 0 else key ^ (sampling.seed & 0xFFFFFFFF)


def _mix(values: np.ndarray[tuple[int], np.dtype[np.uint32]]) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    """The finalizer of MurmurHash3: every bit of the input changes half of the output's."""
    values = (values ^ (values >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    values = (values ^ (values >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return values ^ (values >> np.uint32(16))
