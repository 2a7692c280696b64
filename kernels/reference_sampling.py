"""ReferenceSamplingOps: the operations between a step's logits and its tokens, in plain PyTorch."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch

from kernels.gumbel import gumbel_noise
from kernels.thresholds import thresholds

if TYPE_CHECKING:
    from kernels.thresholds import Filters


class ReferenceSamplingOps:
    """Part of ReferenceOps.

    Logits are [S, vocabulary] float32, contiguous. `rows` [n] int64 names some of theirs, each once; columns [n]
    beside it are of the same rows, and float64 where they are not integers. Implementations for devices that compute
    while the host goes on do not wait for them.
    """

    def apply_grammar(self, logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor) -> None:
        """What bits [n, words] int32 do not allow becomes -inf: bit i % 32 of word i // 32 is token i's."""
        # Eight bits at a time: of each byte, the highest that its eight tokens' logits may be. A lookup and a minimum
        # take the same time for any mask; filling by it takes ten times as long where its bits are irregular.
        octets = bits.view(torch.uint8).int()
        limits = _limits_of_bytes(logits.device).index_select(0, octets.view(-1)).view(len(rows), -1)
        limits = limits[:, : logits.shape[1]]
        logits.index_copy_(0, rows, torch.minimum(logits.index_select(0, rows), limits))

    def penalise(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        token_table: torch.Tensor,
        table_rows: torch.Tensor,
        num_prompt_tokens: torch.Tensor,
        num_tokens: torch.Tensor,
        longest: int,
        repetition: torch.Tensor,
        frequency: torch.Tensor,
        presence: torch.Tensor,
    ) -> None:
        """Penalties, in float32, for the first num_tokens of each table row: its prompt, then its output.

        Logits of the tokens in both are divided by `repetition` if above 0, else multiplied. Then `frequency` for each
        time that a token is in the output, and `presence` if it is there at all, are subtracted. token_table is
        [table rows, positions] int32; `longest` is the largest of num_tokens.
        """
        flat, spans = logits.view(-1), (logits, rows, token_table, table_rows, num_tokens)
        repeats = repetition != 1
        if repeats.any():
            owner, pairs = _history(*spans, torch.where(repeats, 0, num_tokens))
            penalties, before = repetition.float()[owner], flat[pairs]
            # A token that occurs n times writes the same number n times.
            flat[pairs] = torch.where(before > 0, before / penalties, before * penalties)
        subtracts = (frequency != 0) | (presence != 0)
        if subtracts.any():
            owner, pairs = _history(*spans, torch.where(subtracts, num_prompt_tokens, num_tokens))
            # The logits themselves are where occurrences are counted, so nothing of the vocabulary's size is
            # allocated. Measured, for 1 to 256 rows of 100 to 4,000 tokens: torch.unique takes 0.8 to 1.3 times as
            # long, and dense counts 3 to 65 times.
            before = flat[pairs]
            flat[pairs] = 0.0
            flat.index_add_(0, pairs, torch.ones((), device=logits.device).expand(len(pairs)))
            flat[pairs] = before - frequency.float()[owner] * flat[pairs] - presence.float()[owner]

    def scale_and_filter(
        self, logits: torch.Tensor, rows: torch.Tensor, temperature: torch.Tensor, filters: Filters | None
    ) -> torch.Tensor:
        """[n, vocabulary] What the rows draw from: logits over the temperature; -inf where the filters keep nothing."""
        scaled = _scaled(logits, rows, temperature)
        if filters is not None:
            scaled.masked_fill_(scaled < self.limits(logits, rows, temperature, filters)[:, None], -torch.inf)
        return scaled

    def limits(
        self, logits: torch.Tensor, rows: torch.Tensor, temperature: torch.Tensor, filters: Filters
    ) -> torch.Tensor:
        """[n] float32: of the rows' logits over the temperature the filters keep those that are at least this."""
        return thresholds(_scaled(logits, rows, temperature), filters)

    def argmax(self, logits: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        """[n] int32: the token with the largest logit of each row, or of all rows; of equal ones the first.

        -1 where the largest is -inf or where any is not a number.
        """
        return _found(*(logits if rows is None else logits.index_select(0, rows)).max(-1))

    def draw(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        temperature: torch.Tensor,
        filters: Filters | None,
        keys: torch.Tensor,
    ) -> torch.Tensor:
        """[n] int32: a token of each row, drawn from the softmax of scale_and_filter by noise of its `keys`, int64.

        -1 as by argmax.
        """
        scaled = self.scale_and_filter(logits, rows, temperature, filters)
        return _found(*scaled.add_(gumbel_noise(keys, logits.shape[1])).max(-1))


def _scaled(logits: torch.Tensor, rows: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    return logits.index_select(0, rows).div_(temperature.float()[:, None])


def _history(
    logits: torch.Tensor,
    rows: torch.Tensor,
    token_table: torch.Tensor,
    table_rows: torch.Tensor,
    ends: torch.Tensor,
    starts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each token of the table rows from `starts` to `ends`: its place among the rows, and in the flat logits."""
    spans = zip(table_rows.tolist(), starts.tolist(), ends.tolist(), strict=True)
    token_ids = torch.cat([token_table[row, first:end] for row, first, end in spans])
    owner = torch.repeat_interleave(ends - starts, output_size=len(token_ids))
    return owner, (rows * logits.shape[1])[owner] + token_ids


def _found(highest: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    return torch.where(highest > -torch.inf, token_ids, -1).int()


@cache
def _limits_of_bytes(device: torch.device) -> torch.Tensor:
    """[256, 8]: inf where a bit of the byte is 1, -inf where it is 0; the lowest first."""
    bits = (torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device)) & 1
    return torch.where(bits == 1, torch.inf, -torch.inf)
