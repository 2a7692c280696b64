"""PromptSpans: the prompt tokens whose log-probabilities a step tells.

The token at position p is predicted by the one at p - 1, so a chunk of a prompt tells of the tokens after
each of its own: all but its first, and the first of the next chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from protos.step import SchedulerOutput

Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PromptSpans:
    """One span of prompt positions per row, as parallel columns; none is empty."""

    rows: Int32s
    starts: Int32s
    """First position told of."""
    counts: Int32s
    tokens: npt.NDArray[np.int64]
    """[sum of counts]: of each position, the token of the step that predicts it."""

    def flat(self) -> tuple[Int32s, npt.NDArray[np.int64]]:
        """(row, position) of every position, in order."""
        within = np.arange(len(self.tokens)) - np.repeat(np.cumsum(self.counts) - self.counts, self.counts)
        return np.repeat(self.rows, self.counts), np.repeat(self.starts, self.counts) + within


def prompt_spans(
    step: SchedulerOutput, asking: npt.NDArray[np.bool_], first_positions: Int32s, num_prompt_tokens: Int32s
) -> PromptSpans | None:
    """The spans of a step; the other three are columns parallel to its rows. None where there are none."""
    starts = np.maximum(step.starts + 1, first_positions)
    counts = np.minimum(step.starts + step.counts, num_prompt_tokens - 1) + 1 - starts
    chosen = np.flatnonzero(asking & (counts > 0))
    if not len(chosen):
        return None
    first_tokens = (np.cumsum(step.counts) - step.counts + starts - 1 - step.starts)[chosen]
    starts, counts = starts[chosen], counts[chosen]
    tokens = np.arange(counts.sum()) + np.repeat(first_tokens - (np.cumsum(counts) - counts), counts)
    return PromptSpans(step.rows[chosen], starts, counts, tokens.astype(np.int64))
