"""Ring: shared memory that one process writes messages into and every reader reads them from, in order.

    header: bytes written | of each reader, on a cache line of its own: bytes read
    data:   a stream of messages that wraps around; each is a uint32 length and that many bytes

A message may be longer than the data area: it goes through in parts. Memory and wakes are descriptors without
names: when the last process that has them ends, however it ends, they are gone.

The writer makes bytes visible by moving its counter and then adding to each reader's eventfd. A reader that sleeps
reads the counter after its eventfd, so the kernel orders the two. One that spins reads it without: that is right only
where the processor keeps stores in order.
"""

from __future__ import annotations

import mmap
import os
import platform
import struct
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

HEADER_BYTES = 8192
LINE = 8
"""Counters, of 8 bytes each, in a cache line."""
MAX_READERS = HEADER_BYTES // 8 // LINE - 1
DEFAULT_CAPACITY = 1 << 20
"""Bytes of the data area: thousands of steps of a full batch's decoding, or one of the longest usual prompts."""
SPIN_SECONDS = 50e-6
KEEPS_STORES_IN_ORDER = platform.machine() in ("x86_64", "AMD64")
_LENGTH = struct.Struct("<I")


class RingWriter:
    """Makes the ring. `descriptor` and, for the reader of that index, `wakes[index]` are what a RingReader needs."""

    def __init__(self, num_readers: int, capacity: int = DEFAULT_CAPACITY) -> None:
        assert 0 < num_readers <= MAX_READERS
        self._capacity = capacity
        self.descriptor = os.memfd_create("tailrace-ring")
        os.ftruncate(self.descriptor, HEADER_BYTES + capacity)
        self.wakes = [os.eventfd(0) for _ in range(num_readers)]
        self._memory = mmap.mmap(self.descriptor, HEADER_BYTES + capacity)
        self._view = memoryview(self._memory)
        self._counters = self._view[:HEADER_BYTES].cast("Q")
        self._data = self._view[HEADER_BYTES:]
        self.num_written = 0
        """Bytes of all messages so far."""

    def num_read(self, reader: int) -> int:
        """Bytes that a reader has taken. It has begun with a message once that reaches `num_written` after it."""
        return int(self._counters[LINE * (1 + reader)])

    def write(self, message: bytes, wait: Callable[[], None]) -> None:
        """Appends a message and wakes the readers.

        As long as one of them leaves no room, calls `wait`, which returns after a moment or raises.
        """
        left = memoryview(_LENGTH.pack(len(message)) + message)
        while left:
            slowest = min(self.num_read(reader) for reader in range(len(self.wakes)))
            room = self._capacity - (self.num_written - slowest)
            if not room:
                wait()
                continue
            part, left = left[:room], left[room:]
            start = self.num_written % self._capacity
            head = min(len(part), self._capacity - start)
            self._data[start : start + head] = part[:head]
            self._data[: len(part) - head] = part[head:]
            self.num_written += len(part)
            self._counters[0] = self.num_written
            for wake in self.wakes:
                os.eventfd_write(wake, 1)

    def close(self) -> None:
        """Gives up memory and descriptors; idempotent."""
        for descriptor in (self.descriptor, *self.wakes):
            if descriptor >= 0:
                os.close(descriptor)
        self.descriptor, self.wakes = -1, []
        for view in (self._counters, self._data, self._view):
            view.release()
        self._memory.close()


class RingReader:
    """The reader of an index. Before it sleeps it looks for `spin_seconds` whether something comes."""

    def __init__(self, descriptor: int, wake: int, index: int, spin_seconds: float = 0.0) -> None:
        size = os.fstat(descriptor).st_size
        self._capacity = size - HEADER_BYTES
        self._wake = wake
        self._own = LINE * (1 + index)
        self._spin_seconds = spin_seconds if KEEPS_STORES_IN_ORDER else 0.0
        self._memory = mmap.mmap(descriptor, size)
        self._view = memoryview(self._memory)
        self._counters = self._view[:HEADER_BYTES].cast("Q")
        self._data = self._view[HEADER_BYTES:]
        self._num_read = 0
        self._num_written = 0
        """As far as it is known here."""

    def read(self) -> bytearray:
        """Waits for the next message."""
        (length,) = _LENGTH.unpack(self._take(_LENGTH.size))
        return self._take(length)

    def _take(self, size: int) -> bytearray:
        taken = bytearray(size)
        done = 0
        while done < size:
            available = self._num_written - self._num_read
            if not available:
                self._wait()
                continue
            start = self._num_read % self._capacity
            count = min(size - done, available, self._capacity - start)
            taken[done : done + count] = self._data[start : start + count]
            done += count
            self._num_read += count
            self._counters[self._own] = self._num_read
        return taken

    def _wait(self) -> None:
        """Until more may have been written."""
        if self._spin_seconds:
            end = time.perf_counter() + self._spin_seconds
            while time.perf_counter() < end:
                if self._counters[0] != self._num_read:
                    self._num_written = self._counters[0]
                    return
        os.eventfd_read(self._wake)
        self._num_written = self._counters[0]

    def close(self) -> None:
        """Gives up the memory; the descriptors are the caller's."""
        for view in (self._counters, self._data, self._view):
            view.release()
        self._memory.close()
