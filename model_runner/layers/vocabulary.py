"""Vocabulary: a table with a row for each token: embeddings on the way in, the head on the way out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from model_runner.shard import all_of, rows_each, vocabulary
from model_runner.target import Target

if TYPE_CHECKING:
    from model_runner.device import DevicePolicy


class Vocabulary:
    """Every worker has as many rows; behind the last token's they are zeros, whose logits are cut off."""

    def __init__(self, vocab_size: int, size: int, policy: DevicePolicy) -> None:
        self._workers = policy.workers
        self._tokens, self._size = vocabulary(vocab_size, self._workers.place), size
        rows = rows_each(vocab_size, self._workers.place)
        self.weight = torch.empty(rows, size, dtype=policy.dtype, device=policy.device)
        self.weight[self._tokens.size :].zero_()

    def slices(self, name: str) -> dict[str, Target]:
        tokens = self._tokens
        return {f"{name}.weight": Target(self.weight[: tokens.size], ((tokens,), (all_of(self._size),)))}

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids [T] to [T, size]."""
        if self._tokens.is_whole:
            return F.embedding(token_ids, self.weight)
        ours = token_ids - self._tokens.first
        others = (ours < 0) | (ours >= self._tokens.size)
        rows = F.embedding(ours.masked_fill(others, 0), self.weight)
        return self._workers.all_reduce(rows.masked_fill_(others[:, None], 0.0))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [S, size] to [S, vocabulary] in float32, all of them on every worker."""
        logits = F.linear(hidden, self.weight)
        if not self._tokens.is_whole:
            logits = self._workers.all_gather(logits)[:, : self._tokens.whole].contiguous()
        return logits.float()
