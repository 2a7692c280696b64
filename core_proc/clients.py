"""Clients: the front ends of a core."""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING

from core_proc.connection import Connection

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator

    from protos.messages import Adapters, CoreReady, ToCore, ToFrontEnd

SILENCE_SECONDS = 30.0
"""A front end that says or takes nothing for so long is gone: it pings every second. The owner may be stopped."""


class Clients:
    """The owner, which started the core, and whoever was let in since. They come on any thread.

    `receive(connection, message)` is called on the readers' threads, `on_room()` on the writers', `on_join()` on that
    of whoever lets in.
    """

    def __init__(
        self,
        owner: Connection,
        receive: Callable[[Connection, ToCore | None], None],
        on_room: Callable[[], None],
        on_join: Callable[[], None],
    ) -> None:
        self._receive = receive
        self._on_room = on_room
        self._on_join = on_join
        self._numbers = itertools.count(owner.client + 1)
        self._lock = threading.Lock()
        owner.on_room = on_room
        self._connections: tuple[Connection, ...] = (owner,)
        self._ready: CoreReady | None = None
        self._adapters: Adapters

    def __iter__(self) -> Iterator[Connection]:
        return iter(self._connections)

    def __len__(self) -> int:
        return len(self._connections)

    def begin(self, ready: CoreReady, adapters: Adapters) -> None:
        """The engine can serve: all are told, and what they ask is read from now on."""
        with self._lock:
            self._ready, self._adapters = ready, adapters
            for connection in self._connections:
                self._begin(connection, ready)

    def admit(self, sock: socket.socket) -> None:
        """One more, which is told that the engine can serve once it can."""
        with self._lock:
            connection = Connection(sock, next(self._numbers))
            connection.on_room = self._on_room
            connection.limit_silence(SILENCE_SECONDS)
            self._connections = (*self._connections, connection)
            if self._ready is not None:
                self._begin(connection, self._ready)
        self._on_join()

    def remove(self, connection: Connection) -> None:
        with self._lock:
            self._connections = tuple(other for other in self._connections if other is not connection)
        connection.leave()

    def tell_adapters(self, adapters: Adapters) -> None:
        """All of them, and those that come later."""
        with self._lock:
            self._adapters = adapters
            self.tell(adapters)

    def tell(self, message: ToFrontEnd) -> None:
        """All of them."""
        for connection in self._connections:
            connection.send(message)

    def flush_and_close(self) -> None:
        for connection in self._connections:
            connection.flush_and_close()

    def _begin(self, connection: Connection, ready: CoreReady) -> None:
        connection.send(self._adapters)
        connection.send(ready)
        connection.start_reading(lambda message: self._receive(connection, message))
