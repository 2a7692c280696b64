"""StepTime: how long a step takes, learnt from those that came back."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from protos.step import SchedulerOutput

Floats = npt.NDArray[np.float64]
_UNITS: Floats = np.array([1.0, 16.0, 64.0, 65536.0])
"""Of what a step's time grows with, so that each counts for about as much in a usual step."""


class StepTime:
    """Seconds of a step as a sum of what it is made of: a fixed part, rows that draw, tokens, and tokens times the
    context they attend to, which makes the end of a long prompt dearer than its beginning.

    Least squares of the relative error, in which a step that the machine held up counts for little; with forgetting, as
    devices have fast and slow moments. What steps with prompts tell is kept apart from what the others tell, of which
    there may be thousands in between.
    """

    FADE = 0.9
    """What the steps so far count for, of each kind, when one more is seen."""
    EVERY = (4, 1)
    """Of steps without prompts, and with some, one in so many is looked at: the former are many, and alike."""
    RIDGE = 1e-4
    """Keeps what no step has told yet small."""

    def __init__(self) -> None:
        self._squares: Floats = np.zeros((2, 4, 4))
        self._sums: Floats = np.zeros((2, 4))
        self._num_seen = [-1, -1]
        self._costs: tuple[float, float, float, float] | None = (0.0, 0.0, 0.0, 0.0)

    def __repr__(self) -> str:
        fixed, draw, token, cell = (1e6 * cost for cost in self.costs)
        return f"StepTime({fixed:.0f} + {draw:.1f} rows + {token:.1f} tokens + {cell:.5f} cells, µs)"

    def learn(self, step: SchedulerOutput, num_prompt_tokens: int, seconds: float) -> None:
        """A step, with so many tokens that were not the only one of their row, took so long."""
        kind = int(num_prompt_tokens > 0)
        self._num_seen[kind] += 1
        if seconds <= 0 or self._num_seen[kind] % self.EVERY[kind]:
            return
        counts = step.counts.astype(np.float64)
        cells = float(counts @ step.starts) + float(counts @ counts) / 2
        num_rows, num_tokens = float(np.count_nonzero(step.samples)), float(counts.sum())
        parts = np.array([1.0, num_rows, num_tokens, cells]) / (_UNITS * seconds)
        self._squares[kind] = self.FADE * self._squares[kind] + np.outer(parts, parts)
        self._sums[kind] = self.FADE * self._sums[kind] + parts
        self._costs = None

    @property
    def costs(self) -> tuple[float, float, float, float]:
        """Seconds of a step, of a row that draws, of a token, and of a token of context that a token attends to. All 0
        if nothing is known."""
        if self._costs is None:
            self._costs = self._solve()
        return self._costs

    def _solve(self) -> tuple[float, float, float, float]:
        squares, sums = self._squares.sum(axis=0), self._sums.sum(axis=0)
        squares += self.RIDGE * np.trace(squares) / len(squares) * np.eye(len(squares))
        costs = np.zeros(len(sums))
        parts = list(range(len(sums)))
        while parts:
            found = np.linalg.solve(squares[np.ix_(parts, parts)], sums[parts])
            if (found >= 0).all():
                costs[parts] = found
                break
            parts.pop(int(found.argmin()))  # nothing makes a step shorter
        fixed, draw, token, cell = (costs / _UNITS).tolist()
        return fixed, draw, token, cell

    def seconds(self, num_rows: float, num_tokens: float, cells: float) -> float:
        """Of a step in which so many rows draw, of so many tokens, which attend to so many in all; 0 if unknown."""
        fixed, draw, token, cell = self.costs
        return fixed + draw * num_rows + token * num_tokens + cell * cells

    def added(self, num_tokens: float, start: float) -> float:
        """What so many tokens of a prompt, from a position on, add to a step."""
        _, _, token, cell = self.costs
        return num_tokens * (token + cell * (start + num_tokens / 2))

    def tokens_within(self, seconds: float, start: float) -> float:
        """How many tokens of a prompt, from a position on, add no more than that to a step."""
        _, _, token, cell = self.costs
        first = token + cell * start
        slowest = first + math.sqrt(first**2 + 2 * cell * seconds)
        return 2 * seconds / slowest if slowest else math.inf
