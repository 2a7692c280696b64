"""Target: a tensor of the model, and which part of one of the checkpoint's belongs into it."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

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

    @classmethod
    def whole(cls, tensor: torch.Tensor) -> Target:
        """Of a tensor that every worker holds."""
        return cls(tensor, tuple((all_of(size),) for size in tensor.shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the checkpoint's tensor."""
        return tuple(sum(shard.whole for shard in axis) for axis in self.axes)

    @property
    def turned(self) -> Target:
        """The same for a checkpoint with rows and columns exchanged."""
        return Target(self.tensor.mT, self.axes[::-1])

    def share(self, nbytes: int) -> int:
        """Of the bytes of the checkpoint's tensor, those of the part."""
        return nbytes * self.tensor.numel() // max(1, math.prod(self.shape))

    @property
    def nbytes(self) -> int:
        return sum(kept.nbytes for kept in self.kept) or self.tensor.nbytes

    def pieces(self) -> Iterator[tuple[tuple[slice, ...], torch.Tensor]]:
        """Where in the checkpoint's tensor each part lies, and the view of ours that it fills."""
        if self.kept:
            for place, kept in self.kept_pieces():
                yield place, kept.floats()[: place[0].stop - place[0].start]
            return
        for places in itertools.product(*(_side_by_side(axis) for axis in self.axes)):
            yield tuple(theirs for theirs, _ in places), self.tensor[tuple(ours for _, ours in places)]

    def kept_pieces(self) -> Iterator[tuple[tuple[slice, ...], Kept]]:
        """The same, with what keeps the part."""
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
