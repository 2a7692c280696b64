"""StepShares: how much each of the steps in flight takes, so that no stage of a pipeline waits for work.

A step passes one stage after another, and stages work at different steps. A row's next token is known when its
step has come out of the last stage: until then it is in no other step. So what there is to compute is dealt out
evenly. Were it all in the first step, the stages behind it would stand idle; were one step larger than
the others, each stage would wait for it in turn.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int32s = npt.NDArray[np.int32]
MIN_CHUNK = 64
"""Prompt tokens that are not worth dealing out: the weights are read for each part of them anew."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one step may take."""

    rows: int
    """That compute one token."""
    prompt_tokens: int
    """Of rows that compute more."""

    def limit(self, todo: Int32s) -> None:
        """Leaves the rest to other steps, in place; `todo` is tokens per row, first served first."""
        (single,) = np.nonzero(todo == 1)
        (several,) = np.nonzero(todo > 1)
        todo[single[self.rows :]] = 0
        chunks = todo[several]
        before = np.cumsum(chunks) - chunks
        todo[several] = np.clip(self.prompt_tokens - before, 0, chunks)

    def left(self, counts: Int32s) -> int:
        """Prompt tokens that it may still take when it takes so many of each row."""
        return self.prompt_tokens - _prompt_tokens(counts)


class StepShares:
    """For up to `num_steps` in flight. Told of each step as it is issued and as it returns, in order."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self._in_flight: deque[int] = deque()
        """Prompt tokens of each step."""

    def issued(self, counts: Int32s) -> None:
        """A step computes so many tokens of each of its rows."""
        self._in_flight.append(_prompt_tokens(counts))

    def returned(self) -> None:
        self._in_flight.popleft()

    def share(self, todo: Int32s, waits: npt.NDArray[np.bool_], num_waiting: int) -> Share:
        """Of the next step: an even part of what is ready and of what is in flight, which will be ready again.

        `todo` is tokens per running row, `waits` whether it waits for a token, and `num_waiting` tokens of requests
        that have no row yet.
        """
        num_rows = int(np.count_nonzero(todo == 1)) + int(np.count_nonzero(waits))
        num_tokens = _prompt_tokens(todo) + num_waiting + sum(self._in_flight)
        # Chunks may be as small as one token, so that there are such rows all the same.
        return Share(max(1, -(-num_rows // self.num_steps)), max(MIN_CHUNK, -(-num_tokens // self.num_steps)))


def _prompt_tokens(counts: Int32s) -> int:
    """Of rows that compute several tokens: that is, of prompts, but for some that have one left."""
    return int(counts[counts > 1].sum())
