"""Edits of logits in Triton: grammar masks and penalties, in place.

Occurrences are counted where the tokens are, so that nothing of the vocabulary's size is gone through: three kernels,
one after the other, each go over the tokens of all rows at once. Counts of tokens that no row has are never written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.reference import ReferenceOps

BLOCK = 1024
"""Tokens that a program takes."""
# Columns lie side by side in one copy, so where one begins differs from step to step.
_COLUMNS = ["rows", "table_rows", "num_prompt_tokens", "num_tokens", "repetition", "frequency", "presence"]


@triton.jit(do_not_specialize_on_alignment=["rows"])
def grammar_kernel(logits, rows, bits, vocab_size, num_words, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64)
    token_ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token_ids < vocab_size
    words = tl.load(bits + place * num_words + token_ids // 32, mask=inside, other=0)
    allowed = (words >> (token_ids % 32)) & 1
    at = logits + tl.load(rows + place) * vocab_size + token_ids
    before = tl.load(at, mask=inside, other=0.0)
    # What is not a number stays so: its row must draw nothing.
    tl.store(at, float("-inf"), mask=inside & (allowed == 0) & (before == before))


@triton.jit
def _tokens(token_table, table_rows, num_tokens, table_width, place, BLOCK: tl.constexpr):
    """Positions, token ids, and which of them are in the row."""
    position = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = position < tl.load(num_tokens + place)
    token_ids = tl.load(token_table + tl.load(table_rows + place) * table_width + position, mask=inside, other=0)
    return position, token_ids, inside


@triton.jit(do_not_specialize_on_alignment=_COLUMNS)
def clear_counts_kernel(counts, token_table, table_rows, num_tokens, vocab_size, table_width, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64)
    _, token_ids, inside = _tokens(token_table, table_rows, num_tokens, table_width, place, BLOCK)
    tl.store(counts + place * vocab_size + token_ids, 0, mask=inside)


@triton.jit(do_not_specialize_on_alignment=_COLUMNS)
def count_kernel(
    counts, token_table, table_rows, num_prompt_tokens, num_tokens, vocab_size, table_width, BLOCK: tl.constexpr
):
    """Of tokens of the output."""
    place = tl.program_id(0).to(tl.int64)
    position, token_ids, inside = _tokens(token_table, table_rows, num_tokens, table_width, place, BLOCK)
    is_output = inside & (position >= tl.load(num_prompt_tokens + place))
    tl.atomic_add(counts + place * vocab_size + token_ids, 1, mask=is_output)


@triton.jit(do_not_specialize_on_alignment=_COLUMNS)
def penalise_kernel(
    logits,
    rows,
    counts,
    token_table,
    table_rows,
    num_tokens,
    repetition,
    frequency,
    presence,
    vocab_size,
    table_width,
    BLOCK: tl.constexpr,
):
    """Of equal tokens the one that takes the count away changes the logit."""
    place = tl.program_id(0).to(tl.int64)
    _, token_ids, inside = _tokens(token_table, table_rows, num_tokens, table_width, place, BLOCK)
    count = tl.atomic_xchg(counts + place * vocab_size + token_ids, -1, mask=inside)
    is_first = inside & (count >= 0)
    at = logits + tl.load(rows + place) * vocab_size + token_ids
    before = tl.load(at, mask=is_first, other=0.0)
    factor = tl.load(repetition + place).to(tl.float32)
    after = tl.where(before > 0, tl.div_rn(before, factor), before * factor)
    for_each, for_any = tl.load(frequency + place).to(tl.float32), tl.load(presence + place).to(tl.float32)
    after = tl.where(count > 0, after - for_each * count.to(tl.float32) - for_any, after)
    tl.store(at, after, mask=is_first)


class TritonEdits(ReferenceOps):
    def apply_grammar(self, logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor) -> None:
        vocab_size, num_words = logits.shape[1], bits.shape[1]
        assert logits.is_contiguous()
        assert bits.is_contiguous()
        assert num_words * 32 >= vocab_size
        grid = len(rows), triton.cdiv(vocab_size, BLOCK)
        grammar_kernel[grid](logits, rows, bits, vocab_size, num_words, BLOCK=BLOCK)

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
        vocab_size, table_width = logits.shape[1], token_table.stride(0)
        assert logits.is_contiguous()
        counts = torch.empty((len(rows), vocab_size), dtype=torch.int32, device=logits.device)
        grid = len(rows), triton.cdiv(longest, BLOCK)
        tokens, sizes = (token_table, table_rows), (vocab_size, table_width)
        clear_counts_kernel[grid](counts, *tokens, num_tokens, *sizes, BLOCK=BLOCK)
        count_kernel[grid](counts, *tokens, num_prompt_tokens, num_tokens, *sizes, BLOCK=BLOCK)
        penalties = repetition, frequency, presence
        penalise_kernel[grid](logits, rows, counts, *tokens, num_tokens, *penalties, *sizes, BLOCK=BLOCK)
