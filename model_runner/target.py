"""Target: a tensor of the model, and which part of one of the checkpoint's belongs into it."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from model_runner.kept import type_name
from model_runner.shard import all_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from model_runner.kept import Kept
    from model_runner.layers.added import AddedRows
    from model_runner.shard import Shard


@dataclass(frozen=True, slots=True)
class Target:
    """Every axis is made of shards side by side: their wholes are the checkpoint's, their parts the tensor's."""

    tensor: torch.Tensor
    axes: tuple[tuple[Shard, ...], ...]
    kept: tuple[Kept, ...] = ()
    """What holds the rows of each shard, where they may stay as the checkpoint has them: the tensor then is a shape."""
    linear: AddedRows | None = None
    """Where it is of a Linear, that one's adapters."""
    is_turned: bool = False
    """The checkpoint has what is kept with rows and columns exchanged."""

    @classmethod
    def whole(cls, tensor: torch.Tensor) -> Target:
        """Of a tensor that every worker holds."""
        return cls(tensor, tuple((all_of(size),) for size in tensor.shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the checkpoint's tensor."""
        axes = self.axes[::-1] if self.is_turned else self.axes
        return tuple(sum(shard.whole for shard in axis) for axis in axes)

    @property
    def turned(self) -> Target:
        """The same for a checkpoint with rows and columns exchanged."""
        return replace(self, is_turned=True) if self.kept else Target(self.tensor.mT, self.axes[::-1])

    def share(self, nbytes: int) -> int:
        """Of the bytes of the checkpoint's tensor, those of the part."""
        return nbytes * self.tensor.numel() // max(1, math.prod(self.shape))

    @property
    def nbytes(self) -> int:
        return sum(kept.nbytes for kept in self.kept) or self.tensor.nbytes

    def held(self) -> Iterator[tuple[str, int]]:
        """What it is, in words, with its bytes."""
        if not self.kept:
            yield type_name(self.tensor.dtype), self.tensor.nbytes
        for kept in self.kept:
            yield kept.kind, kept.nbytes

    def store(self, weights: torch.Tensor) -> None:
        """The checkpoint's tensor, of which the parts are taken."""
        if self.is_turned:
            weights = weights.mT
        for place, kept in self.kept_pieces():
            kept.fill(0, weights[place], weights.dtype)
        for place, view in self.pieces():
            view.copy_(weights[place])

    def pieces(self) -> Iterator[tuple[tuple[slice, ...], torch.Tensor]]:
        """Where in the checkpoint's tensor each part lies, and the view of ours that it fills; none of what is kept."""
        if self.kept:
            return
        for places in itertools.product(*(_side_by_side(axis) for axis in self.axes)):
            yield tuple(theirs for theirs, _ in places), self.tensor[tuple(ours for _, ours in places)]

    def kept_pieces(self) -> Iterator[tuple[tuple[slice, ...], Kept]]:
        """The same of what is kept, with what keeps the part."""
        if not self.kept:
            return
        rows, (columns,) = (list(_side_by_side(axis)) for axis in self.axes)
        for (theirs, _), kept in zip(rows, self.kept, strict=True):
            yield (theirs, columns[0]), kept


def _side_by_side(axis: tuple[Shard, ...]) -> Iterator[tuple[slice, slice]]:
    """Of each shard its place in the checkpoint's axis and in the tensor's."""
    theirs = ours = 0
    for shard in axis:
        yield (
            slice(theirs + shard.first, theirs + shard.first + shard.size),
            slice(ours, ours + shard.size),
        )
        theirs += shard.whole
        ours += shard.size
