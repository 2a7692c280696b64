"""InputBatch: the requests that run, as columns; steps change it and are turned into tensors by it.

The core names rows and sends only what changes. Everything a row needs in a step is looked up here by
its number, for all rows of the step at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from model_runner.features import NO_LISTS, PROMPT_LOGPROBS, TokenLists, features, token_lists
from model_runner.forward_batch import ForwardBatch
from model_runner.prompt_spans import PromptSpans, prompt_spans

if TYPE_CHECKING:
    from model_runner.device import DevicePolicy
    from model_runner.forward_batch import KVCaches
    from protos.step import NewRow, SchedulerOutput

Int32s = npt.NDArray[np.int32]


class InputBatch:
    """Columns of `num_rows` rows, for sequences of up to `max_model_len` tokens."""

    def __init__(
        self, num_rows: int, max_model_len: int, block_size: int, eos_token_ids: tuple[int, ...], policy: DevicePolicy
    ) -> None:
        self._block_size = block_size
        self._eos_token_ids = eos_token_ids
        self._policy = policy
        # zeros, not filled: pages that no sequence reaches are never resident.
        self.token_ids: Int32s = np.zeros((num_rows, max_model_len + 1), np.int32)
        self.block_tables: Int32s = np.zeros((num_rows, -(-max_model_len // block_size)), np.int32)
        self.num_blocks: Int32s = np.zeros(num_rows, np.int32)
        self.num_prompt_tokens: Int32s = np.zeros(num_rows, np.int32)
        self.temperature: npt.NDArray[np.float32] = np.zeros(num_rows, np.float32)
        self.top_k: Int32s = np.zeros(num_rows, np.int32)
        self.top_p: npt.NDArray[np.float64] = np.ones(num_rows, np.float64)
        self.min_p: npt.NDArray[np.float64] = np.zeros(num_rows, np.float64)
        self.seed: npt.NDArray[np.uint64] = np.zeros(num_rows, np.uint64)
        self.min_tokens: Int32s = np.zeros(num_rows, np.int32)
        self.repetition_penalty: npt.NDArray[np.float32] = np.ones(num_rows, np.float32)
        self.frequency_penalty: npt.NDArray[np.float32] = np.zeros(num_rows, np.float32)
        self.presence_penalty: npt.NDArray[np.float32] = np.zeros(num_rows, np.float32)
        self.num_logprobs: Int32s = np.zeros(num_rows, np.int32)
        self.num_prompt_logprobs: Int32s = np.zeros(num_rows, np.int32)
        self.prompt_logprobs_from: Int32s = np.zeros(num_rows, np.int32)
        self.uses: npt.NDArray[np.uint8] = np.zeros(num_rows, np.uint8)
        """Bits of features.py; the columns and lists of a feature that a row does not use are not read."""
        self.end_token_ids: list[list[int]] = [[]] * num_rows
        """Tokens that end the row's output: its stop ids, and the model's own unless it ignores them."""
        self.lists: list[TokenLists] = [NO_LISTS] * num_rows

    def apply(self, step: SchedulerOutput) -> None:
        """Takes over what the step says has changed."""
        for new_row in step.new_rows:
            self._enter(new_row)
        if len(step.block_rows):
            self._append_blocks(step.block_rows, step.block_ids)
        if len(step.last_ids):
            self.token_ids[step.rows, step.starts + step.counts - 1] = step.last_ids

    def _enter(self, new_row: NewRow) -> None:
        row, sampling = new_row.row, new_row.sampling
        self.token_ids[row, : len(new_row.token_ids)] = new_row.token_ids
        self.block_tables[row, : len(new_row.block_ids)] = new_row.block_ids
        self.num_blocks[row] = len(new_row.block_ids)
        self.num_prompt_tokens[row] = new_row.num_prompt_tokens
        self.temperature[row] = sampling.temperature
        self.top_k[row] = min(sampling.top_k, np.iinfo(np.int32).max)
        self.top_p[row] = sampling.top_p
        self.min_p[row] = sampling.min_p
        self.seed[row] = sampling.seed
        self.min_tokens[row] = sampling.min_tokens
        own = () if sampling.ignore_eos else self._eos_token_ids
        self.end_token_ids[row] = [*own, *sampling.stop_token_ids]
        self.uses[row] = features(sampling)
        self.lists[row] = token_lists(sampling)
        self.repetition_penalty[row] = sampling.repetition_penalty
        self.frequency_penalty[row] = sampling.frequency_penalty
        self.presence_penalty[row] = sampling.presence_penalty
        self.num_logprobs[row] = sampling.logprobs or 0
        self.num_prompt_logprobs[row] = sampling.prompt_logprobs or 0
        self.prompt_logprobs_from[row] = new_row.prompt_logprobs_from

    def _append_blocks(self, rows: Int32s, block_ids: Int32s) -> None:
        # The n-th block of a row in this step goes n places behind its last one.
        order = np.argsort(rows, kind="stable")
        in_order = rows[order]
        nth = np.arange(len(rows)) - np.searchsorted(in_order, in_order)
        self.block_tables[in_order, self.num_blocks[in_order] + nth] = block_ids[order]
        np.add.at(self.num_blocks, rows, 1)

    def prompt_spans(self, step: SchedulerOutput) -> PromptSpans | None:
        """The prompt tokens whose log-probabilities the step tells, if there are any."""
        asking = (self.uses[step.rows] & PROMPT_LOGPROBS) != 0
        if not asking.any():
            return None
        return prompt_spans(step, asking, self.prompt_logprobs_from[step.rows], self.num_prompt_tokens[step.rows])

    def forward_batch(
        self,
        step: SchedulerOutput,
        kv_caches: KVCaches,
        spans: PromptSpans | None = None,
    ) -> ForwardBatch:
        """The tensors of the step. They own their memory: later steps may change the columns."""
        rows, counts = step.rows, step.counts
        query_starts = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(counts, out=query_starts[1:])
        total = int(query_starts[-1])
        if total == len(rows):  # every row computes one token
            token_rows, positions = rows, step.starts.astype(np.int64)
        else:
            token_rows = np.repeat(rows, counts)
            positions = np.arange(total, dtype=np.int64) + np.repeat(step.starts - query_starts[:-1], counts)
        blocks, offsets = np.divmod(positions, self._block_size)
        seq_lens = step.starts + counts
        table_width = -(-int(seq_lens.max()) // self._block_size)
        output_tokens = (query_starts[1:] - 1)[step.samples].astype(np.int64)
        if spans is not None:
            output_tokens = np.concatenate([output_tokens, spans.tokens])
        tensor = self._policy.tensor
        return ForwardBatch(
            input_ids=tensor(self.token_ids[token_rows, positions].astype(np.int64)),
            positions=tensor(positions),
            slots=tensor(self.block_tables[token_rows, blocks] * np.int64(self._block_size) + offsets),
            query_starts=tensor(query_starts),
            seq_lens=tensor(seq_lens),
            block_tables=tensor(self.block_tables[rows, :table_width]),
            output_tokens=tensor(output_tokens),
            kv_caches=kv_caches,
        )

    def record(self, rows: Int32s, positions: Int32s, token_ids: Int32s) -> None:
        """Drawn tokens become known ones: what the next step computes.

        A row that drew none (-1) may be in the next step already. Its result there will be ignored, but
        it must be a token.
        """
        self.token_ids[rows, positions] = np.maximum(token_ids, 0)
