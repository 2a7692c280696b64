"""PythonProfile: the time that a thread spends in each function, as any of the processes may record it."""

from __future__ import annotations

import cProfile
import tempfile
from pathlib import Path


class PythonProfile:
    """Records the thread that makes it, until it stops; that thread becomes slower meanwhile, calls above all."""

    def __init__(self) -> None:
        self._profile = cProfile.Profile()
        self._profile.enable()

    def stop(self) -> bytes:
        """On the same thread, once: a file for `pstats`, snakeviz and their like."""
        self._profile.disable()
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "pstats"
            self._profile.dump_stats(path)
            return path.read_bytes()
