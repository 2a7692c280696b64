"""Sampler: from logits to one token per row, all rows at once; what no row asks for costs nothing.

In this order:

1. min_tokens: while a row's output is shorter, the tokens that would end it have logit -inf.
2. temperature: below TEMPERATURE_GREEDY the row is greedy, and takes the largest logit; else divide by it.
3. min_p, top_k, top_p: one threshold per row (thresholds.py); logits below it become -inf.
4. draw: add Gumbel noise of (seed, position, token id) (gumbel.py), and take the largest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from model_runner.gumbel import gumbel_noise, row_keys
from model_runner.thresholds import Filters, thresholds
from protos.params import TEMPERATURE_GREEDY

if TYPE_CHECKING:
    from model_runner.device import DevicePolicy
    from model_runner.input_batch import InputBatch

Int32s = npt.NDArray[np.int32]


class Sampler:
    def __init__(self, policy: DevicePolicy) -> None:
        self._policy = policy

    def __call__(self, logits: torch.Tensor, batch: InputBatch, rows: Int32s, positions: Int32s) -> torch.Tensor:
        """Token ids [S] int64, drawn from logits [S, vocabulary] float32, which are overwritten.

        `rows` are the batch's rows that draw, `positions` the indices in prompt + output of what they draw.
        """
        mask_early_ends(logits, batch, rows, positions)
        random = np.flatnonzero(batch.temperature[rows] >= TEMPERATURE_GREEDY)
        if not len(random):
            return logits.argmax(-1)
        token_ids = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
        if len(random) < len(rows):
            greedy = self._policy.tensor(np.flatnonzero(batch.temperature[rows] < TEMPERATURE_GREEDY))
            token_ids[greedy] = logits[greedy].argmax(-1)
        step = max(1, self._policy.chunk_cells // logits.shape[1])
        for first in range(0, len(random), step):
            chosen = random[first : first + step]
            token_ids[self._policy.tensor(chosen)] = self._draw(logits, batch, chosen, rows[chosen], positions[chosen])
        return token_ids

    def _draw(
        self, logits: torch.Tensor, batch: InputBatch, chosen: npt.NDArray[np.intp], rows: Int32s, positions: Int32s
    ) -> torch.Tensor:
        tensor = self._policy.tensor
        scaled = logits[tensor(chosen)] / tensor(batch.temperature[rows])[:, None]
        filters = Filters(batch.top_k[rows], batch.top_p[rows], batch.min_p[rows])
        if filters.any():
            scaled.masked_fill_(scaled < thresholds(scaled, filters)[:, None], -torch.inf)
        keys = tensor(row_keys(batch.seed[rows], positions))
        return scaled.add_(gumbel_noise(keys, scaled.shape[1])).argmax(-1)


def mask_early_ends(logits: torch.Tensor, batch: InputBatch, rows: Int32s, positions: Int32s) -> None:
    """Sets the logits of tokens that would end a row to -inf, where its output is shorter than its min_tokens."""
    short = np.flatnonzero(positions - batch.num_prompt_tokens[rows] < batch.min_tokens[rows])
    for index in short:
        logits[index, batch.end_token_ids[rows[index]]] = -torch.inf
