"""HalvesMatrix: the weights of a linear layer in 16 bits, packed so that vectors run over outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from kernels.quantised import TILE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class HalvesMatrix:
    """Weights [outputs, inputs] of bfloat16 or float16, filled rows by rows, in order."""

    def __init__(self, outputs: int, inputs: int, dtype: torch.dtype) -> None:
        self.shape = outputs, inputs
        self.tiles = torch.zeros(-(-outputs // TILE), inputs, TILE, dtype=dtype)
        """What is beyond the last output is 0."""

    @classmethod
    def joined(cls, parts: Sequence[HalvesMatrix]) -> HalvesMatrix:
        """One above the other, of one type, all but the last of whole tiles."""
        assert all(part.shape[0] % TILE == 0 for part in parts[:-1]), "only the last may end inside a tile"
        self = cls(0, parts[0].shape[1], parts[0].tiles.dtype)
        self.shape = sum(part.shape[0] for part in parts), parts[0].shape[1]
        self.tiles = torch.cat([part.tiles for part in parts])
        return self

    @property
    def nbytes(self) -> int:
        return self.tiles.nbytes

    def fill(self, first: int, weights: torch.Tensor) -> None:
        """Rows from `first`, which begins a tile: [rows, inputs], of the matrix's type or numbers of it."""
        assert first % TILE == 0, "rows come by tiles"
        if spare := -len(weights) % TILE:
            weights = F.pad(weights, (0, 0, 0, spare))
        tiles = weights.reshape(-1, TILE, self.shape[1])
        self.tiles[first // TILE :][: len(tiles)] = tiles.transpose(1, 2)

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """The weights of some outputs: [n] to [n, inputs] float32."""
        return self.tiles[indices // TILE, :, indices % TILE].float()

    def chunks(self, rows: int = 1024) -> Iterator[torch.Tensor]:
        """All weights in float32, some rows at a time."""
        for first in range(0, self.shape[0], rows):
            yield self.rows(torch.arange(first, min(self.shape[0], first + rows)))
