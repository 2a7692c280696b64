"""HalvesMatrix: the weights of a linear layer in 16 bits, packed so that vectors run over outputs."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.tiled import TILE, TiledMatrix


class HalvesMatrix(TiledMatrix):
    """Numbers of bfloat16 or float16."""

    def __init__(self, outputs: int, inputs: int, dtype: torch.dtype) -> None:
        super().__init__(outputs, inputs, (inputs, TILE), dtype)

    @property
    def layout(self) -> torch.dtype:
        return self.tiles.dtype

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
