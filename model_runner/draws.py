"""Draws: the rows of a step that draw a token, as the sampler sees them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from model_runner.features import EDITS, used_by_any

if TYPE_CHECKING:
    from model_runner.input_batch import InputBatch
    from protos.step import GrammarMask

Int32s = npt.NDArray[np.int32]


class Draws:
    """S places, parallel to the rows of the logits [S, vocabulary]."""

    def __init__(self, batch: InputBatch, rows: Int32s, positions: Int32s, mask: GrammarMask | None = None) -> None:
        """`rows` are the batch's rows that draw, `positions` the indices in prompt + output of what they draw."""
        self.batch, self.rows, self.positions = batch, rows, positions
        self.mask = mask if mask is not None and len(mask.index) else None
        self.uses: npt.NDArray[np.uint16] = batch.uses[rows]
        """Bits of features.py, by place."""
        self.used = used_by_any(self.uses)
        """What any of them uses."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def edited(self) -> bool:
        """Whether any logits change before the temperature does."""
        return bool(self.used & EDITS) or self.mask is not None

    def places(self, feature: int) -> npt.NDArray[np.intp]:
        """The places that use a feature, or one of several."""
        return np.flatnonzero(self.uses & feature)

    def edited_places(self) -> npt.NDArray[np.bool_]:
        """[S]: whether the place's logits change before the temperature does."""
        edited = (self.uses & EDITS) != 0
        if self.mask is not None:
            edited[self.mask.index] = True
        return edited
