"""Chunks: how many tokens of prompts a step computes, so that outputs that run beside them do not stall."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from core_proc.step_time import StepTime

if TYPE_CHECKING:
    from protos.config import SchedulerOptions

Int32s = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]


class StepBudget:
    """What a step may still compute: tokens in all, tokens of any one prompt, and what prompts may add to its time."""

    def __init__(self, tokens: int, most: int) -> None:
        self.tokens = tokens
        self._most = most
        self._fewest = 0
        self._seconds = self._each = math.inf
        self._kept = 0.0
        self._times: StepTime | None = None

    def keep(self, times: StepTime, seconds: float, num_sharers: int, fewest: int) -> None:
        """Prompts get `seconds`, which as many of them share, but `fewest` tokens in any case."""
        self._times, self._seconds, self._fewest = times, seconds, fewest
        self._each = seconds / num_sharers
        self._kept = self._each if num_sharers > 1 else 0.0

    def copy(self) -> StepBudget:
        """Once a step: the copy that is for all classes takes several times as long."""
        other = StepBudget(self.tokens, self._most)
        vars(other).update(vars(self))
        return other

    @property
    def is_open(self) -> bool:
        """Whether it takes one more prompt."""
        return self.tokens > 0 and (self._seconds > 0 or self._fewest > 0)

    def deal(self, todo: Int32s, starts: Int32s) -> Int32s:
        """How many of their tokens the running rows compute, first served first; `todo` may change."""
        total = int(todo.sum())
        if self._times is None and total <= min(self._most, self.tokens):
            self.tokens -= total  # nothing to cut: so it is when all rows decode
            return todo
        if self._times is None:
            np.minimum(todo, self._most, out=todo)
        else:
            for index in np.flatnonzero(todo > 1).tolist():
                todo[index] = self._fit(int(todo[index]), int(starts[index]), self._fewest)
        ends = np.cumsum(todo)
        if len(ends) and ends[-1] > self.tokens:
            todo = np.clip(self.tokens - (ends - todo), 0, todo).astype(np.int32)
        self.tokens -= min(self.tokens, int(ends[-1])) if len(ends) else 0
        return todo

    def take(self, todo: int, start: int) -> int:
        """How many of a prompt's tokens are computed, from a position on: at least one, if it `is_open`."""
        count = min(self._fit(todo, start, max(1, self._fewest)), self.tokens)
        self.tokens -= count
        return count

    def _fit(self, todo: int, start: int, fewest: int) -> int:
        count = min(todo, self._most)
        if self._times is not None:
            # A piece is to compute as much as it reads, if that leaves another prompt its part.
            wanted = max(self._each, min(2 * self._times.of_reading(start), self._seconds - self._kept))
            within = self._times.tokens_within(min(wanted, self._seconds), start)
            count = int(min(count, max(within, fewest)))
            self._fewest = max(0, self._fewest - count)
            self._seconds -= self._times.added(count, start) if count else 0.0
        return count


class Chunks:
    """Opens the budgets of steps.

    A step that nobody waits for takes prompts up to the budget of tokens. Beside outputs that wait for their next
    token it takes as much of them as is expected to fit into the time that these may wait.
    """

    GAP_STEPS = 2.5
    """The gap that is aimed at where none is given, in times of the step as it would be without prompts."""
    FEWEST = 2
    """Prompt tokens of a step, however short the gap: prompts have to come to an end too."""
    SHARERS = 4
    """Prompts that share a step at most: were there more, each would be computed in crumbs."""

    def __init__(self, options: SchedulerOptions, steps_per_token: int = 1) -> None:
        """A row is in one of so many steps."""
        self.times = StepTime()
        self.max_tokens = options.max_num_batched_tokens
        self._most = options.long_prefill_threshold or max(1, self.max_tokens // 4)
        self._gap = options.max_inter_token_gap / steps_per_token

    def budget(
        self, todo: Int32s, starts: Int32s, waits: Bools, num_waiting: int, is_trial: bool = False
    ) -> StepBudget:
        """Of a step, before anything is chosen: `todo` is tokens to compute of each running row, `starts` those it has
        computed, and `waits` whether it waits for one that is in flight; `num_waiting` prompts may be admitted."""
        if is_trial:  # it is not to take long, whoever is in it
            return StepBudget(self.max_tokens, self._most)
        if np.count_nonzero(todo) + num_waiting <= 1 and not waits.any():
            return StepBudget(self.max_tokens, self.max_tokens)
        budget = StepBudget(self.max_tokens, self._most)
        num_prompts = num_waiting + int(np.count_nonzero(todo > 1))
        if not num_prompts:
            return budget
        outputs = (todo == 1) | waits
        num_outputs = float(np.count_nonzero(outputs))
        usual = self.times.of_outputs(num_outputs, float(starts[outputs].sum())) if num_outputs else 0.0
        if usual:
            gap = self._gap or self.GAP_STEPS * usual
            budget.keep(self.times, gap - usual, min(self.SHARERS, num_prompts), self.FEWEST)
        return budget
