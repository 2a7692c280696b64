"""RequestStream: one slot, merged while nobody reads."""

import asyncio

import pytest

from async_engine.outputs import Delta, Progress, SequenceFinish, Started, Summary
from async_engine.stream import RequestStream
from protos.errors import DeadlineError
from protos.messages import FinishReason

SUMMARY = Summary(1, 0, 3, 0.0, 0.0, 0.0, 0)
FINISH = SequenceFinish(FinishReason.MAX_TOKENS, output_tokens=3)


async def read_all(stream):
    return [event async for event in stream]


async def let_readers_run():
    for _ in range(3):
        await asyncio.sleep(0)


def test_fast_reader_gets_every_token_by_itself():
    async def main():
        stream = RequestStream()
        reader = asyncio.create_task(read_all(stream))
        stream.started(5)
        for token_id in (1, 2, 3):
            await let_readers_run()
            stream.tokens([token_id], str(token_id))
        await let_readers_run()
        stream.finish(FINISH)
        stream.summary(SUMMARY)
        return await reader

    assert asyncio.run(main()) == [
        Started(5),
        Delta(0, [1], "1"),
        Delta(1, [2], "2"),
        Delta(2, [3], "3"),
        Delta(3, [], "", FINISH),
        SUMMARY,
    ]


def test_slow_reader_gets_one_merged_delta_and_nothing_is_lost():
    async def main():
        stream = RequestStream(offset=7)
        stream.started(0)
        for token_id in range(1000):
            stream.tokens([token_id], "x")
        stream.finish(FINISH)
        stream.summary(SUMMARY)
        return await read_all(stream)

    events = asyncio.run(main())
    assert events == [Started(0), Delta(7, list(range(1000)), "x" * 1000, FINISH), SUMMARY]


def test_a_slow_reader_does_not_delay_a_fast_one():
    async def main():
        slow, fast = RequestStream(), RequestStream()
        fast.started(0)
        reader = asyncio.create_task(read_all(fast))
        for token_id in range(5):
            slow.tokens([token_id], "")
            fast.tokens([token_id], "")
            await let_readers_run()
        fast.finish(FINISH)
        fast.summary(SUMMARY)
        return await reader

    assert [event.token_ids for event in asyncio.run(main())[1:-1]] == [[0], [1], [2], [3], [4], []]


def test_coalesce_gathers_tokens_after_the_first_delta():
    async def main():
        stream = RequestStream(coalesce=3)
        stream.started(0)
        reader = asyncio.create_task(read_all(stream))
        for token_id in range(8):
            stream.tokens([token_id], "")
            await let_readers_run()
        stream.finish(FINISH)
        stream.summary(SUMMARY)
        return await reader

    assert [event.token_ids for event in asyncio.run(main())[1:-1]] == [[0], [1, 2, 3], [4, 5, 6], [7]]


def test_failure_reaches_the_reader_at_once_and_ends_the_stream():
    async def main():
        stream = RequestStream()
        reader = asyncio.create_task(read_all(stream))
        await let_readers_run()
        stream.failed(DeadlineError("too late"))
        with pytest.raises(DeadlineError, match="too late"):
            await reader

    asyncio.run(main())


def test_progress_comes_while_nothing_else_does_and_started_comes_first():
    async def main():
        polled = 0

        async def poll():
            nonlocal polled
            polled += 1
            return Progress(queue_position=2, prefilled_tokens=polled)

        stream = RequestStream(progress_interval=0.001)
        stream.poll_progress = poll
        events = [await anext(stream) for _ in range(3)]
        stream.started(4)  # told already, as unknown
        stream.tokens([9], "t")
        return [*events, await anext(stream)]

    assert asyncio.run(main()) == [Started(None), Progress(2, 1), Progress(2, 2), Delta(0, [9], "t")]


def test_text_without_a_token_waits_for_the_next_delta_or_the_end():
    async def main():
        stream = RequestStream()
        stream.started(0)
        stream.tokens([], "tail")
        stream.finish(FINISH)
        return [await anext(stream), await anext(stream)]

    assert asyncio.run(main()) == [Started(0), Delta(0, [], "tail", FINISH)]


def test_a_request_that_ended_in_the_queue_has_started_all_the_same():
    async def main():
        stream = RequestStream()
        stream.finish(FINISH)
        stream.summary(SUMMARY)
        return await read_all(stream)

    assert asyncio.run(main()) == [Started(None), Delta(0, [], "", FINISH), SUMMARY]
