"""InputBatch: the requests that run, as columns, which steps change.

The core names rows and sends only what changes. Everything a row needs in a step is looked up here by
its number, for all rows of the step at once. Tokens and blocks are on the device too: what is drawn there
is computed next without having been here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from model_runner.features import NO_LISTS, PROMPT_LOGPROBS, TokenLists, features, token_lists
from model_runner.prompt_spans import PromptSpans, prompt_spans

if TYPE_CHECKING:
    import torch

    from model_runner.device import DevicePolicy
    from protos.step import NewRow, SchedulerOutput

Int32s = npt.NDArray[np.int32]


class InputBatch:
    """Columns of `num_rows` rows, for sequences of up to `max_model_len` tokens."""

    def __init__(
        self, num_rows: int, max_model_len: int, block_size: int, eos_token_ids: tuple[int, ...], policy: DevicePolicy
    ) -> None:
        self.block_size = block_size
        self._eos_token_ids = eos_token_ids
        self._policy = policy
        # zeros, not filled: pages that no sequence reaches are never resident.
        self.token_ids: Int32s = np.zeros((num_rows, max_model_len + 1), np.int32)
        """Without what was drawn since the row was entered, where the device has memory of its own."""
        self.block_tables: Int32s = np.zeros((num_rows, -(-max_model_len // block_size)), np.int32)
        self.token_table: torch.Tensor = policy.mirror(self.token_ids)
        """On the device, with all tokens, drawn ones too."""
        self.block_table: torch.Tensor = policy.mirror(self.block_tables)
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
        self.adapter: Int32s = np.zeros(num_rows, np.int32)
        """Slot of each row's adapter; 0 is none."""
        self.uses: npt.NDArray[np.uint16] = np.zeros(num_rows, np.uint16)
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
            self.record(step.rows, step.starts + step.counts - 1, self._policy.tensor(step.last_ids))

    def _enter(self, new_row: NewRow) -> None:
        row, sampling = new_row.row, new_row.sampling
        self.token_ids[row, : len(new_row.token_ids)] = new_row.token_ids
        self.block_tables[row, : len(new_row.block_ids)] = new_row.block_ids
        self.num_blocks[row] = len(new_row.block_ids)
        if not self._policy.shares_memory:
            for table, ids in ((self.token_table, new_row.token_ids), (self.block_table, new_row.block_ids)):
                table[row, : len(ids)] = self._policy.tensor(np.asarray(ids, np.int32))
        self.num_prompt_tokens[row] = new_row.num_prompt_tokens
        self.temperature[row] = sampling.temperature
        self.top_k[row] = min(sampling.top_k, np.iinfo(np.int32).max)
        self.top_p[row] = sampling.top_p
        self.min_p[row] = sampling.min_p
        self.seed[row] = sampling.seed
        self.min_tokens[row] = sampling.min_tokens
        own = () if sampling.ignore_eos else self._eos_token_ids
        self.end_token_ids[row] = [*own, *sampling.stop_token_ids]
        self.adapter[row] = new_row.adapter
        self.uses[row] = features(sampling, new_row.adapter)
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
        places, blocks = self.num_blocks[in_order] + nth, block_ids[order]
        self.block_tables[in_order, places] = blocks
        np.add.at(self.num_blocks, rows, 1)
        if not self._policy.shares_memory:
            on_device = self._policy.tensor(np.stack([in_order, places, blocks]))
            self.block_table[on_device[0].long(), on_device[1].long()] = on_device[2].int()

    def prompt_spans(self, step: SchedulerOutput) -> PromptSpans | None:
        """The prompt tokens whose log-probabilities the step tells, if there are any."""
        asking = (self.uses[step.rows] & PROMPT_LOGPROBS) != 0
        return prompt_spans(step, asking, self.prompt_logprobs_from[step.rows], self.num_prompt_tokens[step.rows])

    def record(self, rows: Int32s, positions: Int32s, token_ids: torch.Tensor) -> None:
        """Tokens drawn [S] int32, on the device, become known ones there: what the next step computes."""
        if self._policy.shares_memory:
            # A row that drew nothing may be in the next step already, where it needs a token, but counts for nothing.
            self.token_ids[rows, positions] = np.maximum(token_ids.numpy(), 0)
            return
        on_device = self._policy.tensor(np.stack([rows, positions]))
        self._policy.ops.store_tokens(self.token_table, on_device[0], on_device[1], token_ids)
