"""Reloaded: what some files say, read again when one of them changes."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Generic, TypeVar

from protos.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Reloaded(Generic[T]):
    """The value of `load()`, which reads `paths`. Looking costs a stat per file; files that are of no use leave the
    value as it was. Raises StartupError, from `load`, if they are of no use at the beginning.
    """

    def __init__(self, paths: Sequence[Path], load: Callable[[], T]) -> None:
        self._paths = paths
        self._load = load
        # Before they are read: what changes meanwhile is read once more.
        self._seen = self._stamps()
        self.value = load()

    def refresh(self) -> bool:
        """Whether the files have changed to something of use, which is the value from now on."""
        stamps = self._stamps()
        if stamps == self._seen:
            return False
        self._seen = stamps
        try:
            self.value = self._load()
        except StartupError as error:
            logger.error("%s; what it said before stays in force", error)
            return False
        logger.info("read %s again", ", ".join(map(str, self._paths)))
        return True

    def _stamps(self) -> list[tuple[int, ...]]:
        return [_stamp(path) for path in self._paths]


def _stamp(path: Path) -> tuple[int, ...]:
    """Differs when the file's content does; empty where there is no file."""
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size
