"""AdminService.WatchKvEvents: what watchers are told adds up to what the prefix caches hold."""

import asyncio
import os
import signal

import grpc
import numpy as np

from async_engine import kv_watch
from core_proc.block_hash import chain_root, extend_chain
from protos.tailrace.v1 import admin_pb2 as pb
from protos.tailrace.v1.generation_pb2 import GenerateRequest, SchedulingOptions
from tests.e2e.serving import run, serving, stream_request, until
from tests.e2e.test_admin_service import operated
from tests.e2e.test_generation import assert_works, failure

BLOCK = 16


class Follower:
    """Takes in responses: of each core the blocks it is said to hold, by their hashes."""

    def __init__(self, admin, **fields):
        self.call = admin.WatchKvEvents(pb.WatchKvEventsRequest(**fields))
        self._responses = aiter(self.call)
        self.held = {}
        self.num_cleared = 0
        self._sequences = {}

    async def read(self):
        response = await anext(self._responses)
        core = response.data_parallel_rank
        assert response.sequence_number == self._sequences.get(core, 0)
        self._sequences[core] = response.sequence_number + 1
        assert response.block_size == BLOCK
        held = self.held.setdefault(core, {})
        if response.cleared:
            held.clear()
        for block_hash in response.removed_block_hashes:
            held.pop(block_hash, None)
        held.update({block.block_hash: block for block in response.stored_blocks})
        self.num_cleared += response.cleared
        return response

    async def read_until(self, condition):
        while not condition():
            await self.read()

    def num_held(self):
        return sum(map(len, self.held.values()))

    def texts(self):
        """Of chains from their beginnings, with salts."""
        found = {}
        for blocks in self.held.values():
            for block_hash in blocks:
                tokens, each = [], block_hash
                while each is not None:
                    block = blocks[each]
                    tokens = [*block.token_ids, *tokens]
                    each = block.parent_block_hash if block.HasField("parent_block_hash") else None
                found.setdefault(block.cache_salt, set()).add(bytes(t for t in tokens if t < 256).decode())
        return found


async def say(stub, text, max_tokens=1, salt=""):
    scheduling = SchedulingOptions(cache_salt=salt)
    spec = stream_request(text, max_tokens, scheduling=scheduling).spec
    return (await stub.Generate(GenerateRequest(spec=spec))).summary


FIRST, SECOND = "a" * 15 + "b" * 16 + "c", "d" * 15 + "e" * 20


def test_a_snapshot_then_what_comes_and_goes():
    async def main():
        async with operated() as (_, stub, admin, _):
            await say(stub, FIRST)
            await say(stub, SECOND, salt="tenant")
            watch = Follower(admin, snapshot=True, token_ids=True)
            first = await watch.read()
            assert first.cleared
            assert not first.has_more
            texts = [watch.texts()]
            await say(stub, FIRST[:20])
            await say(stub, FIRST + "f" * 15)
            await watch.read_until(lambda: watch.num_held() == 5)
            texts.append(watch.texts())
            await admin.ResetPrefixCache(pb.ResetPrefixCacheRequest(restart_running=True))
            await watch.read_until(lambda: watch.num_cleared == 2)
            watch.call.cancel()
            return texts, watch.num_held()

    (before, after), num_left = run(main)
    assert before == {"": {"a" * 15, "a" * 15 + "b" * 16}, "tenant": {"d" * 15, "d" * 15 + "e" * 16}}
    assert after[""] - before[""] == {FIRST + "f" * 15}
    assert num_left == 0


def test_hashes_are_those_of_the_documented_chain():
    async def main():
        async with operated() as (_, stub, admin, _):
            await say(stub, FIRST, salt="s")
            watch = Follower(admin, snapshot=True, token_ids=True)
            await watch.read()
            return watch.held[0]

    held = run(main)
    chain: list[bytes] = []
    token_ids = np.array([256, *FIRST.encode()], np.int32)
    extend_chain(chain, chain_root([("salt", "s")]), token_ids, BLOCK)
    assert list(held) == [int.from_bytes(each[:8], "little") for each in chain]
    assert [token for block in held.values() for token in block.token_ids] == token_ids[: 2 * BLOCK].tolist()


def test_without_a_snapshot_only_what_is_new_is_told_and_tokens_only_if_asked_for():
    async def main():
        async with operated() as (_, stub, admin, _):
            await say(stub, FIRST)
            watch = Follower(admin)
            first = await watch.read()
            assert (first.cleared, len(first.stored_blocks), len(first.removed_block_hashes)) == (False, 0, 0)
            await say(stub, SECOND)
            await watch.read_until(lambda: watch.num_held() == 2)
            return watch.held[0]

    held = run(main)
    assert [block.HasField("parent_block_hash") for block in held.values()] == [False, True]
    assert not any(block.token_ids for block in held.values())


def test_of_several_cores_each_is_told_and_one_that_dies_holds_nothing():
    async def main():
        async with operated(data_parallel_size=2, null_step_ms=1) as (llm, stub, admin, _):
            watch = Follower(admin, snapshot=True, token_ids=True)
            texts = [chr(ord("A") + number) * 48 for number in range(16)]
            await asyncio.gather(*(say(stub, text) for text in texts))
            await watch.read_until(lambda: watch.num_held() == 16 * 3)
            assert min(map(len, watch.held.values())) > 0
            survivor = dict(watch.held[1])
            os.kill(llm.cores.slots[0].core.pid, signal.SIGKILL)
            await watch.read_until(lambda: not watch.held[0])
            assert watch.held[1] == survivor
            await until(lambda: llm.cores.num_restarts == 1 and llm.cores.slots[0].is_up)
            await asyncio.gather(*(say(stub, text.lower()) for text in texts))
            await watch.read_until(lambda: watch.held[0] and watch.num_held() == len(survivor) + 16 * 3)
            return watch.num_cleared

    assert run(main) >= 4, "at first of both; of the first when it died and when another came"


def test_who_does_not_read_is_told_less_and_in_the_end_the_same():
    async def main():
        async with operated(num_kv_blocks=60) as (_, stub, admin, _):
            slow = Follower(admin, snapshot=True, token_ids=True)
            await slow.read()
            for turn in range(60):
                await asyncio.gather(*(say(stub, f"{turn} {number} " * 10) for number in range(4)))
            truth = Follower(admin, snapshot=True, token_ids=True)
            await truth.read()
            await slow.read_until(lambda: slow.held == truth.held)

    run(main)


def test_a_large_snapshot_comes_in_parts():
    async def main():
        async with operated(max_num_batched_tokens=8192) as (_, stub, admin, _):
            block = "0123456789abcdef"
            await asyncio.gather(*(say(stub, str(number) + block * 1100) for number in range(4)))
            watch = Follower(admin, snapshot=True)
            parts = [await watch.read()]
            while parts[-1].has_more:
                parts.append(await watch.read())
            return parts

    parts = run(main)
    assert [part.cleared for part in parts] == [True] + [False] * 8
    assert [len(part.stored_blocks) for part in parts] == [512] * 8 + [4 * 1100 - 8 * 512]


def test_who_leaves_leaves_nothing_and_one_too_many_is_refused(monkeypatch):
    monkeypatch.setattr(kv_watch, "MAX_WATCHES", 2)

    async def main():
        async with operated() as (llm, stub, admin, _):
            watches = [Follower(admin, snapshot=True) for _ in range(2)]
            for watch in watches:
                await watch.read()
            refused = await failure(admin.WatchKvEvents(pb.WatchKvEventsRequest()))
            for watch in watches:
                watch.call.cancel()
            await until(lambda: not len(llm.cores.kv_watches))
            await Follower(admin).read()
            await assert_works(llm, stub)
            return refused.code()

    assert run(main) is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_watch_ends_when_the_server_drains():
    async def main():
        async with operated() as (llm, _, admin, _):
            watch = Follower(admin, snapshot=True)
            await watch.read()
            await llm.drain(0)
            codes = [(await failure(watch.call)).code()]
            codes.append((await failure(admin.WatchKvEvents(pb.WatchKvEventsRequest()))).code())
            return codes

    assert run(main) == [grpc.StatusCode.UNAVAILABLE] * 2


def test_a_salt_without_end_is_refused():
    async def main():
        async with serving() as (llm, stub, _):
            spec = stream_request("x", scheduling=SchedulingOptions(cache_salt="s" * 257)).spec
            error = await failure(stub.Generate(GenerateRequest(spec=spec)))
            await assert_works(llm, stub)
            return error

    error = run(main)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "scheduling.cache_salt" in error.details()
