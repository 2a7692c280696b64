"""CoreProcess: a core that we started, and the ties to it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import msgspec

from core_proc.black_box import BlackBox, make_box
from core_proc.connection import OWNER
from protos.child_process import child_environment

if TYPE_CHECKING:
    from collections.abc import Mapping

    from protos.config import EngineConfig
    from protos.messages import CoreReady


class Door(msgspec.Struct, frozen=True):
    """Where other front ends come to a core of ours. It is ours: the core of the day accepts at it."""

    listener: socket.socket
    secret: bytes
    """What they must know."""
    model_digest: str
    """Of the files that they must have, too."""


class CoreProcess:
    """Runs from the start, with `environment` beside ours, tied to us by a socket."""

    def __init__(self, module: str = "", door: Door | None = None, environment: Mapping[str, str] = {}) -> None:
        """`module` is imported at once: so much will be ready when we say what the core is to hold."""
        box = make_box()
        try:
            self._black_box = BlackBox(box)
            self._process, self._socket = _spawn(module, box, door, environment)
        finally:
            os.close(box)
        self._is_taken = False
        self._is_closed = False

    def take_socket(self) -> socket.socket:
        """Once, for whoever closes it."""
        self._is_taken = True
        return self._socket

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def entering(self) -> list[int]:
        """Handles of our requests that were new to the batch in the steps a dead core was at; asked before `reap`."""
        return [handle for client, handle in self._black_box.read() if client == OWNER]

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()

    def wait(self, seconds: float | None = None) -> int | None:
        """The exit code, or minus the signal; None if it still runs then."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def reap(self) -> None:
        """Makes it end, and gives back what it leaves. Idempotent."""
        if self.is_running:
            self.kill()
        self._process.wait()
        if not self._is_closed:
            self._is_closed = True
            self._black_box.close()
            if not self._is_taken:
                self._socket.close()


def explain_exit(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _spawn(
    module: str, box: int, door: Door | None, environment: Mapping[str, str]
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair()
    with theirs:
        descriptors = [theirs.fileno(), box, *([] if door is None else [door.listener.fileno()])]
        process = subprocess.Popen(
            [sys.executable, "-m", "core_proc.proc", module, *map(str, descriptors)],
            pass_fds=descriptors,
            env={**child_environment(), **environment},
            stdin=subprocess.DEVNULL,
            # A session of its own: what the terminal sends to all of us, Ctrl-C above all, is for the front end.
            start_new_session=True,
        )
    return process, ours


def pinned(config: EngineConfig, ready: CoreReady) -> EngineConfig:
    """The config of a core that holds what this one does: what was accepted for one must fit the next."""
    replace = msgspec.structs.replace
    return replace(
        config,
        model=replace(config.model, max_model_len=ready.max_model_len),
        cache=replace(config.cache, num_kv_blocks=ready.kv_capacity_tokens // ready.block_size + 1),
    )
