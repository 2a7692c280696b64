"""Several sequences, log-probabilities and the rest of what a caller may ask for, over gRPC."""

import grpc
import pytest

from protos.messages import Abort
from protos.tailrace.v1 import generation_pb2 as pb
from tests.e2e.serving import run, serving, stream_request, until
from tests.e2e.test_generation import ENDLESS, assert_works, failure


def sequences_of(messages):
    """By index: (ids, text, logprobs, finish) as the messages add up, offsets checked."""
    found = {}
    for message in messages:
        for part in message.delta.sequences:
            ids, texts, logprobs, finishes = found.setdefault(part.index, ([], [], [], []))
            assert part.offset == len(ids)
            assert not finishes
            ids += part.token_ids
            texts.append(part.text)
            logprobs += part.logprobs.logprobs
            if part.HasField("finish"):
                finishes.append(part.finish)
    return found


def test_four_sequences_stream_complete_and_unary_is_one_message():
    async def main():
        async with serving(null_step_ms=1) as (llm, stub, _):
            request = stream_request("abc", 9, num_sequences=4, sampling=pb.SamplingOptions(seed=3))
            messages = [message async for message in stub.GenerateStream(request)]
            answer = await stub.Generate(pb.GenerateRequest(spec=request.spec))
            await assert_works(llm, stub)
            return messages, answer

    messages, answer = run(main)
    found = sequences_of(messages)
    assert sorted(found) == [0, 1, 2, 3]
    assert len({tuple(ids) for ids, *_ in found.values()}) == 4
    assert all(len(finishes) == 1 for *_, finishes in found.values())
    assert [sequence.index for sequence in answer.output.sequences] == [0, 1, 2, 3]
    for sequence in answer.output.sequences:
        ids, texts, _, _ = found[sequence.index]
        assert (list(sequence.token_ids), sequence.text) == (ids, "".join(texts))
    assert messages[-1].summary.output_tokens == answer.summary.output_tokens == 36
    assert messages[0].started.effective.num_sequences == 4
    several = [message for message in messages if len(message.delta.sequences) > 1]
    assert several, "what one step brings for several sequences shares a message"


def test_leaving_a_request_of_four_sequences_ends_all_of_them():
    async def main():
        async with serving(null_step_ms=1) as (llm, stub, _):
            call = stub.GenerateStream(stream_request("abc", ENDLESS, num_sequences=4))
            await anext(aiter(call))
            call.cancel()
            await until(lambda: llm.num_live == 0)
            await assert_works(llm, stub)

    run(main)


def test_log_probabilities_come_as_columns_with_their_tokens():
    async def main():
        async with serving() as (_, stub, _):
            output = pb.OutputOptions(logprobs=2, prompt_logprobs=1, logprob_token_ids=pb.TokenIds(ids=[9]))
            request = stream_request("abcdef", 5, output=output)
            messages = [message async for message in stub.GenerateStream(request)]
            return messages, await stub.Generate(pb.GenerateRequest(spec=request.spec))

    messages, answer = run(main)
    started = [message.started for message in messages if message.HasField("started")]
    told = [part for message in started[1:] for part in message.prompt_logprobs.logprobs]
    assert len(told) == started[0].prompt_tokens - 1
    assert started[1].prompt_logprobs.offset == 1
    (sequence,) = answer.output.sequences
    columns = sequence.logprobs
    assert columns.top_width == 3
    assert len(columns.logprobs) == len(columns.ranks) == 5
    assert len(columns.top_ids) == len(columns.top_logprobs) == 15
    assert list(columns.top_ids)[2::3] == [9] * 5
    assert sequence.finish.cumulative_logprob == pytest.approx(sum(columns.logprobs))
    assert len(answer.started.prompt_logprobs.logprobs) == started[0].prompt_tokens - 1
    assert answer.started.prompt_logprobs.top_width == 2
    ((_, _, streamed, _),) = sequences_of(messages).values()
    assert streamed == pytest.approx(list(columns.logprobs))


def test_requests_for_nothing_but_the_count_get_one_delta():
    async def main():
        async with serving() as (_, stub, _):
            output = pb.OutputOptions(text=False, token_ids=False)
            return [message async for message in stub.GenerateStream(stream_request("abc", 50, output=output))]

    _, delta, summary = run(main)
    assert delta.delta.sequences[0].finish.output_tokens == 50
    assert summary.summary.output_tokens == 50


def test_error_texts_stay_small_enough_to_arrive():
    async def main():
        async with serving() as (_, stub, _):
            return [
                await failure(stub.Generate(pb.GenerateRequest(spec=stream_request(model=model).spec)))
                for model in ("g" * 20_000, "\N{PILE OF POO}" * 5_000)
            ]

    for error in run(main):
        assert error.code() == grpc.StatusCode.NOT_FOUND
        assert len(error.details().encode()) < 1_000


def test_giving_up_a_stream_sends_one_abort():
    async def main():
        async with serving(null_step_ms=1) as (llm, stub, _):
            sent = []
            send, llm.core.send = llm.core.send, lambda message: (sent.append(message), send(message))
            call = stub.GenerateStream(stream_request("x", ENDLESS))
            await anext(aiter(call))
            call.cancel()
            await until(lambda: llm.num_live == 0 and not llm.output_processor.sequences)
            return [message for message in sent if isinstance(message, Abort)]

    (abort,) = run(main)
    assert not abort.stopped


def test_backlog_with_log_probabilities_comes_in_messages_that_clients_accept():
    async def main():
        async with serving() as (llm, stub, _):
            request = stream_request("abc", 6_000, num_sequences=2, output=pb.OutputOptions(logprobs=100))
            call = stub.GenerateStream(request)
            await until(lambda: llm.num_live == 1)
            await until(lambda: not llm.output_processor.sequences)  # all of it waits for us
            messages = [message async for message in call]
            return messages

    messages = run(main)
    assert max(message.ByteSize() for message in messages) < 4 << 20
    for ids, _, logprobs, _ in sequences_of(messages).values():
        assert len(ids) == len(logprobs) == 6_000
