"""Kept: weights as products take them: integers, floats of 16 bits, or floats."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.halves import HalvesMatrix
from kernels.quantised import QuantisedMatrix
from kernels.tiled import TILE
from model_runner.quantise import GROUP, QUANTISED, quantise

if TYPE_CHECKING:
    from kernels.quantised import QuantisedFormat

_CHUNK_WEIGHTS = 1 << 14
"""Weights quantised at a time. What is made on the way should be small: the allocator leaves holes where it was."""
HALVES = (torch.bfloat16, torch.float16)


class Kept:
    """Some rows of a Matrix; nothing before they are read."""

    def __init__(self, num_rows: int, columns: int, bits: int = 0) -> None:
        """`bits`: of the integers that a checkpoint's floats become; 0 where they stay floats."""
        self.shape = num_rows, columns
        self._form = QUANTISED.get(bits) if columns % GROUP == 0 else None
        self.weights: QuantisedMatrix | HalvesMatrix | torch.Tensor | None = None

    def integers(self, form: QuantisedFormat) -> QuantisedMatrix:
        """To be filled."""
        self.weights = QuantisedMatrix(*self.shape, form)
        return self.weights

    def fill(self, first: int, weights: torch.Tensor, dtype: torch.dtype) -> None:
        """Rows from `first` on, which begins a tile, that the checkpoint has in this type; what is not filled is 0."""
        if self.weights is None:
            self.weights = self._make(dtype)
        held = self.weights
        if isinstance(held, QuantisedMatrix):
            step = max(1, _CHUNK_WEIGHTS // self.shape[1] // TILE) * TILE
            for start in range(0, len(weights), step):
                held.fill(first + start, *quantise(weights[start : start + step], held.format.bits))
        elif isinstance(held, HalvesMatrix):
            held.fill(first, weights)
        else:
            held[first : first + len(weights)] = weights

    @property
    def nbytes(self) -> int:
        return 0 if self.weights is None else self.weights.nbytes

    @property
    def kind(self) -> str:
        """What the weights are, in words."""
        if isinstance(self.weights, QuantisedMatrix):
            return f"{self.weights.format.bits}-bit integers"
        tensor = self.weights.tiles if isinstance(self.weights, HalvesMatrix) else self.weights
        return "" if tensor is None else type_name(tensor.dtype)

    def _make(self, dtype: torch.dtype) -> QuantisedMatrix | HalvesMatrix | torch.Tensor:
        if self._form is not None:
            return QuantisedMatrix(*self.shape, self._form)
        return HalvesMatrix(*self.shape, dtype) if dtype in HALVES else torch.zeros(self.shape)


def type_name(dtype: torch.dtype) -> str:
    """As options name it."""
    return str(dtype).removeprefix("torch.")
