"""Kept: weights that are what the checkpoint makes of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.quantised import QuantisedMatrix

if TYPE_CHECKING:
    from kernels.quantised import QuantisedFormat


class Kept:
    """Some rows of a Matrix: integers or floats; nothing before they are read."""

    def __init__(self, num_rows: int, columns: int) -> None:
        self.shape = num_rows, columns
        self.weights: QuantisedMatrix | torch.Tensor | None = None

    def integers(self, form: QuantisedFormat) -> QuantisedMatrix:
        """To be filled."""
        self.weights = QuantisedMatrix(*self.shape, form)
        return self.weights

    def floats(self) -> torch.Tensor:
        """To be filled; zeros at first."""
        if not isinstance(self.weights, torch.Tensor):
            self.weights = torch.zeros(self.shape)
        return self.weights

    @property
    def nbytes(self) -> int:
        return 0 if self.weights is None else self.weights.nbytes
