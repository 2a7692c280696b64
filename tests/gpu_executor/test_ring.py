"""Ring: one writer, many readers, in threads and in processes."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

from gpu_executor.ring import RingReader, RingWriter
from protos.child_process import child_environment

if TYPE_CHECKING:
    from collections.abc import Iterator

PATIENCE = 30.0


class Reader(threading.Thread):
    """Reads so many messages, each when the gate is open."""

    def __init__(self, writer: RingWriter, index: int, count: int, spin_seconds: float = 0.0) -> None:
        super().__init__(daemon=True)
        self._reader = RingReader(writer.descriptor, writer.wakes[index], index, spin_seconds)
        self._count = count
        self.messages: list[bytes] = []
        self.gate = threading.Event()
        self.gate.set()
        self.start()

    def run(self) -> None:
        for _ in range(self._count):
            assert self.gate.wait(PATIENCE)
            self.messages.append(bytes(self._reader.read()))

    def finish(self) -> list[bytes]:
        self.join(PATIENCE)
        assert not self.is_alive()
        self._reader.close()
        return self.messages


def give_way() -> None:
    """Lets readers run."""
    time.sleep(0)


def must_not_wait() -> None:
    raise AssertionError("the ring is full")


@pytest.fixture
def writers() -> Iterator[list[RingWriter]]:
    made: list[RingWriter] = []
    yield made
    for writer in made:
        writer.close()
        writer.close()


@pytest.mark.parametrize("spin_seconds", [0.0, 50e-6], ids=["asleep", "spinning"])
@pytest.mark.parametrize("num_readers", [1, 3])
def test_every_reader_gets_every_message_over_many_wraps(
    writers: list[RingWriter], num_readers: int, spin_seconds: float
) -> None:
    draw = random.Random(num_readers)
    messages = [draw.randbytes(draw.choice([0, 1, 3, 60, 61, 200, 257])) for _ in range(400)]
    writer = RingWriter(num_readers, capacity=257)
    writers.append(writer)
    readers = [Reader(writer, index, len(messages), spin_seconds) for index in range(num_readers)]
    for message in messages:
        writer.write(message, give_way)
    assert [reader.finish() for reader in readers] == [messages] * num_readers
    assert writer.num_written == sum(4 + len(message) for message in messages) > 100 * 257
    assert all(writer.num_read(index) == writer.num_written for index in range(num_readers))


def test_message_longer_than_the_ring_goes_through_in_parts(writers: list[RingWriter]) -> None:
    writer = RingWriter(2, capacity=1000)
    writers.append(writer)
    readers = [Reader(writer, index, 3) for index in range(2)]
    messages = [b"before", random.Random(0).randbytes(12_345), b"after"]
    for message in messages:
        writer.write(message, give_way)
    assert [reader.finish() for reader in readers] == [messages] * 2


def test_writer_waits_for_the_slowest_reader_and_loses_nothing(writers: list[RingWriter]) -> None:
    writer = RingWriter(2, capacity=100)
    writers.append(writer)
    fast, slow = Reader(writer, 0, 20), Reader(writer, 1, 20)
    slow.gate.clear()
    writer.write(b"0" * 36, must_not_wait)  # one read may be under way as the gate closes
    waits = 0

    def wait() -> None:
        nonlocal waits
        waits += 1
        if waits == 20:
            assert len(slow.messages) <= 1
            assert writer.num_written - writer.num_read(1) == 100
            slow.gate.set()
        give_way()

    for index in range(1, 20):
        writer.write(str(index).encode() * 18, wait)
    assert waits >= 20
    assert fast.finish() == slow.finish() == [b"0" * 36, *(str(index).encode() * 18 for index in range(1, 20))]


def test_what_a_reader_has_begun_with_is_known_by_position(writers: list[RingWriter]) -> None:
    writer = RingWriter(1)
    writers.append(writer)
    reader = RingReader(writer.descriptor, writer.wakes[0], 0)
    ends = []
    for message in (b"one", b"two"):
        writer.write(message, must_not_wait)
        ends.append(writer.num_written)
    assert writer.num_read(0) == 0
    reader.read()
    assert ends[0] == writer.num_read(0) < ends[1]
    reader.read()
    assert writer.num_read(0) == ends[1]
    reader.close()


class TestProcesses:
    CODE = """
import sys
from gpu_executor.ring import RingReader
reader = RingReader(int(sys.argv[1]), int(sys.argv[2]), 0)
while message := reader.read():
    print(len(message), flush=True)
"""

    def start(self, writer: RingWriter) -> subprocess.Popen[str]:
        descriptors = [writer.descriptor, writer.wakes[0]]
        return subprocess.Popen(
            [sys.executable, "-c", self.CODE, *map(str, descriptors)],
            pass_fds=descriptors,
            env=child_environment(),
            stdout=subprocess.PIPE,
            text=True,
        )

    def test_reader_that_dies_leaves_a_writer_that_can_tell_and_no_memory(self, writers: list[RingWriter]) -> None:
        before = set(os.listdir("/dev/shm"))
        writer = RingWriter(1, capacity=256)
        writers.append(writer)
        with self.start(writer) as process:
            assert process.stdout is not None
            writer.write(b"x" * 100, must_not_wait)
            assert process.stdout.readline() == "100\n"
            process.kill()
            process.wait()

            def wait() -> None:
                if process.poll() is not None:
                    raise BrokenPipeError("reader 0 is gone")

            with pytest.raises(BrokenPipeError, match="reader 0 is gone"):
                writer.write(b"x" * 300, wait)
        assert set(os.listdir("/dev/shm")) == before

    def test_writer_and_reader_in_two_processes(self, writers: list[RingWriter]) -> None:
        writer = RingWriter(1, capacity=256)
        writers.append(writer)
        with self.start(writer) as process:
            for length in (1, 200, 300, 1000, 0):
                writer.write(b"x" * length, give_way)
            assert process.communicate(timeout=PATIENCE)[0].split() == ["1", "200", "300", "1000"]
