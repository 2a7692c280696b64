"""Logprobs: log-probabilities of consecutive tokens as columns, from the core's message to the caller's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from protos.messages import LogprobColumns


class Logprobs:
    """Columns that grow row by row; `width` candidates in each row. No object of its own for a token."""

    __slots__ = ("logprobs", "ranks", "top_ids", "top_logprobs", "width")

    def __init__(self, width: int) -> None:
        self.width = width
        self.logprobs: list[float] = []
        self.ranks: list[int] = []
        """1 for the most likely token."""
        self.top_ids: list[int] = []
        """Of each row the most likely first, then the ids that were asked for; row after row."""
        self.top_logprobs: list[float] = []

    def __len__(self) -> int:
        return len(self.logprobs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Logprobs) and all(
            getattr(self, name) == getattr(other, name) for name in self.__slots__
        )

    def __repr__(self) -> str:
        return f"Logprobs({len(self)} tokens, {self.width} candidates each)"

    @property
    def num_bytes(self) -> int:
        """In a message, by estimate."""
        return 6 * len(self.logprobs) + 7 * len(self.top_ids)

    def extend(self, other: Logprobs) -> None:
        self.logprobs += other.logprobs
        self.ranks += other.ranks
        self.top_ids += other.top_ids
        self.top_logprobs += other.top_logprobs

    def split(self, count: int) -> Logprobs:
        """Takes the first `count` rows out."""
        head = Logprobs(self.width)
        cells = count * self.width
        head.logprobs, self.logprobs = self.logprobs[:count], self.logprobs[count:]
        head.ranks, self.ranks = self.ranks[:count], self.ranks[count:]
        head.top_ids, self.top_ids = self.top_ids[:cells], self.top_ids[cells:]
        head.top_logprobs, self.top_logprobs = self.top_logprobs[:cells], self.top_logprobs[cells:]
        return head

    def candidates(self, row: int) -> dict[int, float]:
        """Log-probability by token id, of one row's candidates, in their order."""
        span = slice(row * self.width, (row + 1) * self.width)
        return dict(zip(self.top_ids[span], self.top_logprobs[span], strict=True))


class LogprobTable:
    """What one message of the core tells of some of its tokens."""

    def __init__(self, columns: LogprobColumns) -> None:
        self._logprobs: list[float] = np.frombuffer(columns.logprobs, "<f4").tolist()
        self._ranks: list[int] = np.frombuffer(columns.ranks, "<i4").tolist()
        self._top_ids: list[int] = np.frombuffer(columns.top_ids, "<i4").tolist()
        self._top_logprobs: list[float] = np.frombuffer(columns.top_logprobs, "<f4").tolist()
        widths = np.frombuffer(columns.widths, "<i4")
        self._ends: list[int] = np.cumsum(widths).tolist()
        self._widths: list[int] = widths.tolist()
        self._row_of = {place: row for row, place in enumerate(np.frombuffer(columns.index, "<i4").tolist())}

    def append_to(self, logprobs: Logprobs, place: int) -> None:
        """Adds the row of the message's token at this place."""
        row = self._row_of[place]
        logprobs.logprobs.append(self._logprobs[row])
        logprobs.ranks.append(self._ranks[row])
        if self._widths[row]:
            end = self._ends[row]
            span = slice(end - self._widths[row], end)
            logprobs.top_ids += self._top_ids[span]
            logprobs.top_logprobs += self._top_logprobs[span]

    def all(self) -> Logprobs:
        """Every row, where all have one width: those of a prompt."""
        logprobs = Logprobs(self._widths[0] if self._widths else 0)
        logprobs.logprobs, logprobs.ranks = self._logprobs, self._ranks
        logprobs.top_ids, logprobs.top_logprobs = self._top_ids, self._top_logprobs
        return logprobs
