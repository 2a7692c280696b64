"""BlackBox: which requests enter the batch in the steps that run, where a dying core cannot take it along.

A page of memory that the front end shares: written before a step starts, read once the core is dead. Requests
that have come through a step are not in it: when a core dies, suspicion falls on those it had just begun with.
"""

from __future__ import annotations

import mmap
import os
import tempfile

import numpy as np

MAX_HANDLES = 8191
_SIZE = 8 * (MAX_HANDLES + 1)


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

    def write(self, handles: list[int]) -> None:
        """Replaces what is in it; of more handles than fit the first."""
        fitting = handles[:MAX_HANDLES]
        self._cells[1 : len(fitting) + 1] = fitting
        self._cells[0] = len(fitting)

    def close(self) -> None:
        """Gives the memory back, and the descriptor that goes with it."""
        del self._cells
        self._memory.close()

    def read(self) -> list[int]:
        handles: list[int] = self._cells[1 : int(self._cells[0]) + 1].tolist()
        return handles
