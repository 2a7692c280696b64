"""Stamps: when each step's tokens were there, told from the server's process to the load's through a file.

Both read the same monotonic clock of one machine.
"""

from __future__ import annotations

import struct
import time
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

    from async_engine.bench.client import Record


class StampWriter:
    """Appends a time per step; unbuffered, so that a reader sees it at once."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115

    def stamp(self) -> None:
        self._file.write(struct.pack("<d", time.monotonic()))

    def close(self) -> None:
        self._file.close()


def latencies(path: str, records: Iterable[Record], start: float, end: float) -> npt.NDArray[np.float64]:
    """Seconds from its step to its receipt of each token received between `start` and `end`.

    For streams that got one token in every step from their first one on. Which step that was is not
    said; but a token cannot be received before its step, and most are received before the next one.
    """
    stamps = np.fromfile(path, "<f8")
    found = []
    for record in records:
        times = np.repeat([time for time, _ in record.receipts], [count for _, count in record.receipts])
        offsets = np.arange(len(times))
        first_step = int((np.searchsorted(stamps, times, "right") - 1 - offsets).min())
        chosen = (times > start) & (times <= end)
        found.append(times[chosen] - stamps[first_step + offsets[chosen]])
    return np.concatenate(found)
