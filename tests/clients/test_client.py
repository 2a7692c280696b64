"""Both clients against a real server with scripted tokens."""

import asyncio
import contextlib

import grpc
import pytest

from tailrace_client import (
    AsyncClient,
    Client,
    DeadlineError,
    DuplicateRequestError,
    FinishReason,
    InvalidRequestError,
    NotFoundError,
    RequestCancelledError,
    UnavailableError,
    UnsupportedError,
)
from tests.e2e.serving import run, serving, until

ENDLESS = 30_000


@contextlib.asynccontextmanager
async def connected(tmp_path, **engine):
    """(AsyncLLM of the server, client). Slow enough that an endless request outlasts the test's limit."""
    engine = {"null_step_ms": 5} | engine
    address = f"unix:{tmp_path}/socket"
    async with serving(server={"listen": address}, **engine) as (llm, _, _), AsyncClient(address) as client:
        yield llm, client


async def is_free(llm):
    """Waits until nothing of any request is left, in the front end or the core."""
    await until(lambda: llm.num_live == 0 and not llm.output_processor.sequences)
    assert await llm.core.call("reset_prefix_cache") == [1], "a block is still held"


async def failure(awaitable):
    with pytest.raises(Exception) as caught:  # noqa: PT011  callers look at the type
        await awaitable
    return caught.value


async def read_one(stream):
    async with stream:
        return await anext(stream)


async def read_all(stream):
    async with stream:
        return await stream.text()


def test_a_stream_brings_started_deltas_and_summary(tmp_path):
    async def main():
        async with connected(tmp_path) as (_, client):
            stream = client.generate("abc", max_tokens=20, seed=1, request_id="mine")
            assert stream.request_id == "mine"
            assert stream.started is None
            async with stream:
                deltas = [delta async for delta in stream]
            return stream, deltas, await client.complete("abc", max_tokens=20, seed=1)

    stream, deltas, whole = run(main)
    assert stream.started.prompt_tokens == 4
    assert stream.started.effective.sampling.seed == 1
    assert stream.finish.reason is FinishReason.MAX_TOKENS
    assert stream.finish.output_tokens == stream.summary.output_tokens == 20
    assert stream.summary.decode_time > 0
    assert [token for delta in deltas for token in delta.token_ids] == whole.token_ids
    assert "".join(delta.text for delta in deltas) == whole.text
    assert len(whole.text) == 20
    assert whole.finish == stream.finish


def test_text_collects_the_stream(tmp_path):
    async def main():
        async with connected(tmp_path) as (_, client):
            text = await read_all(client.generate([65, 66], max_tokens=9, seed=3))
            return text, await client.complete([65, 66], max_tokens=9, seed=3)

    text, whole = run(main)
    assert text == whole.text


def test_messages_are_a_prompt(tmp_path):
    async def main():
        async with connected(tmp_path) as (_, client):
            return await client.complete([{"role": "user", "content": "hi"}], max_tokens=1)

    assert run(main).started.prompt_tokens == len("user: hi\nassistant: ")


def test_leaving_the_block_frees_the_request(tmp_path):
    async def main():
        async with connected(tmp_path) as (llm, client):
            async with client.generate("abc", max_tokens=ENDLESS) as stream:
                async for _ in stream:
                    break
                assert llm.num_live == 1
            await is_free(llm)

    run(main)


def test_an_exception_in_the_block_frees_the_request(tmp_path):
    async def main():
        async with connected(tmp_path) as (llm, client):
            with contextlib.suppress(ZeroDivisionError):
                async with client.generate("abc", max_tokens=ENDLESS) as stream:
                    async for _ in stream:
                        raise ZeroDivisionError
            await is_free(llm)

    run(main)


def test_a_cancelled_task_frees_its_requests(tmp_path):
    async def main():
        async with connected(tmp_path) as (llm, client):

            async def stream():
                async with client.generate("abc", max_tokens=ENDLESS) as stream:
                    async for _ in stream:
                        pass

            tasks = [
                asyncio.create_task(stream()),
                asyncio.create_task(client.complete("abc", max_tokens=ENDLESS)),
            ]
            await until(lambda: len(llm.output_processor.sequences) == 2)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            assert all(task.cancelled() for task in tasks), (
                "a cancelled task ends as cancelled, not with an error of ours"
            )
            await is_free(llm)

    run(main)


def test_closing_the_client_ends_its_requests_with_an_error(tmp_path):
    async def main():
        async with connected(tmp_path) as (llm, client):
            other = AsyncClient(*client.addresses)
            tasks = [
                asyncio.create_task(read_all(other.generate("abc", max_tokens=ENDLESS))),
                asyncio.create_task(other.complete("abc", max_tokens=ENDLESS)),
            ]
            await until(lambda: len(llm.output_processor.sequences) == 2)
            await other.close()
            return [await failure(task) for task in tasks]

    for error in run(main):
        assert type(error) is RequestCancelledError, "not CancelledError: nobody cancelled the task"


def test_cancel_ends_a_stream_with_what_there_is(tmp_path):
    async def main():
        async with connected(tmp_path) as (_, client):
            async with client.generate("abc", max_tokens=ENDLESS) as stream:
                await anext(stream)
                cancelled = await client.cancel(stream.request_id, "nobody")
                await stream.text()
            return stream, cancelled

    stream, cancelled = run(main)
    assert cancelled == [stream.request_id]
    assert stream.finish.reason is FinishReason.ABORTED
    assert stream.finish.output_tokens > 0


@pytest.mark.parametrize("end", ["cancel", "time_limit"])
def test_a_stream_that_ends_in_the_queue_keeps_the_rules(tmp_path, end):
    async def main():
        options = {"time_limit": 0.1} if end == "time_limit" else {}
        async with connected(tmp_path, max_num_seqs=1) as (llm, client), client.generate("abc") as running:
            await anext(running)
            async with client.generate("abc", **options) as queued:
                text = asyncio.create_task(queued.text())
                await until(lambda: len(llm.output_processor.sequences) == 2)
                if end == "cancel":
                    assert await client.cancel(queued.request_id) == [queued.request_id]
                assert await text == ""
            return queued

    queued = run(main)
    assert queued.started.prompt_tokens == 4
    assert queued.started.cached_tokens is None
    assert queued.finish.reason is (FinishReason.ABORTED if end == "cancel" else FinishReason.TIME_LIMIT)


def test_errors_name_the_field(tmp_path):
    async def main():
        async with connected(tmp_path) as (_, client):
            return [
                await failure(read_one(client.generate("abc", top_p=3.0, request_id="mine"))),
                await failure(client.complete("abc", top_p=3.0, request_id="mine")),
            ]

    for error in run(main):
        assert type(error) is InvalidRequestError
        assert error.code is grpc.StatusCode.INVALID_ARGUMENT
        assert error.field == "sampling.top_p"
        assert error.reason == "INVALID_REQUEST"
        assert error.request_id == "mine"
        assert "(0, 1]" in error.message


def test_each_status_has_its_error(tmp_path):
    async def main():
        async with connected(tmp_path) as (llm, client):
            async with client.generate("abc", max_tokens=ENDLESS) as stream:
                await anext(stream)
                duplicate = await failure(client.complete("abc", request_id=stream.request_id))
            unknown = await failure(client.complete("abc", model="other"))
            unsupported = await failure(client.complete("abc", data_parallel_rank=1))
            llm.draining = True
            async with AsyncClient(*client.addresses, resume=None) as hasty:
                draining = await failure(hasty.complete("abc"))
            return duplicate, unknown, unsupported, draining

    duplicate, unknown, unsupported, draining = run(main)
    assert type(duplicate) is DuplicateRequestError
    assert type(unknown) is NotFoundError
    assert type(unsupported) is UnsupportedError
    assert unsupported.field == "scheduling.data_parallel_rank"
    assert type(draining) is UnavailableError
    assert draining.retry_after == 1.0


def test_a_passed_deadline_is_an_error_and_frees_the_request(tmp_path):
    async def main():
        async with connected(tmp_path, null_step_ms=20) as (llm, client):
            errors = [
                await failure(read_all(client.generate("abc", max_tokens=ENDLESS, timeout=0.2))),
                await failure(client.complete("abc", max_tokens=ENDLESS, timeout=0.2)),
            ]
            await is_free(llm)
            return errors

    for error in run(main):
        assert type(error) is DeadlineError


def test_no_server_is_unavailable(tmp_path):
    async def main():
        async with AsyncClient(f"unix:{tmp_path}/nobody", resume=None) as client:
            return await failure(client.complete("abc"))

    assert type(run(main)) is UnavailableError
    with Client(f"unix:{tmp_path}/nobody", resume=None) as client, pytest.raises(UnavailableError):
        client.complete("abc")


def test_progress_is_told(tmp_path):
    async def main():
        heard = []
        async with connected(tmp_path, null_step_ms=300) as (_, client):
            await read_all(client.generate("abc", max_tokens=2, progress_interval=0.05, on_progress=heard.append))
        return heard

    assert run(main)


def test_channel_options_reach_the_channel(tmp_path):
    async def main():
        address = f"unix:{tmp_path}/socket"
        client = AsyncClient(address, channel_options={"grpc.max_receive_message_length": 8})
        async with serving(server={"listen": address}), client:
            return await failure(client.complete("abc", max_tokens=100))

    assert run(main).code is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_stream_is_used_in_a_block(tmp_path):
    async def main():
        async with AsyncClient(f"unix:{tmp_path}/nobody", resume=None) as client:
            return await failure(client.generate("abc").text())

    assert isinstance(run(main), RuntimeError)
    with Client(f"unix:{tmp_path}/nobody", resume=None) as client, pytest.raises(RuntimeError, match="with"):
        next(client.generate("abc"))


def test_the_synchronous_client(tmp_path):
    def use(client):
        whole = client.complete("abc", max_tokens=20, seed=1)
        with client.generate("abc", max_tokens=20, seed=1) as stream:
            deltas = list(stream)
        assert [token for delta in deltas for token in delta.token_ids] == whole.token_ids
        assert stream.started.prompt_tokens == whole.started.prompt_tokens == 4
        assert stream.summary.output_tokens == 20
        with client.generate("abc", max_tokens=20, seed=1) as stream:
            assert stream.text() == whole.text
        with client.generate("abc", max_tokens=ENDLESS) as stream:
            next(stream)
            assert client.cancel(stream.request_id, "nobody") == [stream.request_id]
            stream.text()
        assert stream.finish.reason is FinishReason.ABORTED
        with pytest.raises(InvalidRequestError) as caught, client.generate("abc", top_p=3.0) as stream:
            next(stream)
        assert caught.value.field == "sampling.top_p"
        with pytest.raises(DeadlineError):
            client.complete("abc", max_tokens=ENDLESS, timeout=0.2)
        with client.generate("abc", max_tokens=ENDLESS) as stream:
            for _ in stream:
                break

    async def main():
        async with connected(tmp_path, null_step_ms=5) as (llm, client):
            with Client(*client.addresses) as synchronous:
                await asyncio.to_thread(use, synchronous)
                await is_free(llm)

    run(main)
