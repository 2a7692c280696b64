"""`VllmEngine.SubscribeKvEvents` with `--kv-events`: what gateways route by."""

import asyncio
import contextlib

import grpc

from async_engine.compat import vllm_kv_events
from protos.compat import smg_common_pb2 as common
from protos.compat import vllm_engine_pb2_grpc
from protos.tailrace.v1 import admin_pb2 as admin
from protos.tailrace.v1 import admin_pb2_grpc
from protos.tailrace.v1.generation_pb2 import GenerateRequest
from tests.adapter_files import save_adapter
from tests.e2e.serving import open_channel, run, serving, stream_request, until
from tests.e2e.test_generation import assert_works, failure
from tests.e2e.test_kv_events import FIRST, say


@contextlib.asynccontextmanager
async def told(**options):
    server = {"services": "vllm-engine", "kv_events": True, "admin_listen": "127.0.0.1:0"}
    async with (
        serving(server=server, **options) as (llm, stub, channel),
        open_channel(channel.admin_address) as operators,
    ):
        yield llm, stub, vllm_engine_pb2_grpc.VllmEngineStub(channel), admin_pb2_grpc.AdminServiceStub(operators)


def kinds(batch):
    return [event.WhichOneof("data") for event in batch.events]


async def next_events(batches):
    while not (batch := await anext(batches)).events:
        assert batch.load.load_only
    assert not batch.load.load_only
    return batch


def test_all_that_the_cache_holds_then_what_comes_and_goes(monkeypatch):
    monkeypatch.setattr(vllm_kv_events, "LOAD_INTERVAL", 0.05)

    async def main():
        async with told() as (llm, stub, gateway, operators):
            await say(stub, FIRST, salt="s")
            batches = aiter(gateway.SubscribeKvEvents(common.SubscribeKvEventsRequest()))
            load = await anext(batches)
            first = await next_events(batches)
            silence = await anext(batches)
            await say(stub, FIRST + "f" * 15, salt="s")
            second = await next_events(batches)
            await until(lambda: not llm.stats.running)
            await operators.ResetPrefixCache(admin.ResetPrefixCacheRequest(restart_running=True))
            third = await next_events(batches)
            await llm.drain(0)
            async for _ in batches:
                pass  # ends
            return load, first, silence, second, third

    load, first, silence, second, third = run(main)
    assert (load.sequence_number, load.load.load_only, load.load.sample) == (0, True, 0)
    assert [batch.sequence_number for batch in (first, silence, second, third)] == [1, 1, 2, 3]
    assert (kinds(first), kinds(silence), kinds(second), kinds(third)) == (
        ["cleared", "stored"],
        [],
        ["stored"],
        ["cleared"],
    )
    stored, more = first.events[1].stored, second.events[0].stored
    tokens = [256, *(FIRST + "f" * 15).encode()]
    assert [list(block.token_ids) for block in stored.blocks] == [tokens[:16], tokens[16:32]]
    assert [list(block.token_ids) for block in more.blocks] == [tokens[32:48]]
    assert not stored.HasField("parent_block_hash")
    assert more.parent_block_hash == stored.blocks[1].block_hash
    assert (stored.cache_salt, stored.blocks[0].block_size) == ("s", 16)
    assert not first.HasField("dp_rank")
    event_ids = [event.event_id for batch in (first, second, third) for event in batch.events]
    assert event_ids == [1, 2, 3, 4]


def test_blocks_are_told_with_their_adapter(tmp_path):
    save_adapter(tmp_path / "a", {"model.layers.0.self_attn.q_proj": (8, 8)})

    async def main():
        async with told(adapters=f"a={tmp_path / 'a'}") as (_, stub, gateway, _):
            await stub.Generate(GenerateRequest(spec=stream_request(FIRST, 1, adapter="a").spec))
            await say(stub, FIRST)
            batches = aiter(gateway.SubscribeKvEvents(common.SubscribeKvEventsRequest()))
            return await next_events(batches)

    stored = [event.stored for event in run(main).events if event.HasField("stored")]
    assert [(each.lora_name, each.HasField("lora_name"), len(each.blocks)) for each in stored] == [
        ("a", True, 2),
        ("", False, 2),
    ]


def test_sequences_apart_are_stored_apart_and_each_core_has_its_rank():
    async def main():
        async with told(data_parallel_size=2) as (_, stub, gateway, _):
            await asyncio.gather(*(say(stub, letter * 40) for letter in "abcdefgh"))
            batches = aiter(gateway.SubscribeKvEvents(common.SubscribeKvEventsRequest(start_sequence_number=7)))
            first = [await next_events(batches) for _ in range(2)]
            await asyncio.gather(*(say(stub, letter * 40) for letter in "ijklmnop"))
            more = {}
            while len(more) < 2:
                batch = await next_events(batches)
                more.setdefault(batch.dp_rank, batch.sequence_number)
            return first, more

    batches, more = run(main)
    assert sorted(batch.dp_rank for batch in batches) == [0, 1]
    assert [batch.sequence_number for batch in batches] == [7, 7]
    assert more == {0: 8, 1: 8}
    stored = [event.stored for batch in batches for event in batch.events if event.HasField("stored")]
    assert len(stored) == 8
    for chain in stored:
        assert not chain.HasField("parent_block_hash")
        (letter,) = {token for block in chain.blocks for token in block.token_ids} - {256}
        assert len(chain.blocks) == 2
        assert chr(letter) in "abcdefgh"


def test_it_is_not_told_unless_the_operator_wants_it():
    async def main():
        async with serving(server={"services": "vllm-engine"}) as (llm, stub, channel):
            await say(stub, FIRST)
            gateway = vllm_engine_pb2_grpc.VllmEngineStub(channel)
            batches = aiter(gateway.SubscribeKvEvents(common.SubscribeKvEventsRequest()))
            batch = await anext(batches)
            assert batch.load.load_only
            assert not len(llm.cores.kv_watches)
            return kinds(batch)

    assert run(main) == []


def test_a_number_without_room_to_count_is_refused():
    async def main():
        async with told() as (llm, stub, gateway, _):
            request = common.SubscribeKvEventsRequest(start_sequence_number=(1 << 64) - 1)
            error = await failure(gateway.SubscribeKvEvents(request))
            await assert_works(llm, stub)
            return error

    error = run(main)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "start_sequence_number" in error.details()
