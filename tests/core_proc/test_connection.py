"""Connection: a front end's socket, read and written off the main loop."""

from __future__ import annotations

import queue
import socket
import threading
from typing import TYPE_CHECKING

import pytest

from core_proc.connection import Connection
from protos import codec
from protos.config import EngineConfig
from protos.messages import Abort, CoreFailed, EngineCoreOutputs, Hello, Ping, Pong, Shutdown

if TYPE_CHECKING:
    from collections.abc import Iterator

    from protos.messages import ToCore, ToFrontEnd

HELLO = Hello(EngineConfig(), ())
TIMEOUT = 30


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    theirs.settimeout(TIMEOUT)
    yield ours, theirs
    theirs.close()
    ours.close()


def frames(*messages: ToCore) -> bytes:
    return b"".join(codec.encode_frame(message) for message in messages)


def test_messages_are_received_in_order_and_then_the_end(sockets: tuple[socket.socket, socket.socket]) -> None:
    connection, theirs = Connection(sockets[0]), sockets[1]
    received: queue.SimpleQueue[ToCore | None] = queue.SimpleQueue()
    theirs.sendall(frames(HELLO))
    assert connection.read_first() == HELLO
    connection.start_reading(received.put)
    data = frames(Abort([1, 2]), Ping())
    for index in range(len(data)):
        theirs.sendall(data[index : index + 1])
    theirs.shutdown(socket.SHUT_WR)
    assert [received.get(timeout=TIMEOUT) for _ in range(3)] == [Abort([1, 2]), Ping(), None]
    connection.flush_and_close()


def test_messages_that_came_with_the_first_are_not_held_back(sockets: tuple[socket.socket, socket.socket]) -> None:
    connection, theirs = Connection(sockets[0]), sockets[1]
    received: queue.SimpleQueue[ToCore | None] = queue.SimpleQueue()
    theirs.sendall(frames(HELLO, Ping(), Shutdown()))
    assert connection.read_first() == HELLO
    connection.start_reading(received.put)
    assert [received.get(timeout=2) for _ in range(2)] == [Ping(), Shutdown()]
    theirs.close()
    assert received.get(timeout=TIMEOUT) is None
    connection.flush_and_close()


def test_front_end_that_leaves_before_hello_is_told_apart(sockets: tuple[socket.socket, socket.socket]) -> None:
    connection, theirs = Connection(sockets[0]), sockets[1]
    theirs.sendall(frames(HELLO)[:-1])
    theirs.close()
    with pytest.raises(EOFError):
        connection.read_first()
    connection.flush_and_close()


def test_what_was_sent_is_written_before_closing(sockets: tuple[socket.socket, socket.socket]) -> None:
    connection, theirs = Connection(sockets[0]), sockets[1]
    messages = [EngineCoreOutputs(handles=bytes([n]) * 8, token_ids=bytes(4)) for n in range(200)]
    for message in messages:
        connection.send(message)
    connection.send(Pong())
    connection.flush_and_close()
    decoder = codec.FrameDecoder(codec.to_front_end)
    received: list[ToFrontEnd] = []
    while data := theirs.recv(1 << 16):
        received += decoder.feed(data)
    assert received == [*messages, Pong()]


def test_what_the_socket_takes_is_written_by_whoever_sends(sockets: tuple[socket.socket, socket.socket]) -> None:
    connection, theirs = Connection(sockets[0]), sockets[1]
    decoder = codec.FrameDecoder(codec.to_front_end)
    theirs.setblocking(False)
    for _ in range(20):
        connection.send(Pong())
        assert list(decoder.feed(theirs.recv(1 << 16))) == [Pong()]
    theirs.close()
    connection.flush_and_close()


def test_what_it_does_not_take_comes_in_order_and_holds_nobody_up(sockets: tuple[socket.socket, socket.socket]) -> None:
    connection, theirs = Connection(sockets[0]), sockets[1]
    decoder = codec.FrameDecoder(codec.to_front_end)
    for size in (1, 5_000_000):
        messages = [EngineCoreOutputs(handles=bytes([n]) * 8, token_ids=bytes(4 * size)) for n in range(4)]
        for message in messages:
            connection.send(message)
        received: list[ToFrontEnd] = []
        while len(received) < len(messages):
            received += decoder.feed(theirs.recv(1 << 20))
        assert received == messages
    theirs.close()
    connection.flush_and_close()


def test_sending_to_a_front_end_that_left_holds_nobody_up(sockets: tuple[socket.socket, socket.socket]) -> None:
    connection, theirs = Connection(sockets[0]), sockets[1]
    theirs.close()
    for _ in range(5000):  # far more than the queue holds
        connection.send(Pong())
    connection.flush_and_close()


def test_other_side_closes_first_so_that_what_it_is_writing_does_not_cost_it_the_last_words(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    connection, theirs = Connection(sockets[0]), sockets[1]
    received: queue.SimpleQueue[ToCore | None] = queue.SimpleQueue()
    connection.start_reading(received.put)
    connection.send(CoreFailed("the reason"))
    closing = threading.Thread(target=connection.flush_and_close)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive()
    theirs.sendall(frames(Ping()))
    assert received.get(timeout=TIMEOUT) == Ping()
    assert list(codec.FrameDecoder(codec.to_front_end).feed(theirs.recv(1000))) == [CoreFailed("the reason")]
    assert theirs.recv(1000) == b""
    theirs.close()
    closing.join(TIMEOUT)
    assert not closing.is_alive()
