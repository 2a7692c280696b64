"""KVWatches: those who watch what the prefix caches of an engine's cores hold."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from protos.errors import OverloadedError
from protos.kv_changes import ROUTER_WATCH, KVChanges, MoreKV, UnwatchKV, WatchKV

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from async_engine.core_slot import CoreSlot
    from protos.errors import TailraceError
    from protos.kv_changes import KVDetail

GATHER_SECONDS = 0.01
"""After something was told, until a core is asked for more: steps of less become one message."""
MAX_WATCHES, MAX_CALLERS_WATCHES = 32, 24
"""In a front end; each costs the cores some memory and time. Callers leave operators some."""
CLEARED = KVChanges(b"", b"", is_all=True)


class Told(NamedTuple):
    """What one core told."""

    core: int
    sequence: int
    """From 0, of what this watch had from that core."""
    changes: KVChanges


class KVWatch:
    """One who watches all cores. What it does not read stays in the cores, and becomes one there: at most a message of
    each waits here."""

    def __init__(self, asked: WatchKV, slots: Sequence[CoreSlot]) -> None:
        self.asked = asked
        self._slots = slots
        self._waiting: dict[int, KVChanges] = {}
        self._cleared: set[int] = set()
        """Cores that are gone, of which that was not read yet."""
        self._read: Told | None = None
        """What is with the reader; None if its core is not to be asked for more."""
        self._asking: dict[int, asyncio.TimerHandle] = {}
        self._sequences = [itertools.count() for _ in slots]
        self._woken = asyncio.Event()
        self._error: TailraceError | None = None

    async def next(self) -> Told:
        """What comes next, of any core, once the reader is done with what came before. A core that is gone has told
        that it holds nothing. Raises what the watch was closed with."""
        read, self._read = self._read, None
        if read is not None:
            delay = 0.0 if read.changes.has_more else GATHER_SECONDS
            self._asking[read.core] = asyncio.get_running_loop().call_later(delay, self._ask, read.core)
        while not (self._waiting or self._cleared):
            if self._error is not None:
                raise self._error.with_traceback(None)
            self._woken.clear()
            await self._woken.wait()
        if self._cleared:
            core = self._cleared.pop()
            return Told(core, next(self._sequences[core]), CLEARED)
        core = next(iter(self._waiting))
        self._read = Told(core, next(self._sequences[core]), self._waiting.pop(core))
        return self._read

    def _ask(self, core: int) -> None:
        del self._asking[core]
        self._slots[core].send(MoreKV(self.asked.watch))

    def put(self, core: int, changes: KVChanges) -> None:
        self._waiting[core] = changes
        self._woken.set()

    def lost(self, core: int) -> None:
        """A core is gone. One that comes instead knows nothing of what was told, and is not to be asked for more."""
        self._waiting.pop(core, None)
        if core in self._asking:
            self._asking.pop(core).cancel()
        if self._read is not None and self._read.core == core:
            self._read = None
        self._cleared.add(core)
        self._woken.set()

    def close(self, error: TailraceError | None = None) -> None:
        """The reader is told, if it still reads."""
        for asking in self._asking.values():
            asking.cancel()
        self._asking.clear()
        self._error = error
        self._woken.set()


class KVWatches:
    """All of a front end."""

    def __init__(self, slots: Sequence[CoreSlot]) -> None:
        self._slots = slots
        self._numbers = itertools.count(ROUTER_WATCH + 1)
        self._watches: dict[int, KVWatch] = {}
        self._closed: TailraceError | None = None

    def __len__(self) -> int:
        return len(self._watches)

    @contextlib.contextmanager
    def open(self, detail: KVDetail, *, with_all: bool, for_caller: bool = False) -> Iterator[KVWatch]:
        """A watch for as long as the block lasts. Each core tells something at once: all that it holds, or nothing.

        Raises OverloadedError, or what the engine ended with.
        """
        if self._closed is not None:
            raise self._closed.with_traceback(None)
        if len(self._watches) >= (MAX_CALLERS_WATCHES if for_caller else MAX_WATCHES):
            raise OverloadedError(f"{len(self._watches)} others watch the prefix cache already")
        asked = WatchKV(next(self._numbers), detail, with_all, on_demand=True)
        watch = self._watches[asked.watch] = KVWatch(asked, self._slots)
        self._send(asked)
        try:
            yield watch
        finally:
            del self._watches[asked.watch]
            watch.close()
            self._send(UnwatchKV(asked.watch))

    def _send(self, message: WatchKV | UnwatchKV) -> None:
        for slot in self._slots:
            if slot.is_up:
                slot.send(message)

    def put(self, core: int, changes: KVChanges) -> None:
        """What a core tells; of a watch that is over it is dropped."""
        if (watch := self._watches.get(changes.watch)) is not None:
            watch.put(core, changes)

    def lost(self, core: int) -> None:
        """A core is gone."""
        for watch in self._watches.values():
            watch.lost(core)

    def found(self, slot: CoreSlot) -> None:
        """There is a core again: what it holds is told from the beginning."""
        for watch in self._watches.values():
            slot.send(msgspec.structs.replace(watch.asked, with_all=True))

    def close(self, error: TailraceError) -> None:
        """Nothing more comes."""
        self._closed = error
        for watch in self._watches.values():
            watch.close(error)
