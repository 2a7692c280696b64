"""TiledMatrix: what packed weights of linear layers have in common, whatever their numbers are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import copy
from typing import TYPE_CHECKING

import torch

from kernels.pool import Pool

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence
    from typing import Self

TILE = 16
"""Outputs that lie together; cpp/quantised_layout.h has the same."""
_MEMORY = Pool()
"""All weights side by side: apart, those below 2 MiB would not be on pages of that size."""


class TiledMatrix(ABC):
    """Weights [outputs, inputs], filled rows by rows, in order; vectors run over the TILE outputs of a tile."""

    def __init__(self, outputs: int, inputs: int, tile_shape: tuple[int, int], dtype: torch.dtype) -> None:
        """`tile_shape`: of the tensor that is one tile."""
        self.shape = outputs, inputs
        self.tiles = _MEMORY.empty((-(-outputs // TILE), *tile_shape), dtype).zero_()
        """[tiles, ...]; what is beyond the last output is 0."""

    @property
    @abstractmethod
    def layout(self) -> Hashable:
        """What matrices have in common that may be joined, beside their inputs."""

    @abstractmethod
    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """The weights of some outputs: [n] to [n, inputs] float32."""

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """One above the other, of one layout, all but the last of whole tiles."""
        assert all(part.shape[0] % TILE == 0 for part in parts[:-1]), "only the last may end inside a tile"
        whole = copy(parts[0])
        whole.shape = sum(part.shape[0] for part in parts), parts[0].shape[1]
        tiles = [part.tiles for part in parts]
        shape = sum(map(len, tiles)), *tiles[0].shape[1:]
        whole.tiles = torch.cat(tiles, out=_MEMORY.empty(shape, tiles[0].dtype))
        return whole

    @property
    def nbytes(self) -> int:
        return self.tiles.nbytes

    def chunks(self, rows: int = 1024) -> Iterator[torch.Tensor]:
        """All weights in float32, some rows at a time."""
        for first in range(0, self.shape[0], rows):
            yield self.rows(torch.arange(first, min(self.shape[0], first + rows)))
