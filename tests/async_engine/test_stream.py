"""RequestStream: one slot, merged while nobody reads."""

import asyncio

import pytest

from async_engine.logprobs import Logprobs
from async_engine.outputs import Delta, Extra, Progress, SequenceFinish, Started, Summary
from async_engine.sequence_buffer import MAX_CELLS
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
            stream.sequence(0).tokens([token_id], str(token_id))
        await let_readers_run()
        stream.sequence(0).finish(FINISH)
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
            stream.sequence(0).tokens([token_id], "x")
        stream.sequence(0).finish(FINISH)
        stream.summary(SUMMARY)
        return await read_all(stream)

    events = asyncio.run(main())
    assert events == [Started(0), Delta(7, list(range(1000)), "x" * 1000, FINISH), SUMMARY]


def test_tokens_beyond_what_was_to_be_gathered_count_as_merged():
    async def main():
        stream = RequestStream(coalesce=3, num_sequences=2)
        stream.started(0)
        await anext(stream)
        for count in (1, 3, 7):  # the first delta is to have one token, those after it three
            stream.sequence(0).tokens([5] * count, "")
            await anext(stream)
        stream.sequence(1).tokens([5] * 3, "")
        await anext(stream)
        return stream.num_merged

    assert asyncio.run(main()) == 4 + 2


def test_a_slow_reader_does_not_delay_a_fast_one():
    async def main():
        slow, fast = RequestStream(), RequestStream()
        fast.started(0)
        reader = asyncio.create_task(read_all(fast))
        for token_id in range(5):
            slow.sequence(0).tokens([token_id], "")
            fast.sequence(0).tokens([token_id], "")
            await let_readers_run()
        fast.sequence(0).finish(FINISH)
        fast.summary(SUMMARY)
        return await reader

    assert [event.token_ids for event in asyncio.run(main())[1:-1]] == [[0], [1], [2], [3], [4], []]


def test_coalesce_gathers_tokens_after_the_first_delta():
    async def main():
        stream = RequestStream(coalesce=3)
        stream.started(0)
        reader = asyncio.create_task(read_all(stream))
        for token_id in range(8):
            stream.sequence(0).tokens([token_id], "")
            await let_readers_run()
        stream.sequence(0).finish(FINISH)
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
        stream.sequence(0).tokens([9], "t")
        return [*events, await anext(stream)]

    assert asyncio.run(main()) == [Started(None), Progress(2, 1), Progress(2, 2), Delta(0, [9], "t")]


def test_text_without_a_token_waits_for_the_next_delta_or_the_end():
    async def main():
        stream = RequestStream()
        stream.started(0)
        stream.sequence(0).tokens([], "tail")
        stream.sequence(0).finish(FINISH)
        return [await anext(stream), await anext(stream)]

    assert asyncio.run(main()) == [Started(0), Delta(0, [], "tail", FINISH)]


def test_a_request_that_ended_in_the_queue_has_started_all_the_same():
    async def main():
        stream = RequestStream()
        stream.sequence(0).finish(FINISH)
        stream.summary(SUMMARY)
        return await read_all(stream)

    assert asyncio.run(main()) == [Started(None), Delta(0, [], "", FINISH), SUMMARY]


def test_deltas_of_several_sequences_are_told_apart_and_the_summary_comes_last():
    async def main():
        stream = RequestStream(num_sequences=2)
        stream.started(0)
        stream.sequence(1).tokens([7], "b")
        stream.sequence(0).tokens([5], "a")
        stream.sequence(1).finish(FINISH)
        events = [await anext(stream), await anext(stream)]
        more = stream.take_delta()
        stream.sequence(0).finish(FINISH)
        stream.summary(SUMMARY)
        return [*events, more, *await read_all(stream)]

    assert asyncio.run(main()) == [
        Started(0),
        Delta(0, [5], "a", None, 0),
        Delta(0, [7], "b", FINISH, 1),
        Delta(1, [], "", FINISH, 0),
        SUMMARY,
    ]


def make_logprobs(values, width=1):
    logprobs = Logprobs(width)
    for value in values:
        logprobs.logprobs.append(-float(value))
        logprobs.ranks.append(value)
        logprobs.top_ids += [value * 10 + i for i in range(width)]
        logprobs.top_logprobs += [-float(i) for i in range(width)]
    return logprobs


def test_log_probabilities_merge_with_their_tokens():
    async def main():
        stream = RequestStream()
        stream.started(0)
        for token_id in (1, 2, 3):
            stream.sequence(0).tokens([token_id], "x", Extra(make_logprobs([token_id])))
        return [await anext(stream), await anext(stream)]

    assert asyncio.run(main())[1] == Delta(0, [1, 2, 3], "xxx", None, 0, Extra(make_logprobs([1, 2, 3])))


def test_backlog_of_log_probabilities_is_cut_into_messages_that_clients_accept():
    width = 128
    count = MAX_CELLS // (2 + 2 * width) + 5

    async def main():
        stream = RequestStream()
        stream.started(0)
        stream.sequence(0).tokens([1] * count, "text", Extra(make_logprobs([1] * count, width)))
        stream.sequence(0).finish(FINISH)
        stream.summary(SUMMARY)
        return await read_all(stream)

    _, first, second, _ = asyncio.run(main())
    assert (len(first.token_ids), len(second.token_ids)) == (count - 5, 5)
    assert (first.offset, second.offset) == (0, count - 5)
    assert (first.text, second.text) == ("", "text")
    assert (len(first.extra.logprobs), len(second.extra.logprobs)) == (count - 5, 5)
    assert second.finish == FINISH


def test_prompt_log_probabilities_come_before_the_first_delta_in_parts_without_a_gap():
    count = MAX_CELLS // 4 + 5

    async def main():
        stream = RequestStream()
        stream.started(0)
        stream.prompt_logprobs(1, make_logprobs([1] * 4))
        stream.prompt_logprobs(5, make_logprobs([2] * (count - 4)))
        stream.sequence(0).tokens([1], "x")
        return [await anext(stream) for _ in range(4)]

    _, first, second, delta = asyncio.run(main())
    assert (first.offset, len(first.logprobs)) == (1, count - 5)
    assert (second.offset, len(second.logprobs)) == (count - 4, 5)
    assert type(delta) is Delta


def test_tokens_of_which_nothing_is_wanted_are_only_counted():
    async def main():
        stream = RequestStream(coalesce=0)
        stream.started(0)
        for token_id in range(5):
            stream.sequence(0).tokens([token_id], "")
        assert await anext(stream) == Started(0)
        assert stream.take() is None
        stream.sequence(0).finish(FINISH)
        return await anext(stream)

    assert asyncio.run(main()).finish == FINISH


def test_all_is_taken_with_a_delta_of_tokens_alone_and_not_before():
    async def main():
        stream = RequestStream()
        found = []

        def take():
            event = stream.take()
            found.append((type(event), stream.is_drained))

        take()
        stream.started(0)
        take()  # Started: tokens may have come meanwhile
        take()
        stream.sequence(0).tokens([1], "a")
        assert not stream.is_drained
        take()
        stream.sequence(0).tokens([2], "b", Extra(make_logprobs([2])))
        take()  # of log-probabilities there may be more than a message holds
        take()
        stream.sequence(0).tokens([3], "c")
        stream.sequence(0).finish(FINISH)
        stream.summary(SUMMARY)
        take()
        take()
        return found

    assert asyncio.run(main()) == [
        (type(None), True),
        (Started, False),
        (type(None), True),
        (Delta, True),
        (Delta, False),
        (type(None), True),
        (Delta, False),
        (Summary, False),
    ]


def test_readers_wait_only_where_there_is_nothing_and_take_once_for_a_token():
    async def main():
        stream = RequestStream()
        calls = {"take": 0, "ready": 0}

        async def read():
            while not stream.ended:
                if stream.is_drained:
                    calls["ready"] += 1
                    await stream.ready()
                calls["take"] += 1
                stream.take()

        stream.started(0)
        reader = asyncio.create_task(read())
        await let_readers_run()
        before = dict(calls)
        for token_id in range(10):
            stream.sequence(0).tokens([token_id], "x")
            await let_readers_run()
        counted = {name: calls[name] - before[name] for name in calls}
        stream.sequence(0).finish(FINISH)
        stream.summary(SUMMARY)
        await reader
        return counted

    assert asyncio.run(main()) == {"take": 10, "ready": 10}


def test_log_probabilities_of_the_prompt_are_told_whenever_they_come():
    async def main():
        stream = RequestStream()
        stream.started(0)
        assert [stream.take(), stream.take()] == [Started(0), None]
        stream.prompt_logprobs(1, make_logprobs([1]))
        stream.sequence(0).tokens([1], "x")
        return [stream.take(), stream.take()]

    prompt, delta = asyncio.run(main())
    assert (prompt.offset, len(prompt.logprobs)) == (1, 1)
    assert delta == Delta(0, [1], "x")


def test_of_several_sequences_each_is_looked_at_after_a_wait_too():
    async def main():
        stream = RequestStream(num_sequences=2)
        stream.started(0)
        assert [stream.take(), stream.take()] == [Started(0), None]
        stream.sequence(1).tokens([1], "x")
        stream.sequence(0).tokens([2], "y")
        return [stream.take(), stream.take(), stream.take(), stream.is_drained]

    assert asyncio.run(main()) == [Delta(0, [2], "y"), Delta(0, [1], "x", None, 1), None, True]


def test_a_failure_between_tokens_is_raised_before_what_came_with_it():
    async def main():
        stream = RequestStream()
        stream.started(0)
        stream.take()
        stream.take()
        stream.sequence(0).tokens([1], "a")
        stream.failed(DeadlineError("too late"))
        with pytest.raises(DeadlineError, match="too late"):
            stream.take()

    asyncio.run(main())


def test_progress_is_told_between_tokens_too():
    async def main():
        async def poll():
            return Progress(queue_position=0, prefilled_tokens=3)

        stream = RequestStream(progress_interval=0.001)
        stream.poll_progress = poll
        stream.started(4)
        stream.sequence(0).tokens([9], "t")
        events = [await anext(stream) for _ in range(4)]
        stream.sequence(0).tokens([8], "u")
        return [*events, await anext(stream)]

    assert asyncio.run(main()) == [
        Started(4),
        Delta(0, [9], "t"),
        Progress(0, 3),
        Progress(0, 3),
        Delta(1, [8], "u"),
    ]


def test_candidates_of_a_row_are_its_own():
    assert make_logprobs([1, 2, 3], width=2).candidates(1) == {20: 0, 21: -1}
