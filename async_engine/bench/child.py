"""Child: a process of a benchmark, which does not outlive it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING

from protos.child_process import child_environment
from protos.errors import StartupError

if TYPE_CHECKING:
    from typing import Self

STOP_SECONDS = 5.0


class Child:
    """Runs `python -m MODULE ARGUMENTS`, which reads commands and writes answers line by line. A context manager.

    It is in a session of its own, so that Ctrl-C reaches the benchmark alone, which then stops it.
    """

    def __init__(self, module: str, *arguments: str) -> None:
        self._module = module
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
            env=child_environment(),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self._process.pid

    def read_line(self) -> str:
        """The next line of its output. Raises StartupError, with its last words, if it ended instead."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._log.seek(0)
            words = self._log.read().strip().rpartition("\n")[2] or f"exit code {self._process.returncode}"
            raise StartupError(f"{self._module} ended: {words}")
        return line

    def ask(self, command: str) -> str:
        """Sends a line and reads one. Raises StartupError as `read_line` does."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it ended: the answer will be its last words
            self._process.stdin.write(command + "\n")
            self._process.stdin.flush()
        return self.read_line()

    def stop(self) -> None:
        """Ends it, gently first. Idempotent."""
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._log):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
