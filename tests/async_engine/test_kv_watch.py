"""KVWatches: who watches prefix caches is told in order, at his own pace, through deaths of cores."""

import asyncio
import contextlib
from dataclasses import dataclass, field

import pytest

from async_engine import kv_watch
from async_engine.kv_watch import CLEARED, KVWatches
from protos.errors import OverloadedError, UnavailableError
from protos.kv_changes import ROUTER_WATCH, KVChanges, MoreKV, UnwatchKV, WatchKV
from tests.e2e.serving import run


@dataclass
class Slot:
    """The place of a core that takes what it is sent."""

    number: int
    is_up: bool = True
    sent: list = field(default_factory=list)

    def send(self, message):
        self.sent.append(message)


def some(watch, text, **fields):
    return KVChanges(text, b"", watch=watch, **fields)


def watched(test, monkeypatch, num_cores=2, seconds=0.0):
    monkeypatch.setattr(kv_watch, "GATHER_SECONDS", seconds)

    async def main():
        slots = [Slot(number) for number in range(num_cores)]
        watches = KVWatches(slots)
        await test(slots, watches)
        assert not len(watches)

    run(main)


async def timers():
    for _ in range(3):
        await asyncio.sleep(0)


def test_a_core_is_asked_for_more_once_what_it_told_was_read(monkeypatch):
    async def test(slots, watches):
        with watches.open("blocks", with_all=True) as watch:
            number = watch.asked.watch
            asked = WatchKV(number, "blocks", with_all=True, on_demand=True)
            assert number != ROUTER_WATCH
            assert [slot.sent for slot in slots] == [[asked], [asked]]
            watches.put(1, some(number, b"a"))
            watches.put(0, some(number, b"b"))
            watches.put(0, some(number + 1, b"of another"))
            first, second = await watch.next(), await watch.next()
            assert (first.core, first.sequence, first.changes.stored) == (1, 0, b"a")
            assert (second.core, second.sequence, second.changes.stored) == (0, 0, b"b")
            reading = asyncio.create_task(watch.next())
            await timers()
            assert [slot.sent[1:] for slot in slots] == [[MoreKV(number)], [MoreKV(number)]]
            watches.put(1, some(number, b"c"))
            assert (await reading)[:2] == (1, 1)
        assert [slot.sent[2:] for slot in slots] == [[UnwatchKV(number)], [UnwatchKV(number)]]

    watched(test, monkeypatch)


def test_what_a_core_holds_comes_without_pause_and_changes_gather(monkeypatch):
    async def test(slots, watches):
        with watches.open("blocks", with_all=True) as watch:
            number = watch.asked.watch
            watches.put(0, some(number, b"a", has_more=True))
            await watch.next()
            reading = asyncio.create_task(watch.next())
            await timers()
            assert slots[0].sent[1:] == [MoreKV(number)]
            watches.put(0, some(number, b"b"))
            await reading
            reading = asyncio.create_task(watch.next())
            await timers()
            assert slots[0].sent[1:] == [MoreKV(number)], "it gathers"
            reading.cancel()

    watched(test, monkeypatch, num_cores=1, seconds=1000)


@pytest.mark.parametrize("stage", ["waiting", "read", "asking"])
def test_the_death_of_a_core_is_told_and_the_next_one_is_not_asked_for_what_it_did_not_begin(stage, monkeypatch):
    async def test(slots, watches):
        with watches.open("blocks", with_all=False) as watch:
            number = watch.asked.watch
            watches.put(0, some(number, b"a"))
            if stage != "waiting":
                await watch.next()
            reading = asyncio.create_task(watch.next()) if stage == "asking" else None
            await asyncio.sleep(0)
            watches.lost(0)
            slots[0].sent.clear()
            watches.found(slots[0])
            told = await (reading or watch.next())
            assert told.changes == CLEARED
            await timers()
            assert slots[0].sent == [WatchKV(number, "blocks", with_all=True, on_demand=True)]
            reading = asyncio.create_task(watch.next())
            await timers()
            watches.put(0, some(number, b"b"))
            now = await reading
            assert (now.sequence, now.changes.stored) == (told.sequence + 1, b"b")

    watched(test, monkeypatch, num_cores=1)


def test_who_waits_is_told_why_nothing_more_comes_and_nobody_else_begins(monkeypatch):
    async def test(slots, watches):
        with watches.open("blocks", with_all=True) as watch:
            watches.put(0, some(watch.asked.watch, b"a"))
            await watch.next()
            reading = asyncio.create_task(watch.next())
            await timers()
            watches.close(UnavailableError("gone"))
            with pytest.raises(UnavailableError):
                await reading
        with pytest.raises(UnavailableError), watches.open("blocks", with_all=True):
            pass

    watched(test, monkeypatch)


def test_only_so_many_watch_at_once(monkeypatch):
    monkeypatch.setattr(kv_watch, "MAX_WATCHES", 2)
    monkeypatch.setattr(kv_watch, "MAX_CALLERS_WATCHES", 1)

    async def test(slots, watches):
        with watches.open("blocks", with_all=True, for_caller=True):
            with pytest.raises(OverloadedError), watches.open("blocks", with_all=True, for_caller=True):
                pass
            operator = contextlib.ExitStack()
            operator.enter_context(watches.open("blocks", with_all=True))
            with pytest.raises(OverloadedError), watches.open("blocks", with_all=True):
                pass
            operator.close()
            assert len(slots[0].sent) == 3
        with watches.open("blocks", with_all=True):
            pass

    watched(test, monkeypatch)
