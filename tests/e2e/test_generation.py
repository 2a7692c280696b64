"""The data plane as a client sees it: streams, unary calls, ends, cancellation, bad input."""

import asyncio
import time

import grpc
import pytest
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2, status_pb2

from protos.errors import UnavailableError
from protos.tailrace.v1 import generation_pb2 as pb
from protos.tailrace.v1 import generation_pb2_grpc
from tests.e2e.serving import run, serving, stream_request, until

ENDLESS = 30_000


def kinds(messages):
    return [message.WhichOneof("event") for message in messages]


def details_of(error):
    """The google.rpc details of an error, by type."""
    metadata = dict(error.trailing_metadata())
    status = status_pb2.Status.FromString(metadata["grpc-status-details-bin"])
    found = {}
    for kind in ("ErrorInfo", "BadRequest", "RetryInfo"):
        message = getattr(error_details_pb2, kind)()
        for detail in status.details:
            if detail.Unpack(message):
                found[kind] = message
                message = getattr(error_details_pb2, kind)()
    return found


async def failure(call):
    """The error a call ends with."""
    try:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the call did not fail")


async def assert_works(llm, stub):
    """The next request is fine and nothing of the others is left."""
    response = await stub.Generate(pb.GenerateRequest(spec=stream_request("next").spec))
    assert response.summary.output_tokens == 4
    await until(lambda: llm.num_live == 0 and not llm.output_processor.sequences)
    assert await llm.core.call("reset_prefix_cache") == [1], "a block is still held"


def test_a_stream_starts_with_started_and_ends_with_a_summary():
    async def main():
        async with serving() as (_, stub, _):
            return [message async for message in stub.GenerateStream(stream_request("abc", 5, request_id="mine"))]

    messages = run(main)
    events = kinds(messages)
    assert events[0] == "started"
    assert events[-1] == "summary"
    assert set(events[1:-1]) == {"delta"}
    started, summary = messages[0].started, messages[-1].summary
    assert started.request_id == "mine"
    assert started.prompt_tokens == 4  # <|bos|> and three bytes
    assert started.HasField("cached_tokens")
    assert started.effective.stop.max_tokens == 5
    assert started.effective.sampling.HasField("seed")
    offset = 0
    for message in messages[1:-1]:
        (sequence,) = message.delta.sequences
        assert sequence.offset == offset
        offset += len(sequence.token_ids)
    assert offset == summary.output_tokens == sequence.finish.output_tokens == 5
    assert sequence.finish.reason == pb.FINISH_REASON_MAX_TOKENS


@pytest.mark.parametrize("end", ["length", "stop string", "stop id"])
def test_text_ids_finish_and_usage_agree_in_stream_and_unary_call(end):
    async def main():
        async with serving() as (_, stub, _):
            sampling = pb.SamplingOptions(seed=7)
            request = stream_request("abc", 20, sampling=sampling)
            output = (await stub.Generate(pb.GenerateRequest(spec=request.spec))).output.sequences[0]
            if end == "stop string":
                request.spec.stop.strings.append(output.text[8:10])
            elif end == "stop id":
                request.spec.stop.token_ids.append(output.token_ids[8])
            messages = [message async for message in stub.GenerateStream(request)]
            answer = await stub.Generate(pb.GenerateRequest(spec=request.spec))
            return messages, answer

    messages, answer = run(main)
    parts = [message.delta.sequences[0] for message in messages if message.HasField("delta")]
    summary = messages[-1].summary
    (whole,) = answer.output.sequences
    assert "".join(part.text for part in parts) == whole.text == bytes(whole.token_ids).decode()
    assert [i for part in parts for i in part.token_ids] == list(whole.token_ids)
    assert parts[-1].finish == whole.finish
    for field in ("prompt_tokens", "output_tokens", "preemptions"):
        assert getattr(summary, field) == getattr(answer.summary, field)
    assert (
        pb.FinishReason.Name(whole.finish.reason)
        == {
            "length": "FINISH_REASON_MAX_TOKENS",
            "stop string": "FINISH_REASON_STOP_STRING",
            "stop id": "FINISH_REASON_STOP_TOKEN",
        }[end]
    )


def test_same_seed_same_tokens_and_the_drawn_seed_repeats_them():
    async def main():
        async with serving() as (_, stub, _):
            first = await stub.Generate(pb.GenerateRequest(spec=stream_request("x", 16).spec))
            sampling = first.started.effective.sampling
            again = await stub.Generate(pb.GenerateRequest(spec=stream_request("x", 16, sampling=sampling).spec))
            other = await stub.Generate(pb.GenerateRequest(spec=stream_request("x", 16).spec))
            return [answer.output.sequences[0].text for answer in (first, again, other)]

    first, again, other = run(main)
    assert first == again
    assert first != other


def test_resume_from_continues_with_the_tokens_that_would_have_come():
    async def main():
        async with serving() as (_, stub, _):
            sampling = pb.SamplingOptions(seed=3)
            whole = await stub.Generate(pb.GenerateRequest(spec=stream_request("x", 20, sampling=sampling).spec))
            ids = list(whole.output.sequences[0].token_ids)
            resumed = stream_request(
                "x", 20, sampling=sampling, resume_from=pb.TokenIds(ids=ids[:8]), resume_text_bytes=8
            )
            rest = await stub.Generate(pb.GenerateRequest(spec=resumed.spec))
            done = stream_request("x", 20, sampling=sampling, resume_from=pb.TokenIds(ids=ids), resume_text_bytes=20)
            nothing = await stub.Generate(pb.GenerateRequest(spec=done.spec))
            return ids, rest.output.sequences[0], nothing.output.sequences[0]

    ids, rest, nothing = run(main)
    assert rest.offset == 8
    assert ids[8:] == list(rest.token_ids)
    assert rest.finish.output_tokens == 20
    assert not nothing.token_ids
    assert nothing.finish.reason == pb.FINISH_REASON_MAX_TOKENS


def test_stop_string_ends_the_stream_and_frees_the_request():
    async def main():
        async with serving() as (llm, stub, _):
            sampling = pb.SamplingOptions(seed=3)
            whole = await stub.Generate(pb.GenerateRequest(spec=stream_request("x", 40, sampling=sampling).spec))
            text = whole.output.sequences[0].text
            stop = pb.StopOptions(strings=[text[10:13]])
            cut = await stub.Generate(pb.GenerateRequest(spec=stream_request("x", sampling=sampling, stop=stop).spec))
            await assert_works(llm, stub)
            return text, cut.output.sequences[0]

    text, cut = run(main)
    assert cut.text == text[: text.index(text[10:13])]
    assert bytes(cut.token_ids).decode() == cut.text
    assert cut.finish.reason == pb.FINISH_REASON_STOP_STRING
    assert cut.finish.matched_string == text[10:13]


def test_cancelling_the_call_aborts_the_request_in_the_core():
    async def main():
        async with serving(null_step_ms=1) as (llm, stub, _):
            call = stub.GenerateStream(stream_request("x", ENDLESS))
            async for message in call:
                if message.HasField("delta"):
                    break
            call.cancel()
            await until(lambda: llm.num_live == 0)
            await assert_works(llm, stub)

    run(main)


def test_a_client_that_disconnects_frees_its_requests():
    async def main():
        async with serving(null_step_ms=1) as (llm, stub, channel):
            calls = [stub.GenerateStream(stream_request("x", ENDLESS)) for _ in range(3)]
            await asyncio.gather(*[anext(aiter(call)) for call in calls])
            assert llm.num_live == 3
            await channel.close()
            await until(lambda: llm.num_live == 0)
            await until(lambda: not llm.output_processor.sequences)
            assert await llm.core.call("reset_prefix_cache") == [1]

    run(main)


def test_the_deadline_fails_the_call_and_frees_the_request():
    async def main():
        async with serving(null_step_ms=1) as (llm, stub, _):
            error = await failure(stub.GenerateStream(stream_request("x", ENDLESS), timeout=0.3))
            assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            await assert_works(llm, stub)

    run(main)


def test_the_time_limit_ends_the_output_with_what_there_is():
    async def main():
        async with serving(null_step_ms=1) as (_, stub, _):
            stop = pb.StopOptions(time_limit=duration_pb2.Duration(nanos=100_000_000))
            return await stub.Generate(pb.GenerateRequest(spec=stream_request("x", stop=stop).spec))

    answer = run(main)
    assert answer.output.sequences[0].finish.reason == pb.FINISH_REASON_TIME_LIMIT
    assert answer.output.sequences[0].token_ids


def test_cancel_by_id_ends_the_stream_as_aborted_and_is_idempotent():
    async def main():
        async with serving(null_step_ms=1) as (llm, stub, _):
            call = stub.GenerateStream(stream_request("x", ENDLESS, request_id="a"))
            await anext(aiter(call))
            first = await stub.Cancel(pb.CancelRequest(request_ids=["a", "unknown"]))
            messages = [message async for message in call]
            again = await stub.Cancel(pb.CancelRequest(request_ids=["a"]))
            await assert_works(llm, stub)
            return list(first.cancelled_request_ids), list(again.cancelled_request_ids), messages

    first, again, messages = run(main)
    assert first == ["a"]
    assert again == []
    assert messages[-2].delta.sequences[0].finish.reason == pb.FINISH_REASON_ABORTED
    assert messages[-1].HasField("summary")


def test_progress_tells_the_place_in_the_queue():
    async def main():
        async with serving(null_step_ms=5, max_num_seqs=1) as (_, stub, _):
            first = stub.GenerateStream(stream_request("x", ENDLESS))
            await anext(aiter(first))
            waiting = stub.GenerateStream(stream_request("y", ENDLESS))
            output = pb.OutputOptions(progress_interval=duration_pb2.Duration(nanos=50_000_000))
            call = stub.GenerateStream(stream_request("z", 2, output=output))
            messages = [await anext(aiter(call)) for _ in range(2)]
            first.cancel()
            waiting.cancel()
            return messages + [message async for message in call]

    messages = run(main)
    assert kinds(messages)[:2] == ["started", "progress"]
    assert not messages[0].started.HasField("cached_tokens")
    assert messages[1].progress.queue_position == 1
    assert kinds(messages)[-1] == "summary"
    assert kinds(messages).count("started") == 1


def test_queue_timeout_is_resource_exhausted():
    async def main():
        async with serving(null_step_ms=1, max_num_seqs=1) as (_, stub, _):
            first = stub.GenerateStream(stream_request("x", ENDLESS))
            await anext(aiter(first))
            scheduling = pb.SchedulingOptions(queue_timeout=duration_pb2.Duration(nanos=50_000_000))
            error = await failure(stub.GenerateStream(stream_request("y", scheduling=scheduling)))
            first.cancel()
            return error

    error = run(main)
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert details_of(error)["ErrorInfo"].reason == "QUEUE_TIMEOUT"
    assert "RetryInfo" in details_of(error)


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("token_ids", {"token_ids": pb.TokenIds()}),
        ("token_ids", {"token_ids": pb.TokenIds(ids=[1] * 600)}),
        ("text", {"text": "x" * 100_000}),
        ("token_ids", {"token_ids": pb.TokenIds(ids=[1, 258])}),
        ("sampling.temperature", {"sampling": pb.SamplingOptions(temperature=-0.5)}),
        ("sampling.temperature", {"sampling": pb.SamplingOptions(temperature=float("nan"))}),
        ("sampling.top_p", {"sampling": pb.SamplingOptions(top_p=0)}),
        ("sampling.logit_bias", {"sampling": pb.SamplingOptions(logit_bias={4_000_000_000: 1.0})}),
        ("sampling.presence_penalty", {"sampling": pb.SamplingOptions(presence_penalty=float("nan"))}),
        ("sampling.allowed_token_ids", {"sampling": pb.SamplingOptions(allowed_token_ids=pb.TokenIds())}),
        ("num_sequences", {"num_sequences": 4_000_000_000}),
        ("output.logprobs", {"output": pb.OutputOptions(logprobs=4_000_000_000)}),
        ("output.tool_format", {"output": pb.OutputOptions(tool_format="nonsense")}),
        ("stop.repetition", {"stop": pb.StopOptions(repetition=pb.RepetitionStop(count=4_000_000_000))}),
        ("sampling.min_p", {"sampling": pb.SamplingOptions(min_p=float("inf"))}),
        ("stop.max_tokens", {"stop": pb.StopOptions(max_tokens=0)}),
        ("stop.strings", {"stop": pb.StopOptions(strings=[""])}),
        ("stop.token_ids", {"stop": pb.StopOptions(token_ids=[4_000_000_000])}),
        ("resume_from", {"resume_from": pb.TokenIds(ids=[999])}),
        ("request_id", {"request_id": "no\tgood"}),
    ],
)
def test_bad_input_is_invalid_argument_with_the_field_and_leaves_nothing(field, fields):
    async def main():
        async with serving(max_model_len=512) as (llm, stub, _):
            spec = pb.GenerationSpec(**({} if {"text", "token_ids"} & fields.keys() else {"text": "hi"}) | fields)
            error = await failure(stub.GenerateStream(pb.GenerateStreamRequest(spec=spec)))
            await assert_works(llm, stub)
            return error

    error = run(main)
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    (violation,) = details_of(error)["BadRequest"].field_violations
    assert violation.field == field


def test_unknown_model_is_not_found_and_known_names_are_served():
    async def main():
        async with serving() as (_, stub, _):
            await stub.Generate(pb.GenerateRequest(spec=stream_request(model="null").spec))
            return await failure(stub.Generate(pb.GenerateRequest(spec=stream_request(model="gpt-5").spec)))

    assert run(main).code() == grpc.StatusCode.NOT_FOUND


def test_a_live_id_cannot_be_used_twice_and_is_free_again_afterwards():
    async def main():
        async with serving(null_step_ms=1) as (llm, stub, _):
            call = stub.GenerateStream(stream_request("x", ENDLESS, request_id="same"))
            await anext(aiter(call))
            error = await failure(stub.GenerateStream(stream_request("y", request_id="same")))
            call.cancel()
            await until(lambda: llm.num_live == 0)
            await stub.Generate(pb.GenerateRequest(spec=stream_request("y", request_id="same").spec))
            return error

    assert run(main).code() == grpc.StatusCode.ALREADY_EXISTS


def test_more_requests_than_may_wait_are_resource_exhausted_with_retry_info():
    async def main():
        async with serving(null_step_ms=1, max_num_seqs=1, admission={"max_queued_requests": 1}) as (llm, stub, _):
            calls = [stub.GenerateStream(stream_request("x", ENDLESS)) for _ in range(2)]
            await until(lambda: llm.num_live == 2)
            error = await failure(stub.GenerateStream(stream_request("y")))
            for call in calls:
                call.cancel()
            await until(lambda: llm.num_live == 0 and not llm.output_processor.sequences)
            await assert_works(llm, stub)
            return error

    error = run(main)
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert details_of(error)["RetryInfo"].retry_delay.ToMilliseconds() > 0


def test_two_thousand_streams_of_one_client_are_all_answered():
    async def main():
        async with serving() as (llm, stub, _):

            async def one(index):
                try:
                    return await stub.Generate(pb.GenerateRequest(spec=stream_request(f"{index}", 3).spec))
                except grpc.aio.AioRpcError as error:
                    return error.code()

            answers = await asyncio.gather(*[one(index) for index in range(2000)])
            await assert_works(llm, stub)
            return answers

    answers = run(main)
    refused = [answer for answer in answers if isinstance(answer, grpc.StatusCode)]
    assert set(refused) <= {grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert len(answers) - len(refused) >= 1280  # those that may run or wait at once


def test_a_client_that_never_reads_holds_bounded_memory_and_delays_nobody():
    async def main():
        async with (
            serving() as (llm, stub, channel),
            # A client whose window does not grow by itself.
            grpc.aio.insecure_channel(channel.address, options=[("grpc.http2.bdp_probe", 0)]) as other,
        ):
            bulky = pb.OutputOptions(logprobs=5)  # more than the transport takes without a reader
            call = generation_pb2_grpc.GenerationServiceStub(other).GenerateStream
            never_read = [call(stream_request(f"{i}", 20_000, request_id=f"r{i}", output=bulky)) for i in range(4)]
            await until(lambda: llm.num_live == 4)
            start = time.monotonic()
            await stub.Generate(pb.GenerateRequest(spec=stream_request("other", 50).spec))
            took = time.monotonic() - start
            # The core finishes all four: what is unread waits merged, in one delta each.
            await until(lambda: not llm.output_processor.sequences)
            unread = [len(llm._live[f"r{i}"].sink.sequence(0)._token_ids) for i in range(4)]
            assert min(unread) > 10_000, "they went into the transport's buffers instead"
            for call in never_read:
                call.cancel()
            await until(lambda: llm.num_live == 0)
            await assert_works(llm, stub)
            return took

    assert run(main) < 30


def test_draining_refuses_new_requests_and_lets_live_ones_finish():
    async def main():
        async with serving(null_step_ms=2) as (llm, stub, _):
            call = stub.GenerateStream(stream_request("x", 100))
            await anext(aiter(call))
            drain = asyncio.create_task(llm.drain(30))
            await until(lambda: llm.draining)
            error = await failure(stub.GenerateStream(stream_request("y")))
            messages = [message async for message in call]
            await drain
            return error, messages

    error, messages = run(main)
    assert error.code() == grpc.StatusCode.UNAVAILABLE
    assert details_of(error)["ErrorInfo"].reason == UnavailableError.reason
    assert messages[-1].HasField("summary")


class TestOverload:
    @staticmethod
    async def crowd(stub, count, **scheduling):
        """So many calls that wait behind one another."""
        spec = {"scheduling": pb.SchedulingOptions(**scheduling)}
        stop = pb.StopOptions(max_tokens=40, ignore_eos=True)
        return [stub.GenerateStream(stream_request("x" * 20, stop=stop, **spec)) for _ in range(count)]

    def test_a_caller_with_one_request_does_not_wait_for_one_with_many(self):
        async def main():
            async with serving(null_step_ms=2, max_num_seqs=2) as (llm, stub, channel):
                crowd = await self.crowd(stub, 300, session_id="crowd")
                await until(lambda: llm.num_live > 250)
                (single,) = await self.crowd(stub, 1, session_id="single")
                apart = [("grpc.use_local_subchannel_pool", 1)]
                async with grpc.aio.insecure_channel(channel.address, options=apart) as other:
                    (peer,) = await self.crowd(generation_pb2_grpc.GenerationServiceStub(other), 1)
                    for call in (single, peer):
                        assert kinds([message async for message in call])[-1] == "summary"
                waiting = llm.num_live
                for call in crowd:
                    call.cancel()
                return waiting

        assert run(main) > 200

    def test_what_cannot_be_in_time_is_refused_at_once_and_told_when_to_come_again(self):
        async def main():
            async with serving(null_step_ms=2, max_num_seqs=2) as (llm, stub, _):
                ended = []
                llm.on_end.append(lambda *_: ended.append(None))
                crowd = await self.crowd(stub, 300)
                await until(lambda: len(ended) > 20)  # so many show how fast the queue moves
                stop = pb.StopOptions(max_tokens=1)
                began = time.monotonic()
                error = await failure(stub.GenerateStream(stream_request("late", stop=stop), timeout=4))
                waited = time.monotonic() - began
                for call in crowd:
                    call.cancel()
                await until(lambda: llm.num_live == 0 and not llm.output_processor.sequences)
                await assert_works(llm, stub)
                return error, waited

        error, waited = run(main)
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        details = details_of(error)
        assert details["ErrorInfo"].reason == "SHED"
        assert 1500 < details["RetryInfo"].retry_delay.ToMilliseconds() < 60_000
        assert waited < 2, "it was not refused at the door"

    def test_more_tokens_than_may_wait_are_resource_exhausted(self):
        async def main():
            async with serving(null_step_ms=1, max_num_seqs=1, admission={"max_queued_tokens": 50}) as (llm, stub, _):
                first = stub.GenerateStream(stream_request("x", ENDLESS))
                await anext(aiter(first))
                second = stub.GenerateStream(stream_request("x" * 40, ENDLESS))
                await until(lambda: llm._admission._queued_tokens)
                error = await failure(stub.GenerateStream(stream_request("x" * 40)))
                first.cancel()
                second.cancel()
                return error

        error = run(main)
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert details_of(error)["ErrorInfo"].reason == "OVERLOADED"

    def test_the_servers_queue_timeout_is_told_as_in_force(self):
        async def main():
            async with serving(admission={"queue_timeout": 2.5}) as (_, stub, _):
                answer = await stub.Generate(pb.GenerateRequest(spec=stream_request("x").spec))
                return answer.started.effective.scheduling

        assert run(main).queue_timeout.ToMilliseconds() == 2500
