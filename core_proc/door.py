"""Door: where front ends that did not start the core come in, once they have shown that they know the secret."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from typing import TYPE_CHECKING

from protos import handshake
from protos.handshake import Challenge, HandshakeError, Join, Welcome
from protos.messages import CoreFailed

if TYPE_CHECKING:
    from collections.abc import Callable

    from protos.messages import Hello

logger = logging.getLogger(__name__)

MAX_STRANGERS = 64
"""At once at the door. One more, and the one that has been there longest has to go: ours do not take long."""
PAUSE_SECONDS = 0.1
"""After an accept that failed, for want of file descriptors perhaps."""


class Door:
    """Accepts on a thread, and hears each comer out on one of its own. `admit` is given those who are let in."""

    def __init__(self, listener: socket.socket, hello: Hello, admit: Callable[[socket.socket], None]) -> None:
        assert hello.secret, "a door without a secret would be open to all"
        self._listener = listener
        self._hello = hello
        self._admit = admit
        self._strangers: dict[socket.socket, None] = {}
        threading.Thread(target=self._accept, name="door", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                comer, _ = self._listener.accept()
            except OSError:
                time.sleep(PAUSE_SECONDS)
                continue
            while len(self._strangers) >= MAX_STRANGERS:
                with contextlib.suppress(OSError, StopIteration, RuntimeError):
                    oldest = next(iter(self._strangers))
                    self._strangers.pop(oldest, None)
                    oldest.shutdown(socket.SHUT_RDWR)
            self._strangers[comer] = None
            threading.Thread(target=self._meet, args=(comer,), name="stranger", daemon=True).start()

    def _meet(self, comer: socket.socket) -> None:
        try:
            if comer.family != socket.AF_UNIX:
                comer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._check(comer)
            comer.settimeout(None)
        except (OSError, EOFError, HandshakeError) as error:
            logger.info("a stranger was turned away: %s", error)
            self._strangers.pop(comer, None)
            comer.close()
        else:
            self._strangers.pop(comer, None)
            self._admit(comer)

    def _check(self, comer: socket.socket) -> None:
        """Raises HandshakeError, EOFError or OSError for who is not one of us."""
        deadline = time.monotonic() + handshake.HANDSHAKE_SECONDS
        hello = self._hello
        challenge = Challenge(handshake.version(), handshake.new_nonce())
        comer.settimeout(handshake.HANDSHAKE_SECONDS)
        comer.sendall(handshake.frame(challenge))
        length = handshake.frame_length(_read(comer, handshake.HEADER_BYTES, deadline))
        join: Join = handshake.decode(handshake.joins, _read(comer, length, deadline))
        if not handshake.is_proven(join.proof, hello.secret, "front end", challenge, join.nonce):
            comer.sendall(handshake.frame(CoreFailed("the secret is not the core's")))
            raise HandshakeError("wrong secret")
        proof = handshake.prove(hello.secret, "core", challenge, join.nonce)
        comer.sendall(handshake.frame(Welcome(proof, hello.config, hello.eos_token_ids, hello.model_digest)))


def _read(sock: socket.socket, count: int, deadline: float) -> bytes:
    """Exactly so many bytes. Raises EOFError, or TimeoutError at the deadline however they trickle in."""
    data = b""
    while len(data) < count:
        sock.settimeout(max(deadline - time.monotonic(), 0.001))
        if not (more := sock.recv(count - len(data))):
            raise EOFError("it left")
        data += more
    return data
