"""Channel: the core's end of a worker's socket."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from gpu_executor import wire
from protos import codec

if TYPE_CHECKING:
    from collections.abc import Callable

RECEIVE_BYTES = 1 << 16


class Channel:
    """Carries what a worker tells, and ends when its process does."""

    def __init__(self, sock: socket.socket, start: wire.Start) -> None:
        """Tells the worker what to load."""
        self.rank = start.place.rank
        self._socket = sock
        self._decoder = codec.FrameDecoder(wire.from_worker)
        self._buffer = bytearray(RECEIVE_BYTES)
        sock.sendall(codec.frame(start, wire.encoder))

    def fileno(self) -> int:
        return self._socket.fileno()

    def receive(self) -> list[wire.FromWorker] | None:
        """What has come, waiting for some; None once the other end is closed."""
        try:
            size = self._socket.recv_into(self._buffer)
        except OSError:
            size = 0
        return list(self._decoder.feed(memoryview(self._buffer)[:size])) if size else None

    def send(self, data: bytes, wait: Callable[[], None]) -> None:
        """Calls `wait` as long as there is no room. To one that is gone it goes nowhere: `receive` tells that."""
        left = memoryview(data)
        while left:
            try:
                left = left[self._socket.send(left, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                wait()
            except OSError:
                return

    def close(self) -> None:
        self._socket.close()
