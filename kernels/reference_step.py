"""ReferenceStepOps: what a step computes, looked up in tables that live on the device."""

from __future__ import annotations

from typing import NamedTuple

import torch


class StepTensors(NamedTuple):
    """T tokens of R rows, row after row, in memory that outlives the step; it may have room for more of both.

    What is behind the step's own is padding: a token there has id 0, position 0 and slot -1, a row there has seq_len 0
    and, as far as there are tokens left, one of them.
    """

    input_ids: torch.Tensor
    """[T] int64."""
    positions: torch.Tensor
    """[T] int64, from 0 in each sequence."""
    slots: torch.Tensor
    """[T] int64: where in the KV cache each token goes, -1 for nowhere."""
    query_starts: torch.Tensor
    """[R + 1] int32: the first token of each row, and behind the last one's."""
    seq_lens: torch.Tensor
    """[R] int32: keys of each row, this step's tokens included."""
    block_tables: torch.Tensor
    """[R, blocks] int32, whose rows may lie apart; entries beyond a row's keys are undefined."""


class ReferenceStepOps:
    """Part of ReferenceOps."""

    def step_tensors(
        self,
        token_table: torch.Tensor,
        block_table: torch.Tensor,
        rows: torch.Tensor,
        starts: torch.Tensor,
        query_starts: torch.Tensor,
        num_tokens: int,
        block_size: int,
        out: StepTensors,
    ) -> None:
        """Fills `out` with a step: row rows[r] of the tables computes its tokens from position starts[r] on.

        token_table [table rows, positions] and block_table [table rows, blocks] are int32, and so are rows [R],
        starts [R] and query_starts [R + 1], which ends with num_tokens. Of blocks, at least those of the row's keys are
        looked up, if `out` has columns for them. Whatever `out` has room for beyond R and num_tokens becomes padding.
        """
        num_rows, width = rows.shape[0], out.block_tables.shape[1]
        table_rows, firsts = rows.long(), starts.long()
        torch.index_select(block_table[:, :width], 0, table_rows, out=out.block_tables[:num_rows])
        seq_lens = torch.add(starts, query_starts[1:] - query_starts[:-1], out=out.seq_lens[:num_rows])
        assert seq_lens.shape == rows.shape
        out.query_starts[: num_rows + 1] = query_starts
        if num_tokens > num_rows:
            counts = query_starts[1:] - query_starts[:-1]
            within = torch.arange(num_tokens, device=rows.device)
            before = torch.repeat_interleave(firsts - query_starts[:-1], counts, output_size=num_tokens)
            table_rows = torch.repeat_interleave(table_rows, counts, output_size=num_tokens)
            firsts = within + before
        out.positions[:num_tokens] = firsts
        out.input_ids[:num_tokens] = token_table[table_rows, firsts]
        blocks = block_table[table_rows, firsts // block_size]
        torch.add(firsts % block_size, blocks, alpha=block_size, out=out.slots[:num_tokens])
        self._pad(num_rows, num_tokens, out)

    def _pad(self, num_rows: int, num_tokens: int, out: StepTensors) -> None:
        num_padded = out.seq_lens.shape[0] - num_rows
        if num_padded:
            out.seq_lens[num_rows:] = 0
            following = torch.arange(num_tokens + 1, num_tokens + 1 + num_padded, device=out.seq_lens.device)
            out.query_starts[num_rows + 1 :] = following.clamp_(max=out.input_ids.shape[0])
        if out.input_ids.shape[0] > num_tokens:
            out.input_ids[num_tokens:] = 0
            out.positions[num_tokens:] = 0
            out.slots[num_tokens:] = -1

    def store_tokens(
        self, token_table: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, drawn: torch.Tensor
    ) -> None:
        """Writes tokens drawn [S] int32 into token_table, int32, at rows and positions [S] int32.

        A row that drew none (-1) gets token 0: it may be in the next step already. Its result there will be ignored,
        but it must be a token.
        """
        token_table[rows.long(), positions.long()] = drawn.clamp(min=0)
