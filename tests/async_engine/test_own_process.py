"""What a front end sets of its own process."""

import asyncio
import os
import threading

import grpc.aio
import pytest

from async_engine.own_process import POLLER, calm_poller

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="of Linux alone")


def pollers():
    return [thread.native_id for thread in threading.enumerate() if POLLER in thread.name]


def test_grpcs_poller_waits_for_its_turn_and_nothing_else_does():
    async def main():
        server = grpc.aio.server()
        calm_poller()
        found = pollers()
        policies = {thread.native_id: os.sched_getscheduler(thread.native_id) for thread in threading.enumerate()}
        for thread in found:
            os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
        await server.stop(None)
        return [policies.pop(thread) for thread in found], list(policies.values())

    ours, others = asyncio.run(main())
    assert ours == [os.SCHED_BATCH]
    assert set(others) == {os.SCHED_OTHER}


def test_where_it_may_not_all_stays_as_it_was(monkeypatch):
    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refuse)

    async def main():
        grpc.aio.server()
        calm_poller()

    asyncio.run(main())
