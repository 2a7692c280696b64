"""LowRank: what is added to a product y = x W^T: that of x with matrices of few rows."""

from __future__ import annotations

from typing import NamedTuple

import torch

Tokens = slice | torch.Tensor
"""Rows of a step's tokens: neighbours, from a start to a stop, or by their indices [n] int64, each once."""


class LowRankPart(NamedTuple):
    """Adds (x a^T) b to the columns of y from `first` on."""

    first: int
    a: torch.Tensor
    """[rank, inputs] float32."""
    b: torch.Tensor
    """[rank, outputs] float32."""


class LowRank:
    """Parts of y that get something, each from factors of its own; their first ones lie in one tensor."""

    def __init__(self, parts: list[LowRankPart]) -> None:
        self.ranks = [len(part.a) for part in parts]
        self.a = torch.cat([part.a for part in parts])
        """[sum of ranks, inputs]."""
        self.parts = [part._replace(a=a) for part, a in zip(parts, self.a.split(self.ranks), strict=True)]

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + sum(part.b.nbytes for part in self.parts)
