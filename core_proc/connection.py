"""Connection: a front end's socket, read and written off the main loop."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from typing import TYPE_CHECKING

from protos import codec

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from protos.messages import ToCore, ToFrontEnd

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 5.0
MAX_QUEUED_MESSAGES = 8
"""A front end that stops reading stops the loop here, instead of filling the core's memory."""


class Connection:
    """Two threads: one decodes what comes in, one encodes what goes out.

    `receive` is called on the reader's thread with each message, and with None when the other side is gone.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._decoder = codec.FrameDecoder(codec.to_core)
        self._outbox: queue.Queue[ToFrontEnd | None] = queue.Queue(MAX_QUEUED_MESSAGES)
        self._writer = threading.Thread(target=self._write, name="writer", daemon=True)
        self._writer.start()

    def read_first(self) -> ToCore:
        """Waits for the first message, before `start_reading`. Raises EOFError if the other side leaves."""
        while data := self._socket.recv(1 << 16):
            for message in self._decoder.feed(data):
                return message
        raise EOFError("the front end left before saying hello")

    def start_reading(self, receive: Callable[[ToCore | None], None]) -> None:
        threading.Thread(target=self._read, args=(receive,), name="reader", daemon=True).start()

    def send(self, message: ToFrontEnd) -> None:
        self._outbox.put(message)

    def flush_and_close(self) -> None:
        """Writes what is queued, then closes; gives up on a front end that does not read."""
        with contextlib.suppress(queue.Full):
            self._outbox.put(None, timeout=CLOSE_SECONDS)
            self._writer.join(CLOSE_SECONDS)
        self._socket.close()

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

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # the reader sees the end of the stream, too
            while (message := self._outbox.get()) is not None:
                self._socket.sendall(codec.encode_frame(message))
            return
        while self._outbox.get() is not None:
            pass
