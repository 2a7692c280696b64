"""LoadBar: how far the weights are, for whoever waits at a terminal."""

from __future__ import annotations

from typing import Any

from tqdm import tqdm


class LoadBar:
    """A progress bar on stderr; none where that is not a terminal."""

    def __init__(self) -> None:
        self._bar: tqdm[Any] | None = None

    def __call__(self, done: int, total: int) -> None:
        """Shows `done` of `total` bytes."""
        if self._bar is None:
            self._bar = tqdm(desc="loading", total=total, unit="B", unit_scale=True, leave=False, disable=None)
        self._bar.update(done - self._bar.n)
        if done >= total:
            self._bar.close()
