"""Connections that reach their age: clients come back by themselves, and no token is lost or doubled."""

import asyncio

import grpc
import pytest

from async_engine import from_proto
from async_engine.results import gather
from protos.tailrace.v1 import generation_pb2 as pb
from tailrace_client import AsyncClient, Client, ResumePolicy
from tests.e2e.serving import run, serving, stream_request, until

OLD = {"max_connection_age": 0.2, "max_connection_age_grace": 0.05}
QUICK = ResumePolicy(attempts=50, initial=0.001, maximum=0.01)
TOKENS, SEED = 300, 11


@pytest.mark.parametrize("kind", ["async", "sync"])
def test_streams_outlive_their_connections(kind):
    async def main():
        async with serving(server=OLD, null_step_ms=2) as (llm, _, channel):
            address = channel.address
            texts = await asyncio.gather(*(read(kind, address, number) for number in range(4)))
            spec = {"stop": pb.StopOptions(max_tokens=TOKENS), "sampling": pb.SamplingOptions(seed=SEED)}
            for number, (ids, text, offsets, resumptions) in enumerate(texts):
                whole = await llm_answer(llm, f"prompt {number}", spec)
                assert ids == whole.token_ids
                assert text == whole.text
                assert offsets == list(range(TOKENS))
                assert resumptions >= 1

    run(main)


async def llm_answer(llm, text, spec):
    request = from_proto.to_request(pb.GenerationSpec(text=text, **spec), "", None, 1 << 20)
    return await gather(text, llm.generate(request))


async def read(kind, address, number):
    """Ids, text, each token's offset, and how often the stream was resumed."""
    ids, text, offsets = [], [], []

    def add(delta):
        ids.extend(delta.token_ids)
        text.append(delta.text)
        offsets.extend(range(delta.offset, delta.offset + len(delta.token_ids)))

    options = {"max_tokens": TOKENS, "seed": SEED}

    def read_sync():
        with Client(address, resume=QUICK) as client, client.generate(f"prompt {number}", **options) as stream:
            for delta in stream:
                add(delta)
        return stream

    if kind == "sync":
        stream = await asyncio.to_thread(read_sync)
    else:
        async with (
            AsyncClient(address, resume=QUICK) as client,
            client.generate(f"prompt {number}", **options) as stream,
        ):
            async for delta in stream:
                add(delta)
    return ids, "".join(text), offsets, stream.resumptions


def test_a_call_that_ends_within_the_grace_is_not_cut_and_the_next_has_another_connection():
    async def main():
        peers = []
        options = {"max_connection_age": 0.2}
        async with serving(server=options, null_step_ms=2) as (llm, stub, _):
            llm.on_end.append(lambda state, _: peers.append(state.caller))
            for _ in range(2):
                call = stub.GenerateStream(stream_request("hi", TOKENS))
                assert [message.WhichOneof("event") async for message in call][-1] == "summary"
            assert await call.code() == grpc.StatusCode.OK
            await until(lambda: len(peers) == 2)
        return peers

    first, second = run(main)
    assert first != second
