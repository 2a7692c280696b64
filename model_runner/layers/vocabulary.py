"""Vocabulary: a table with a row for each token: embeddings on the way in, the head on the way out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from model_runner.layers.matrix import Matrix
from model_runner.shard import all_of, rows_each, vocabulary

if TYPE_CHECKING:
    from model_runner.device import DevicePolicy
    from model_runner.target import Target


class Vocabulary:
    """Every worker has as many rows; behind the last token's they are zeros, whose logits are cut off."""

    def __init__(self, vocab_size: int, size: int, policy: DevicePolicy) -> None:
        self._workers = policy.workers
        self._tokens, self._size = vocabulary(vocab_size, self._workers.place), size
        rows = rows_each(vocab_size, self._workers.place)
        self.weight = Matrix([rows], size, policy, least_bits=8)
        self.weight.floats[self._tokens.size :].zero_()

    def slices(self, name: str) -> dict[str, Target]:
        return {f"{name}.weight": self.weight.target(0, (self._tokens,), all_of(self._size))}

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids [T] to [T, size]."""
        if self._tokens.is_whole:
            return self.weight.rows(token_ids)
        ours = token_ids - self._tokens.first
        others = (ours < 0) | (ours >= self._tokens.size)
        rows = self.weight.rows(ours.masked_fill(others, 0))
        return self._workers.all_reduce(rows.masked_fill_(others[:, None], 0.0))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [S, size] to [S, vocabulary] in float32, all of them on every worker."""
        logits = self.weight.times(hidden)
        if not self._tokens.is_whole:
            logits = self._workers.all_gather(logits)[:, : self._tokens.whole].contiguous()
        return logits if logits.dtype is torch.float32 else logits.float()
