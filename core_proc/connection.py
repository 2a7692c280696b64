"""Connection: a front end's socket, which the main loop never waits for."""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import struct
import threading
from typing import TYPE_CHECKING

from protos import codec

if TYPE_CHECKING:
    from collections.abc import Callable

    from protos.messages import ToCore, ToFrontEnd

logger = logging.getLogger(__name__)

OWNER = 0
"""Number of the front end that started the core; others count from 1."""
CLOSE_SECONDS = 5.0
MAX_QUEUED_MESSAGES = 8
"""A front end that has so many to read gets no more outputs for now."""
MAX_UNREAD_MESSAGES = 1 << 16
"""... and one that asks and asks without reading the answers is cut off."""


class Connection:
    """Two threads: one decodes what comes in, one writes what the socket does not take at once. What it does is written
    by whoever sends: the front end then works on it while the core prepares the next step, not while it computes.

    `receive` is called on the reader's thread with each message, and with None when the other side is gone.
    """

    def __init__(self, sock: socket.socket, client: int = OWNER) -> None:
        self.client = client
        self.on_room: Callable[[], None] = lambda: None
        """Called on the writer's thread when `has_room`, asked in vain, is true again."""
        self._socket = sock
        self._awaits_room = False
        self._decoder = codec.FrameDecoder(codec.to_core)
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._order = threading.Lock()
        self._num_behind = 0
        """Frames that the writer has been given, and not written yet: what comes now goes behind them."""
        self._writer = threading.Thread(target=self._write, name="writer", daemon=True)
        self._writer.start()
        self._reader: threading.Thread | None = None

    def limit_silence(self, seconds: float) -> None:
        """The other side is gone when it has said nothing, or taken nothing, for so long."""
        whole = int(seconds)
        limit = struct.pack("@ll", whole, int((seconds - whole) * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def read_first(self) -> ToCore:
        """Waits for the first message, before `start_reading`. Raises EOFError if the other side leaves."""
        while data := self._socket.recv(1 << 16):
            for message in self._decoder.feed(data):
                return message
        raise EOFError("the front end left before saying hello")

    def start_reading(self, receive: Callable[[ToCore | None], None]) -> None:
        self._reader = threading.Thread(target=self._read, args=(receive,), name="reader", daemon=True)
        self._reader.start()

    @property
    def has_room(self) -> bool:
        """Whether it takes what it is sent. If not, `on_room` will tell."""
        if self._outbox.qsize() < MAX_QUEUED_MESSAGES:
            return True
        self._awaits_room = True
        return self._outbox.qsize() < MAX_QUEUED_MESSAGES  # the writer may not have seen that it is awaited

    def send(self, message: ToFrontEnd) -> None:
        """Never waits. Outputs, which are without end, are for who `has_room`."""
        frame = codec.encode_frame(message)
        with self._order:
            if not self._num_behind:
                frame = frame[self._write_at_once(frame) :]
            if frame:
                self._num_behind += 1
                self._outbox.put(frame)
        if self._outbox.qsize() > MAX_UNREAD_MESSAGES:
            self._cut()

    def leave(self) -> None:
        """Ends both threads, without a last word."""
        self._cut()
        self._outbox.put(None)

    def flush_and_close(self) -> None:
        """Writes what is queued, then closes; gives up on a front end that does not read.

        The front end closes first: one that was just writing would see that fail, and never read our last words.
        """
        self._outbox.put(None)
        self._writer.join(CLOSE_SECONDS)
        if self._reader is not None:
            self._reader.join(CLOSE_SECONDS)
        self._socket.close()

    def _cut(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _read(self, receive: Callable[[ToCore | None], None]) -> None:
        try:
            data = b""  # the first message may have brought others along
            while True:
                for message in self._decoder.feed(data):
                    receive(message)
                if not (data := self._socket.recv(1 << 18)):
                    return
        except OSError:
            pass
        except codec.FrameError:
            logger.exception("the front end sent something unreadable")
        finally:
            receive(None)

    def _write_at_once(self, frame: bytes) -> int:
        """Bytes that the socket has room for. What is for nobody any more is done with, too."""
        try:
            return self._socket.send(frame, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:
            self._cut()  # the reader sees it, too
            return len(frame)

    def _write(self) -> None:
        try:
            while (frame := self._outbox.get()) is not None:
                self._socket.sendall(frame)
                with self._order:
                    self._num_behind -= 1
                # Half of it, so that the loop is not woken for each.
                if self._awaits_room and self._outbox.qsize() <= MAX_QUEUED_MESSAGES // 2:
                    self._awaits_room = False
                    self.on_room()
        except OSError:
            self._cut()  # the reader sees it, too
            while self._outbox.get() is not None:
                pass
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
