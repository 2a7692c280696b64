"""LoadBar: how far the weights are, for whoever waits at a terminal."""

from __future__ import annotations

import shutil
from typing import Any

from tqdm import tqdm


class LoadBar:
    """A progress bar on stderr; none where that is not a terminal."""

    def __init__(self) -> None:
        self._bar: tqdm[Any] | None = None

    def __call__(self, done: int, total: int) -> None:
        """Shows `done` of `total` bytes."""
        if self._bar is None:
            # A terminal may not know its size, and tqdm would then show nothing.
            columns, rows = shutil.get_terminal_size()
            self._bar = tqdm(
                desc="loading weights",
                total=total,
                unit="B",
                unit_scale=True,
                unit_divisor=1024,
                ncols=columns - 1,
                nrows=rows,
                leave=False,
                disable=None,
            )
        self._bar.update(done - self._bar.n)
        if done >= total:
            self._bar.close()
