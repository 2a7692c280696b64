"""largest_step: what takes the most memory while it runs, and touches no sequence's."""

from __future__ import annotations

import numpy as np

from protos.messages import Sampling
from protos.step import NULL_BLOCK, NewRow, SchedulerOutput

SAMPLING = Sampling(temperature=1.0, top_k=50, top_p=0.9, frequency_penalty=0.1, logprobs=1)
"""What holds copies of the logits."""
GREEDY = Sampling()
"""Of the first of several rows, so that its kernels too are compiled before the first request comes."""


def largest_step(num_rows: int, num_tokens: int, max_model_len: int, block_size: int) -> SchedulerOutput:
    """Prompts that make up as many tokens as a step may have, in as many rows, all of which draw. All their keys go to
    the null block."""
    num_rows = min(num_rows, num_tokens)
    each, rest = divmod(min(num_tokens, num_rows * max_model_len), num_rows)
    counts = np.full(num_rows, each, np.int32)
    counts[:rest] += 1
    new_rows = [
        NewRow(
            row,
            np.zeros(count, np.int32),
            count,
            [NULL_BLOCK] * -(-count // block_size),
            SAMPLING if row or num_rows == 1 else GREEDY,
        )
        for row, count in enumerate(counts.tolist())
    ]
    rows = np.arange(num_rows, dtype=np.int32)
    return SchedulerOutput(-1, rows, np.zeros_like(rows), counts, np.ones(num_rows, np.bool_), new_rows)
