"""StepTime: how long a step takes, learnt from those that came back."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from protos.step import SchedulerOutput

Floats = npt.NDArray[np.float64]
Costs = tuple[float, float, float, float, float]
_UNITS: Floats = np.array([1.0, 16.0, 64.0, 65536.0, 8192.0])
"""Of what a step's time grows with, so that each counts for about as much in a usual step."""


class StepTime:
    """Seconds of a step as a sum of what it is made of: a fixed part, rows that draw, tokens, tokens times the context
    they attend to, which makes the end of a long prompt dearer than its beginning, and the context that each row reads
    once, however few its tokens are, which makes small pieces of a prompt dear.

    Least squares of the relative error, in which a step that the machine held up counts for little; with forgetting, as
    devices have fast and slow moments. What steps with prompts tell is kept apart from what the others tell, of which
    there may be thousands in between.
    """

    FADE = (0.93, 0.96)
    """Of steps without prompts, and with some: what those so far count for when one more is seen."""
    EVERY = (4, 1)
    """One in so many of them is looked at: those without prompts are many, and alike."""
    RIDGE = 1e-4
    """Keeps what no step has told yet small."""
    GROWTH, SHRINK = 2.0, 0.9
    """Prompts get at most so many times the tokens that a step had of late, since what a token takes is not known well
    where steps are much alike; and what the largest such step counts for when one more is seen."""

    def __init__(self) -> None:
        self._squares: Floats = np.zeros((2, len(_UNITS), len(_UNITS)))
        self._sums: Floats = np.zeros((2, len(_UNITS)))
        self._num_seen = [-1, -1]
        self._largest = 0.0
        """Tokens of prompts of the largest step of late."""
        self._costs: Costs | None = (0.0,) * 5

    def __repr__(self) -> str:
        fixed, draw, token, cell, read = (1e6 * cost for cost in self.costs)
        return f"StepTime({fixed:.0f} + {draw:.1f} rows + {token:.1f} tokens + {cell:.5f} cells + {read:.5f} read, µs)"

    def learn(self, step: SchedulerOutput, num_prompt_tokens: int, seconds: float) -> None:
        """A step, with so many tokens that were not the only one of their row, took so long."""
        kind = int(num_prompt_tokens > 0)
        if kind:
            self._largest = max(num_prompt_tokens + 1.0, self.SHRINK * self._largest)
        self._num_seen[kind] += 1
        if seconds <= 0 or self._num_seen[kind] % self.EVERY[kind]:
            return
        parts = _parts(step) / seconds
        self._squares[kind] = self.FADE[kind] * self._squares[kind] + np.outer(parts, parts)
        self._sums[kind] = self.FADE[kind] * self._sums[kind] + parts
        self._costs = None

    @property
    def costs(self) -> Costs:
        """Seconds of a step, of a row that draws, of a token, of a token of context that a token attends to, and of one
        that a row reads. All 0 if nothing is known."""
        if self._costs is None:
            self._costs = self._solve()
        return self._costs

    def _solve(self) -> Costs:
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
        fixed, draw, token, cell, read = (costs / _UNITS).tolist()
        return fixed, draw, token, cell, read

    def of_step(self, step: SchedulerOutput) -> float:
        """Seconds of a step; 0 if unknown."""
        return float(_parts(step) @ (np.array(self.costs) * _UNITS))

    def of_outputs(self, num_rows: float, context: float) -> float:
        """Of a step in which so many rows compute and draw one token each, behind so many in all; 0 if unknown."""
        fixed, draw, token, cell, read = self.costs
        return fixed + (draw + token) * num_rows + (cell + read) * context

    def of_reading(self, start: float) -> float:
        """What a piece of a prompt, from a position on, adds to a step however few its tokens are."""
        return self.costs[-1] * start

    def added(self, num_tokens: float, start: float) -> float:
        """What so many tokens of a prompt, from a position on, add to a step."""
        _, _, token, cell, read = self.costs
        return read * start + num_tokens * (token + cell * (start + num_tokens / 2))

    def tokens_within(self, seconds: float, start: float) -> float:
        """How many tokens of a prompt, from a position on, add no more than that to a step."""
        _, _, token, cell, read = self.costs
        seconds = max(0.0, seconds - read * start)
        first = token + cell * start
        slowest = first + math.sqrt(first**2 + 2 * cell * seconds)
        most = self.GROWTH * self._largest or math.inf
        return min(most, 2 * seconds / slowest) if slowest else most


def _parts(step: SchedulerOutput) -> Floats:
    """How much of everything is in a step, in the units of `_UNITS`."""
    counts = step.counts.astype(np.float64)
    cells = float(counts @ step.starts) + float(counts @ counts) / 2
    num_rows = float(np.count_nonzero(step.samples))
    return np.array([1.0, num_rows, float(counts.sum()), cells, float(step.starts.sum())]) / _UNITS
