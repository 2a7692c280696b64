"""WorkerProcess: the core's end of one worker's process."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from gpu_executor.channel import Channel
from protos.child_process import child_environment

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpu_executor import wire


class WorkerProcess(Channel):
    """A fresh interpreter, and the core's end of its socket."""

    def __init__(self, module: str, start: wire.Start, ring: int, wake: int, descriptors: Sequence[int]) -> None:
        """`descriptors` are others that it is to have, under the same numbers."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *map(str, (theirs.fileno(), ring, wake))],
                pass_fds=[theirs.fileno(), ring, wake, *descriptors],
                env=child_environment(),
                stdin=subprocess.DEVNULL,
            )
        super().__init__(ours, start)

    def __str__(self) -> str:
        return f"worker {self.rank} (pid {self._process.pid})"

    @property
    def pid(self) -> int:
        return self._process.pid

    def how_it_ended(self) -> str:
        try:
            code = self._process.wait(timeout=1.0)  # its socket closes a moment before it is gone
        except subprocess.TimeoutExpired:
            return "closed its socket"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    @property
    def was_killed(self) -> bool:
        return self._process.returncode == -signal.SIGKILL

    def state(self) -> str:
        """The kernel's letter: R runs, S sleeps, D waits for a device, T is stopped, Z is dead."""
        try:
            return "state " + Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return "gone"

    def kill(self) -> None:
        self._process.kill()

    def end(self, grace: float) -> None:
        """Waits so many seconds for it to leave, else makes it."""
        try:
            self._process.wait(grace)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
