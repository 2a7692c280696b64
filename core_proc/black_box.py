"""BlackBox: which requests enter the batch in the steps that run, where a dying core cannot take it along.

Some memory that the core shares with whoever started it: written before a step starts, read once the core is dead.
Requests that have come through a step are not in it: when a core dies, suspicion falls on those it had just begun with.
"""

from __future__ import annotations

import mmap
import os
import tempfile

import numpy as np

MAX_ENTRIES = 8191
_SIZE = 8 * (1 + 2 * MAX_ENTRIES)

Entry = tuple[int, int]
"""A client, by the core's number, and a handle of it."""


def make_box() -> int:
    """The descriptor of a file without a name, for both sides to open the box by. The caller closes it."""
    with tempfile.TemporaryFile() as file:
        file.truncate(_SIZE)
        return os.dup(file.fileno())


class BlackBox:
    """`descriptor` is one from `make_box`; it may be closed afterwards."""

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, _SIZE)
        self._cells = np.frombuffer(self._memory, "<i8")

    def write(self, entries: list[Entry]) -> None:
        """Replaces what is in it; of more requests than fit the first."""
        fitting = np.array(entries[:MAX_ENTRIES], "<i8").reshape(-1)
        self._cells[1 : len(fitting) + 1] = fitting
        self._cells[0] = len(fitting)

    def close(self) -> None:
        """Gives the memory back, and the descriptor that goes with it."""
        del self._cells
        self._memory.close()

    def read(self) -> list[Entry]:
        cells = self._cells[1 : int(self._cells[0]) + 1]
        return list(map(tuple, cells.reshape(-1, 2).tolist()))
