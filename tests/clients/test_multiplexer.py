"""Many streams of one client share a call, and nobody who reads them can tell."""

import asyncio
import contextlib

import pytest

from protos.tailrace.v1 import generation_pb2 as pb
from tailrace_client import (
    AsyncClient,
    DuplicateRequestError,
    FinishReason,
    InvalidRequestError,
    ProtocolError,
    RequestCancelledError,
)
from tailrace_client.async_client import MANY
from tailrace_client.multiplexer import CREDIT, MAX_SUBMIT_BYTES, Multiplexer, can_share
from tailrace_client.spec import make_spec
from tests.clients.test_client import ENDLESS, connected, failure, is_free, read_all, read_one
from tests.clients.test_resume import PROMPT, QUICK, SEED, Whole, cutting, undisturbed
from tests.e2e.serving import run, until

OPTIONS = [
    {},
    {"want_text": False},
    {"want_token_ids": False},
    {"logprobs": 2, "prompt_logprobs": 1},
    {"num_sequences": 3},
    {"resume_from": [72, 105], "want_text": False},
    {"coalesce_tokens": 7},
    {"regex": "[a-f]{30}"},
]


@contextlib.asynccontextmanager
async def crowd(client, count=MANY):
    """So many streams that all further ones share a call."""
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(count):
            await anext(await stack.enter_async_context(client.generate("abc", max_tokens=ENDLESS)))
        yield


def num_shared(client):
    return sum(len(multiplexer._live) for multiplexer in client._multiplexers.values())


async def whole(stream):
    async with stream:
        return Whole(stream, [delta async for delta in stream])


def test_a_stream_that_shares_a_call_is_as_one_that_does_not(tmp_path):
    async def main():
        async with connected(tmp_path, null_step_ms=1) as (_, client):
            options = [case | {"max_tokens": 40, "seed": seed} for seed, case in enumerate(OPTIONS)]
            alone = [await whole(client.generate("abc", **each)) for each in options]
            async with crowd(client):
                streams = [client.generate("abc", **each) for each in options]
                tasks = [asyncio.create_task(whole(stream)) for stream in streams]
                await until(lambda: all(stream.started for stream in streams))
                assert num_shared(client) == len(OPTIONS) - 1, "all but the one that coalesces"
                assert await asyncio.gather(*tasks) == alone
                return streams

    for stream in run(main):
        assert not stream.started.effective.output.HasField("initial_credit")
        assert stream.resumptions == 0


def test_only_many_streams_share_a_call(tmp_path):
    async def main():
        async with connected(tmp_path) as (_, client), crowd(client):
            assert num_shared(client) == 0
            async with client.generate("abc", max_tokens=ENDLESS) as stream:
                await anext(stream)
                assert num_shared(client) == 1
            await until(lambda: num_shared(client) == 0)
            await until(lambda: not client._running)  # the call is closed
            async with client.generate("abc", max_tokens=ENDLESS) as stream:
                await anext(stream)
                assert num_shared(client) == 1

    run(main)


def test_what_a_shared_call_cannot_do_has_its_own(tmp_path):
    async def main():
        async with (
            connected(tmp_path) as (_, client),
            crowd(client),
            client.generate("abc", max_tokens=3, timeout=30),
        ):
            assert num_shared(client) == 0
        async with connected(tmp_path) as (_, client):
            client.resume = None
            async with crowd(client), client.generate("abc", max_tokens=3):
                assert num_shared(client) == 0

    run(main)
    assert can_share(make_spec("abc", {}))
    assert not can_share(make_spec("x" * MAX_SUBMIT_BYTES, {}))
    assert not can_share(make_spec("abc", {"request_id": "x" * 257}))
    assert not can_share(make_spec("abc", {"progress_interval": 1}))
    assert not can_share(make_spec("abc", {"want_token_ids": False}))


def test_leaving_the_block_frees_that_request_and_no_other(tmp_path):
    async def main():
        async with connected(tmp_path) as (llm, client):
            async with crowd(client), client.generate("abc", max_tokens=ENDLESS) as other:
                async with client.generate("abc", max_tokens=ENDLESS) as stream:
                    await anext(stream)
                    assert num_shared(client) == 2
                await until(lambda: llm.num_live == MANY + 1 and num_shared(client) == 1)
                await anext(other)
            await is_free(llm)

    run(main)


def test_a_cancelled_task_frees_its_request(tmp_path):
    async def main():
        async with connected(tmp_path) as (llm, client), crowd(client):
            task = asyncio.create_task(read_all(client.generate("abc", max_tokens=ENDLESS)))
            await until(lambda: llm.num_live == MANY + 1)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            await until(lambda: llm.num_live == MANY)

    run(main)


def test_an_error_is_of_its_request_alone(tmp_path):
    async def main():
        async with connected(tmp_path) as (_, client), crowd(client):
            async with client.generate("abc", max_tokens=ENDLESS, request_id="mine") as other:
                await anext(other)
                wrong = await failure(read_one(client.generate("abc", top_p=3.0, request_id="wrong")))
                twice = await failure(read_one(client.generate("abc", request_id="mine")))
                await anext(other)
            return wrong, twice

    wrong, twice = run(main)
    assert type(wrong) is InvalidRequestError
    assert (wrong.field, wrong.reason, wrong.request_id) == ("sampling.top_p", "INVALID_REQUEST", "wrong")
    assert "(0, 1]" in wrong.message
    assert type(twice) is DuplicateRequestError


def test_cancel_by_id_ends_a_stream_with_what_there_is(tmp_path):
    async def main():
        async with connected(tmp_path) as (_, client), crowd(client):
            async with client.generate("abc", max_tokens=ENDLESS) as stream:
                await anext(stream)
                assert num_shared(client) == 1
                assert await client.cancel(stream.request_id) == [stream.request_id]
                await stream.text()
            return stream

    assert run(main).finish.reason is FinishReason.ABORTED


def test_a_stream_nobody_reads_is_bounded_and_stops_no_other(tmp_path):
    async def main():
        async with connected(tmp_path, null_step_ms=0) as (llm, client), crowd(client, 1):
            client._streams |= {object() for _ in range(MANY)}
            async with client.generate("abc", max_tokens=2 * CREDIT, want_text=False) as unread:
                async with client.generate("abc", max_tokens=2 * CREDIT) as other:
                    await other.text()
                await until(lambda: len(llm.output_processor.sequences) <= 1)  # all of it is made
                held = sum(len(s.token_ids) for e in unread._attempts[0].call._unread for s in e.delta.sequences)
                ids = [token for delta in [delta async for delta in unread] for token in delta.token_ids]
            return held, ids, unread

    held, ids, unread = run(main)
    assert held == CREDIT
    assert len(ids) == 2 * CREDIT
    assert unread.summary.output_tokens == 2 * CREDIT


def test_streams_go_on_where_the_call_they_share_was_cut(tmp_path):
    async def main():
        async with cutting(tmp_path, [], engine={"null_step_ms": 1}) as (address, cutter):
            cases = [{"max_tokens": 40, "seed": SEED} | case for case in OPTIONS if "resume_from" not in case]
            expected = [await undisturbed(address, **case) for case in cases]
            async with AsyncClient(address, resume=QUICK) as client, crowd(client):
                cutter.specs.clear()
                cutter.cuts = iter([0, 1, 2, 5, 9])
                streams = [client.generate(PROMPT, **case) for case in cases]
                assert await asyncio.gather(*map(whole, streams)) == expected
                assert next(cutter.cuts, None) is None, "the call was made again and again"
            return streams

    assert sum(stream.resumptions for stream in run(main)) > 0


def test_closing_the_client_ends_what_shares_a_call_with_an_error(tmp_path):
    async def main():
        async with connected(tmp_path) as (llm, client):
            other = AsyncClient(*client.addresses)
            async with crowd(other):
                task = asyncio.create_task(read_all(other.generate("abc", max_tokens=ENDLESS)))
                await until(lambda: num_shared(other) == 1 and llm.num_live == MANY + 1)
                await other.close()
                error = await failure(task)
            await is_free(llm)
            return error

    assert type(run(main)) is RequestCancelledError


class BrokenCall:
    """An Attach call of which the first frames are given, and then nothing comes."""

    def __init__(self, *frames):
        self.frames = frames

    async def __aiter__(self):
        for frame in self.frames:
            await asyncio.sleep(0)
            yield frame
        await asyncio.Event().wait()

    async def write(self, command):
        pass

    async def done_writing(self):
        pass

    def cancel(self):
        pass


@pytest.mark.parametrize(
    "frame",
    [
        pb.AttachResponse(events=[pb.RequestEvent(request_id="nobody", summary=pb.RequestSummary())]),
        pb.AttachResponse(tokens=pb.StepTokens(slots=[7], token_ids=[1])),
        pb.AttachResponse(tokens=pb.StepTokens(slots=[7], counts=[1, 1], token_ids=[1])),
    ],
)
def test_a_frame_that_makes_no_sense_ends_all_with_an_error(frame):
    async def main():
        multiplexer = Multiplexer(BrokenCall(frame))
        calls = [multiplexer.submit(make_spec("abc", {})) for _ in range(2)]
        await multiplexer.run()
        assert not multiplexer.takes("another")
        return [await failure(call.read()) for call in calls], calls

    errors, calls = run(main)
    assert all(type(error) is ProtocolError for error in errors)
    assert [error.request_id for error in errors] == [call.request_id for call in calls]


def test_what_still_comes_of_a_cancelled_request_is_not_read():
    async def main():
        multiplexer = Multiplexer(BrokenCall())
        call = multiplexer.submit(make_spec("abc", {"request_id": "mine"}))
        call.cancel()
        started, summary = pb.RequestEvent(request_id="mine"), pb.RequestEvent(request_id="mine")
        started.started.prompt_tokens = 4
        summary.summary.prompt_tokens = 4
        multiplexer._take(pb.AttachResponse(events=[started]))
        assert not multiplexer.takes("mine"), "the server has not ended it yet"
        error = await failure(call.read())
        multiplexer._take(pb.AttachResponse(events=[summary]))
        assert multiplexer.is_over
        return error

    error = run(main)
    assert type(error) is RequestCancelledError
    assert error.request_id == "mine"
