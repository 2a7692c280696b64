"""EngineCoreProc: several front ends of one core, here on a thread, with scripted tokens."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np
import pytest

from core_proc import clients, connection, door
from core_proc.black_box import BlackBox, make_box
from core_proc.connection import Connection
from core_proc.door import Door
from core_proc.proc import EngineCoreProc
from protos import codec, handshake
from protos.config import EngineConfig, build
from protos.handshake import Challenge, Join, Welcome
from protos.kv_changes import KVChanges, MoreKV, UnwatchKV, WatchKV
from protos.messages import (
    NO_STATS,
    Abort,
    Control,
    ControlReply,
    CoreFailed,
    CoreReady,
    CoreStats,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    Hello,
    Ping,
    Pong,
    Sampling,
    Shutdown,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from protos.messages import ControlOp, ToCore, ToFrontEnd

TIMEOUT = 10
ENDLESS = 30_000
PROMPT = np.arange(20, dtype="<i4").tobytes()


class FrontEnd:
    """The other end of a connection: what came, as far as it was read."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        sock.settimeout(TIMEOUT)
        self.decoder = codec.FrameDecoder(codec.to_front_end)
        self.messages: list[ToFrontEnd] = []
        self.token_ids: dict[int, list[int]] = defaultdict(list)
        self.ends: dict[int, FinishReason] = {}
        self.stats: CoreStats = NO_STATS

    def send(self, *messages: ToCore) -> None:
        self.socket.sendall(b"".join(map(codec.encode_frame, messages)))

    def add(self, handle: int, max_tokens: int, seed: int = 0) -> None:
        sampling = Sampling(temperature=1.0, seed=seed)
        self.send(EngineCoreRequest(handle, PROMPT, sampling, max_tokens))

    def read_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            data = self.socket.recv(1 << 16)
            assert data, "the core has closed the connection"
            self._take(data)

    def read_to_the_end(self) -> None:
        with contextlib.suppress(ConnectionResetError):
            while data := self.socket.recv(1 << 16):
                self._take(data)

    def call(self, op: ControlOp, argument: int = 0) -> list[int]:
        self.send(Control(5, op, argument))
        self.read_until(lambda: any(isinstance(message, ControlReply) for message in self.messages))
        (reply,) = (message for message in self.messages if isinstance(message, ControlReply))
        self.messages.remove(reply)
        assert reply.call_id == 5
        return reply.result

    def ping(self) -> None:
        """The main loop has seen all that was sent before."""
        self.messages.clear()
        self.send(Ping())
        self.read_until(lambda: Pong() in self.messages)

    def _take(self, data: bytes) -> None:
        for message in self.decoder.feed(data):
            self.messages.append(message)
            if isinstance(message, EngineCoreOutputs):
                self.stats = message.stats or self.stats
                handles = np.frombuffer(message.handles, "<i8").tolist()
                for handle, token_id in zip(handles, np.frombuffer(message.token_ids, "<i4").tolist(), strict=True):
                    self.token_ids[handle].append(token_id)
                self.ends |= {finished.handle: finished.reason for finished in message.finished}


class Rig:
    """A core on a thread, its owner, and front ends that were let in."""

    def __init__(self, **options: float) -> None:
        ours, theirs = socket.socketpair()
        box = make_box()
        self.black_box = BlackBox(box)
        hello = Hello(build(EngineConfig, model="null", **options), ())
        self.proc = EngineCoreProc(Connection(theirs), hello, self.black_box)
        os.close(box)
        self._sockets = [ours, theirs]
        self.owner = FrontEnd(ours)
        self.proc.load()
        self._thread = threading.Thread(target=self.proc.run)
        self._thread.start()

    def join(self, buffer: int | None = None) -> FrontEnd:
        ours, theirs = socket.socketpair()
        if buffer is not None:
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
        self._sockets += [ours, theirs]
        self.proc.clients.admit(theirs)
        return FrontEnd(ours)

    def end(self) -> None:
        self.owner.socket.shutdown(socket.SHUT_WR)
        self._thread.join(TIMEOUT)
        assert not self._thread.is_alive()
        for one in self._sockets:
            one.close()
        self.proc.clients.flush_and_close()
        self.black_box.close()


@contextlib.contextmanager
def running(**options: float) -> Iterator[Rig]:
    rig = Rig(**options)
    try:
        yield rig
    finally:
        rig.end()


def test_equal_handles_of_two_front_ends_are_two_requests() -> None:
    with running(null_step_ms=1) as rig:
        first, second = rig.owner, rig.join()
        for front_end, seed in ((first, 1), (second, 2)):
            front_end.add(7, 50, seed)
            front_end.add(8, 40, seed)
        for front_end in (first, second):
            front_end.read_until(lambda front_end=front_end: len(front_end.ends) == 2)
            assert {handle: len(ids) for handle, ids in front_end.token_ids.items()} == {7: 50, 8: 40}
        assert first.token_ids[7] != second.token_ids[7]
        # What comes of a seed does not depend on who asks, nor on what else runs.
        again = rig.join()
        again.add(1, 50, 2)
        again.read_until(lambda: 1 in again.ends)
        assert again.token_ids[1] == second.token_ids[7]


def test_abort_and_progress_are_of_the_front_end_that_asks() -> None:
    with running(null_step_ms=1) as rig:
        first, second = rig.owner, rig.join()
        first.add(1, ENDLESS)
        first.read_until(lambda: 1 in first.token_ids)
        second.send(Abort([1]))
        assert second.call("progress", 1) == []
        assert first.call("progress", 1) == [0, 20]
        before = len(first.token_ids[1])
        first.read_until(lambda: len(first.token_ids[1]) > before + 5)
        first.send(Abort([1]))
        first.read_until(lambda: first.ends == {1: FinishReason.ABORTED})


def test_front_end_that_goes_takes_its_requests_along_and_no_others() -> None:
    with running(null_step_ms=1) as rig:
        leaver, goer = rig.join(), rig.join()
        for front_end in (rig.owner, leaver, goer):
            for handle in (1, 2, 3):
                front_end.add(handle, ENDLESS)
            front_end.read_until(lambda front_end=front_end: len(front_end.token_ids) == 3)
        rig.owner.read_until(lambda: rig.owner.stats.running == 9)
        leaver.socket.close()
        goer.send(Shutdown())  # from others than the owner it means no more
        rig.owner.read_until(lambda: rig.owner.stats.running == 3)
        before = len(rig.owner.token_ids[2])
        rig.owner.read_until(lambda: len(rig.owner.token_ids[2]) > before + 5)
        rig.owner.send(Abort([1, 2, 3]))
        rig.owner.read_until(lambda: len(rig.owner.ends) == 3)
        assert rig.owner.call("reset_prefix_cache") == [1]  # no block is held by anyone
        goer.read_to_the_end()


def test_all_are_told_when_the_core_is_ready_and_how_it_does() -> None:
    with running() as rig:
        early, late = rig.join(), rig.owner
        early.add(1, 30)
        for front_end in (early, late):
            front_end.read_until(lambda front_end=front_end: front_end.stats.output_tokens == 30)
            assert any(isinstance(message, CoreReady) for message in front_end.messages)
        assert not late.token_ids
        after = rig.join()  # nothing changes any more
        after.read_until(lambda: after.stats == late.stats)


def test_idle_core_does_not_repeat_what_has_not_changed() -> None:
    with running() as rig:
        other = rig.join()
        other.ping()
        for _ in range(5):
            rig.owner.ping()
        other.ping()
        assert len(other.messages) <= 2  # the answer, and at most what its own coming made to be told


def test_front_ends_watch_the_prefix_cache_each_for_itself_and_idle_too() -> None:
    with running() as rig:

        def told(front_end: FrontEnd) -> list[KVChanges]:
            outputs = [message for message in front_end.messages if isinstance(message, EngineCoreOutputs)]
            return [changes for message in outputs for changes in message.kv_changes]

        other = rig.join()
        other.send(WatchKV(3, on_demand=True))
        other.read_until(lambda: [each.watch for each in told(other)] == [3])
        rig.owner.add(1, 1)
        rig.owner.read_until(lambda: 1 in rig.owner.ends)
        other.ping()
        assert told(other) == []
        other.send(MoreKV(3))
        other.read_until(lambda: [len(each.stored) for each in told(other)] == [8])
        other.send(UnwatchKV(3), MoreKV(3))
        other.ping()
        assert rig.proc._core.scheduler.kv_cache.pool.on_change is None
        assert told(rig.owner) == []


def test_profile_is_recorded_for_one_front_end_until_it_stops_or_leaves() -> None:
    with running() as rig:
        goer = rig.join()
        assert goer.call("start_profile") == [1]
        assert rig.owner.call("start_profile") == [0]
        rig.owner.send(Control(7, "stop_profile"))
        rig.owner.read_until(lambda: ControlReply(7, []) in rig.owner.messages)
        assert goer.call("start_profile") == [0], "that was another's"
        goer.socket.shutdown(socket.SHUT_WR)
        goer.read_to_the_end()
        rig.owner.messages.clear()
        assert rig.owner.call("start_profile") == [1]


def test_front_end_that_does_not_read_stops_its_own_requests_alone_and_loses_nothing() -> None:
    length = 2_000
    with running() as rig:
        sleeper = rig.join(buffer=4096)
        sleeper.add(1, length, seed=5)
        rig.owner.add(1, length, seed=5)
        rig.owner.read_until(lambda: 1 in rig.owner.ends)
        # It is far behind: the pipe's and the outbox' worth.
        rig.owner.read_until(lambda: rig.owner.stats.running == 1)
        assert rig.owner.stats.output_tokens < length + length // 2
        sleeper.read_until(lambda: 1 in sleeper.ends)
        assert sleeper.token_ids[1] == rig.owner.token_ids[1]


@pytest.mark.parametrize("speaks", [True, False])
def test_front_end_that_does_not_read_or_speak_for_long_is_gone(speaks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "SILENCE_SECONDS", 0.3)
    with running() as rig:
        other = rig.join(buffer=4096)
        other.add(1, ENDLESS)
        rig.owner.read_until(lambda: rig.owner.stats.running == 1)
        speaking = threading.Event()

        def speak() -> None:
            with contextlib.suppress(OSError):
                while speaks and not speaking.wait(0.05):
                    other.send(Ping())

        thread = threading.Thread(target=speak)
        thread.start()
        if not speaks:  # it reads; else its requests would be held back until it does
            with contextlib.suppress(AssertionError, ConnectionResetError):
                other.read_until(lambda: 1 in other.ends)
        rig.owner.read_until(lambda: rig.owner.stats.running == 0)
        speaking.set()
        thread.join(TIMEOUT)


def test_who_asks_without_end_and_never_reads_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_UNREAD_MESSAGES", 100)
    with running() as rig:
        flood = rig.join(buffer=4096)
        with pytest.raises((BrokenPipeError, ConnectionResetError)):  # noqa: PT012
            for _ in range(500):
                flood.send(*[Ping()] * 100)
        assert rig.owner.call("resume") == []


# The door --------------------------------------------------------------------------------------

SECRET = b"a secret of the tests"
HELLO = Hello(build(EngineConfig, model="null"), (1, 2), SECRET, "digest")


class Entrance:
    """A door on the loopback, and who was let in."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()
        self.admitted: list[socket.socket] = []
        self.came = threading.Event()
        Door(self.listener, HELLO, self._admit)

    def _admit(self, sock: socket.socket) -> None:
        self.admitted.append(sock)
        self.came.set()

    def connect(self) -> socket.socket:
        sock = socket.create_connection(self.address)
        sock.settimeout(TIMEOUT)
        return sock


@pytest.fixture(scope="module")
def entrance() -> Entrance:
    return Entrance()  # its thread stays until the process ends, and so does its socket


def frame_from(sock: socket.socket) -> bytes:
    length = handshake.frame_length(sock.recv(4, socket.MSG_WAITALL))
    return sock.recv(length, socket.MSG_WAITALL)


def test_who_knows_the_secret_is_let_in_and_sees_that_the_core_does(entrance: Entrance) -> None:
    with entrance.connect() as sock:
        challenge: Challenge = handshake.decode(handshake.challenges, frame_from(sock))
        assert challenge.version == handshake.version()
        nonce = handshake.new_nonce()
        entrance.came.clear()
        sock.sendall(handshake.frame(Join(nonce, handshake.prove(SECRET, "front end", challenge, nonce))))
        welcome = handshake.decode(handshake.answers, frame_from(sock))
        assert isinstance(welcome, Welcome)
        assert handshake.is_proven(welcome.proof, SECRET, "core", challenge, nonce)
        assert (welcome.config, welcome.eos_token_ids, welcome.model_digest) == (HELLO.config, (1, 2), "digest")
        assert entrance.came.wait(TIMEOUT)
        entrance.admitted.pop().close()


def test_wrong_secrets_and_the_cores_own_words_open_nothing(entrance: Entrance) -> None:
    proofs = [
        lambda challenge, nonce: handshake.prove(b"another secret....", "front end", challenge, nonce),
        lambda challenge, nonce: handshake.prove(SECRET, "core", challenge, nonce),
        lambda challenge, nonce: handshake.prove(SECRET, "front end", challenge, b"another nonce"),
        lambda challenge, nonce: handshake.prove(SECRET, "front end", Challenge(challenge.version, b"old"), nonce),
        lambda challenge, nonce: b"",
    ]
    for proof in proofs:
        with entrance.connect() as sock:
            challenge = handshake.decode(handshake.challenges, frame_from(sock))
            nonce = handshake.new_nonce()
            sock.sendall(handshake.frame(Join(nonce, proof(challenge, nonce))))
            assert handshake.decode(handshake.answers, frame_from(sock)) == CoreFailed("the secret is not the core's")
            assert sock.recv(1) == b""
    assert not entrance.admitted


@pytest.mark.parametrize(
    "words",
    [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\xff\xff\xff\xff",
        b"\x01\x00\x01\x00" + bytes(16),
        b"\x04\x00\x00\x00\xc1\xc1\xc1\xc1",
        codec.encode_frame(Ping()),
        codec.encode_frame(Shutdown()),
        b"\x00\x80\x00\x00" + b"\x91" * (1 << 15),
    ],
)
def test_strangers_who_talk_nonsense_are_cut_off_at_once(words: bytes, entrance: Entrance) -> None:
    with entrance.connect() as sock:
        frame_from(sock)
        sock.sendall(words)
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1) == b""
    assert not entrance.admitted


def test_strangers_who_say_nothing_or_little_have_their_time(
    entrance: Entrance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_SECONDS", 0.3)
    pause = threading.Event()
    with entrance.connect() as silent, entrance.connect() as slow:
        for sock in (silent, slow):
            frame_from(sock)
        slow.sendall(b"\x00\x10\x00\x00")  # so many bytes will come
        with pytest.raises((BrokenPipeError, ConnectionResetError)):  # noqa: PT012
            for _ in range(200):
                slow.sendall(b"\x00")
                pause.wait(0.02)
        assert silent.recv(1) == b""


def test_a_crowd_at_the_door_keeps_nobody_out(entrance: Entrance, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "MAX_STRANGERS", 4)
    with contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(entrance.connect()) for _ in range(20)]
        for sock in crowd[:10]:
            with contextlib.suppress(ConnectionResetError):
                while sock.recv(1 << 10):
                    pass
        test_who_knows_the_secret_is_let_in_and_sees_that_the_core_does(entrance)
