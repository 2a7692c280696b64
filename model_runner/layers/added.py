"""Added: what adapters add to the products of one Linear, for the tokens that are theirs."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from kernels.low_rank import LowRank, Tokens
    from kernels.ops import Ops

    Groups = Sequence[tuple[int, Tokens]]
    """Of the step under way, the tokens of each slot that has any."""


class Added:
    def __init__(self, ops: Ops) -> None:
        self.groups: Groups = ()
        """Empty in a step without adapters."""
        self.slots: dict[int, LowRank] = {}
        """Of the adapters that have something for this Linear."""
        self._ops = ops

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """x [T, inputs], y [T, outputs] in place; the rows of other tokens are not touched."""
        for slot, tokens in self.groups:
            if slot in self.slots:
                self._ops.add_low_rank(y, x, self.slots[slot], tokens)


class AddedRows(NamedTuple):
    """Where a tensor of the checkpoint has its part in what is added."""

    added: Added
    first: int
    """Column of y."""
