"""Child processes of this program: what they start with, and that none outlives the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PR_SET_PDEATHSIG = 1


def child_environment() -> dict[str, str]:
    """Ours, with the folders of this program on the path wherever it was started from."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def die_with_parent() -> None:
    """Asks the kernel to kill this process when the one that started it dies, however that dies.

    To be called at once: should the parent be dead already, nobody would tell.
    """
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)
