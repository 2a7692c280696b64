"""Pool: memory that tensors come from and go back to when the last view of them is gone.

The system gives large pieces of memory page by page, and takes longer for it than a kernel does to fill them: the pool
keeps what it was given. numpy asks for pages of 2 MiB where it takes much at once: products that wait for memory find
their weights there with fewer steps.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

ARENA_BYTES = 1 << 24
"""Taken from the system at a time. What is not written is not resident."""
_ALIGNMENT = 64


class Pool:
    """One thread takes from it; memory may come back on any."""

    def __init__(self) -> None:
        self._arenas: list[np.ndarray[Any, np.dtype[np.uint8]]] = []
        self._free: list[tuple[int, int, int]] = []
        """Arena, first byte and end of each piece, in this order."""
        self._returned: deque[tuple[int, int, int]] = deque()
        """Pieces that are no longer used, until memory is wanted."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        cells = math.prod(shape)
        nbytes = max(1, cells) * dtype.itemsize
        size = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        arena, first = self._take(size)
        memory = self._arenas[arena][first : first + nbytes]
        # The tensor's storage keeps this array, and nothing else does.
        weakref.finalize(memory, self._returned.append, (arena, first, first + size)).atexit = False
        return torch.from_numpy(memory).view(dtype)[:cells].view(shape)

    def _take(self, size: int) -> tuple[int, int]:
        self._merge_returned()
        for place, (arena, first, end) in enumerate(self._free):
            if end - first >= size:
                self._free[place : place + 1] = [(arena, first + size, end)] if end - first > size else []
                return arena, first
        # A power of two: sizes that grow little by little do not each take an arena.
        nbytes = max(ARENA_BYTES, 1 << (size - 1).bit_length())
        memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
        offset = -memory.ctypes.data % _ALIGNMENT
        self._arenas.append(memory[offset : offset + nbytes])
        self._free.append((len(self._arenas) - 1, 0, len(self._arenas[-1])))
        return self._take(size)

    def _merge_returned(self) -> None:
        pieces = [self._returned.popleft() for _ in range(len(self._returned))]
        if not pieces:
            return
        merged: list[tuple[int, int, int]] = []
        for arena, first, end in sorted(self._free + pieces):
            if merged and merged[-1][0] == arena and merged[-1][2] == first:
                merged[-1] = (arena, merged[-1][1], end)
            else:
                merged.append((arena, first, end))
        self._free = merged
