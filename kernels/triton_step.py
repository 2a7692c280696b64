"""A step's tensors in Triton, in one kernel: a program for each row, real or padding, and some for padded tokens.

What differs from step to step is kept out of what kernels are compiled for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from kernels.reference import ReferenceOps

if TYPE_CHECKING:
    import torch

    from kernels.reference_step import StepTensors

BLOCK = 1024
"""Tokens or blocks that a program takes at a time."""


@triton.jit(
    do_not_specialize=["num_rows", "num_tokens", "num_padded_rows", "num_padded_tokens", "width"],
    do_not_specialize_on_alignment=["rows", "starts", "query_starts"],
)
def step_kernel(
    token_table,
    block_table,
    rows,
    starts,
    query_starts,
    input_ids,
    positions,
    slots,
    out_query_starts,
    seq_lens,
    block_tables,
    token_stride,
    block_stride,
    out_block_stride,
    num_rows,
    num_tokens,
    num_padded_rows,
    num_padded_tokens,
    width,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The counts of padded rows and tokens include the real ones."""
    place, column = tl.program_id(0), tl.arange(0, BLOCK)
    if place == 0:
        tl.store(out_query_starts, 0)
    if place < num_rows:
        row, start = tl.load(rows + place).to(tl.int64), tl.load(starts + place)
        first, end = tl.load(query_starts + place), tl.load(query_starts + place + 1)
        tl.store(out_query_starts + place + 1, end)
        tl.store(seq_lens + place, start + end - first)
        own_blocks = block_table + row * block_stride
        for offset in range(0, end - first, BLOCK):
            token = first + offset + column
            inside = token < end
            position = start + offset + column
            token_ids = tl.load(token_table + row * token_stride + position, mask=inside, other=0)
            blocks = tl.load(own_blocks + position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
            tl.store(input_ids + token, token_ids.to(tl.int64), mask=inside)
            tl.store(positions + token, position.to(tl.int64), mask=inside)
            tl.store(slots + token, blocks * BLOCK_SIZE + position % BLOCK_SIZE, mask=inside)
        out_blocks = block_tables + place.to(tl.int64) * out_block_stride
        for offset in range(0, width, BLOCK):
            inside = offset + column < width
            blocks = tl.load(own_blocks + offset + column, mask=inside, other=0)
            tl.store(out_blocks + offset + column, blocks, mask=inside)
    elif place < num_padded_rows:
        following = num_tokens + 1 + place - num_rows
        tl.store(out_query_starts + place + 1, tl.minimum(following, num_padded_tokens))
        tl.store(seq_lens + place, 0)
    else:
        token = num_tokens + (place - num_padded_rows) * BLOCK + column
        inside = token < num_padded_tokens
        zeros = tl.zeros([BLOCK], tl.int64)
        tl.store(input_ids + token, zeros, mask=inside)
        tl.store(positions + token, zeros, mask=inside)
        tl.store(slots + token, zeros - 1, mask=inside)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["rows", "positions", "drawn"])
def store_tokens_kernel(token_table, rows, positions, drawn, token_stride, num_rows, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < num_rows
    row = tl.load(rows + place, mask=inside, other=0).to(tl.int64)
    position = tl.load(positions + place, mask=inside, other=0)
    token_ids = tl.maximum(tl.load(drawn + place, mask=inside, other=0), 0)
    tl.store(token_table + row * token_stride + position, token_ids, mask=inside)


class TritonStep(ReferenceOps):
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
        num_padded_rows, width = out.block_tables.shape
        num_padded_tokens = out.input_ids.shape[0]
        step_kernel[(num_padded_rows + triton.cdiv(num_padded_tokens - num_tokens, BLOCK),)](
            token_table,
            block_table,
            rows,
            starts,
            query_starts,
            *out,
            token_table.stride(0),
            block_table.stride(0),
            out.block_tables.stride(0),
            rows.shape[0],
            num_tokens,
            num_padded_rows,
            num_padded_tokens,
            width,
            BLOCK_SIZE=block_size,
            BLOCK=BLOCK,
        )

    def store_tokens(
        self, token_table: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, drawn: torch.Tensor
    ) -> None:
        grid = (triton.cdiv(len(rows), BLOCK),)
        store_tokens_kernel[grid](token_table, rows, positions, drawn, token_table.stride(0), len(rows), BLOCK=BLOCK)
