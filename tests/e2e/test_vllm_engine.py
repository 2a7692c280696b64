"""`vllm.grpc.engine.VllmEngine` itself: what gateways rely on and do not show."""

import hashlib
import io
import json
import zipfile

import grpc
import pytest
from tokenizers import Tokenizer

from async_engine.compat import vllm_engine, vllm_kv_events
from protos.compat import smg_common_pb2 as common
from protos.compat import vllm_engine_pb2 as pb
from protos.compat import vllm_engine_pb2_grpc
from tests.e2e.serving import run, serving, until

ENDLESS = 30_000


def served(test, **engine):
    """What `test(llm, stub)` returns."""

    async def main():
        async with serving(server={"services": "vllm-engine"}, **engine) as (llm, _, channel):
            return await test(llm, vllm_engine_pb2_grpc.VllmEngineStub(channel))

    return run(main)


def request(request_id="r", stream=True, input_ids=(72, 105), **params):
    params.setdefault("max_tokens", 8)
    return pb.GenerateRequest(
        request_id=request_id,
        tokenized=pb.TokenizedInput(input_ids=input_ids),
        sampling_params=pb.SamplingParams(seed=1, **params),
        stream=stream,
    )


def test_a_stream_is_chunks_with_tokens_and_an_end_without():
    async def test(llm, stub):
        return [message async for message in stub.Generate(request())]

    *chunks, end = served(test)
    assert sum(len(each.chunk.token_ids) for each in chunks) == 8
    assert not end.complete.output_ids
    assert sum(each.chunk.completion_tokens for each in chunks) == end.complete.completion_tokens == 8
    assert (end.complete.finish_reason, end.complete.prompt_tokens) == ("length", 2)
    assert end.complete.WhichOneof("matched_stop") is None


def test_an_answer_at_once_has_all_tokens_of_each_sequence():
    async def test(llm, stub):
        streamed = [message async for message in stub.Generate(request(n=2))]
        return streamed, [message async for message in stub.Generate(request(stream=False, n=2))]

    streamed, whole = served(test)
    found = {0: [], 1: []}
    for message in streamed:
        found[message.chunk.index] += message.chunk.token_ids
    assert {each.complete.index: list(each.complete.output_ids) for each in whole} == found


@pytest.mark.parametrize("stream", [False, True])
def test_what_stopped_a_sequence_is_told(stream):
    async def test(llm, stub):
        whole = [message async for message in stub.Generate(request(stream=False))]
        ids = list(whole[0].complete.output_ids)
        ends = ({"stop_token_ids": [ids[4]]}, {"stop": [bytes(ids[3:5]).decode()]})
        calls = [stub.Generate(request(str(index), stream, **params)) for index, params in enumerate(ends)]
        return ids, [[message async for message in call][-1].complete for call in calls]

    ids, (by_id, by_string) = served(test)
    assert (by_id.finish_reason, by_id.matched_token_id, by_id.completion_tokens) == ("stop", ids[4], 4)
    assert (by_string.finish_reason, by_string.matched_stop_str) == ("stop", bytes(ids[3:5]).decode())
    assert by_string.completion_tokens == 3


def test_an_aborted_request_ends_its_stream_and_is_gone_from_the_engine():
    async def test(llm, stub):
        call = stub.Generate(request("mine", max_tokens=ENDLESS))
        messages = aiter(call)
        await anext(messages)
        await stub.Abort(pb.AbortRequest(request_ids=["mine", "unknown"]))
        last = [message async for message in messages][-1].complete
        await stub.Abort(pb.AbortRequest(request_ids=["mine"]))
        await until(lambda: not llm.num_live and not llm.stats.running)
        return last, llm.stats.output_tokens

    last, drawn = served(test, null_step_ms=1)
    assert last.finish_reason == "abort"
    assert drawn < 1000


def test_log_probabilities_of_output_and_prompt():
    async def test(llm, stub):
        alone = [message async for message in stub.Generate(request(stream=False, logprobs=0))][-1].complete
        for token_id, top in zip(alone.output_ids, alone.output_logprobs.top_logprobs, strict=True):
            assert list(top.token_ids) == [token_id]
        params = {"logprobs": 2, "prompt_logprobs": 1, "input_ids": (72, 105, 33)}
        return [
            [message async for message in stub.Generate(request(stream=stream, **params))] for stream in (True, False)
        ]

    (first, *_), (whole,) = served(test)
    chunk, complete = first.chunk, whole.complete
    assert not any(message.chunk.HasField("input_logprobs") for message in _)
    for told in (chunk.input_logprobs, complete.input_logprobs):
        assert list(told.token_ids) == [72, 105, 33]
        assert [each.HasField("value") for each in told.token_logprobs] == [False, True, True]
        assert [len(each.values) for each in told.top_logprobs] == [0, 1, 1]
    told = complete.output_logprobs
    assert list(told.token_ids) == list(complete.output_ids)
    for token_id, logprob, top in zip(told.token_ids, told.token_logprobs, told.top_logprobs, strict=True):
        assert dict(zip(top.token_ids, top.values, strict=True))[token_id] == logprob
    assert list(chunk.output_logprobs.token_ids) == list(chunk.token_ids)


@pytest.mark.parametrize(
    ("bad", "code", "text"),
    [
        (request(input_ids=[999_999]), "INVALID_ARGUMENT", "999999 is outside the vocabulary"),
        (request(input_ids=[]), "INVALID_ARGUMENT", "the prompt is empty"),
        (pb.GenerateRequest(request_id="r"), "INVALID_ARGUMENT", "one of tokenized and text"),
        (request(request_id="a\nb"), "INVALID_ARGUMENT", "printable"),
        (request(n=100_000), "INVALID_ARGUMENT", "num_sequences"),
        (request(logprobs=-1), "INVALID_ARGUMENT", "logprobs"),
        (request(stream=False, logprobs=20, max_tokens=30_000), "INVALID_ARGUMENT", "in one message of at most"),
        (pb.GenerateRequest(text="x", data_parallel_rank=1), "UNIMPLEMENTED", "data_parallel_rank"),
        (pb.GenerateRequest(text="x", kv_transfer_params_json="{}"), "UNIMPLEMENTED", "kv_transfer_params_json"),
        (pb.GenerateRequest(text="x", mm_inputs=pb.MultimodalInputs()), "UNIMPLEMENTED", "mm_inputs"),
    ],
)
def test_what_cannot_be_served_is_refused(bad, code, text):
    async def test(llm, stub):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(stub.Generate(bad)))
        assert not llm.num_live
        return caught.value

    error = served(test)
    assert error.code().name == code
    assert text in error.details()


def test_a_deadline_reaches_the_core():
    async def test(llm, stub):
        # On its way grpc rounds this up, by a tenth of a second.
        call = stub.Generate(request(max_tokens=ENDLESS), timeout=49.9)
        await anext(aiter(call))
        (state,) = llm.live_requests
        call.cancel()
        return state.message.deadline

    assert 0 < served(test, null_step_ms=1) <= 50


def test_a_live_id_is_taken():
    async def test(llm, stub):
        first = stub.Generate(request("same", max_tokens=ENDLESS))
        await anext(aiter(first))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(stub.Generate(request("same"))))
        first.cancel()
        await until(lambda: not llm.num_live)
        return caught.value.code()

    assert served(test, null_step_ms=1) is grpc.StatusCode.ALREADY_EXISTS


def test_embeddings_are_not_here():
    async def main():
        async with serving(server={"services": "vllm-engine"}) as (_, _, channel):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary("/vllm.grpc.engine.VllmEngine/Embed")(b"")
            return caught.value.code()

    assert run(main) is grpc.StatusCode.UNIMPLEMENTED


def test_the_tokenizer_comes_as_an_archive_with_its_digest_at_the_end(monkeypatch):
    monkeypatch.setattr(vllm_engine, "PIECE_BYTES", 1000)

    async def test(llm, stub):
        return [chunk async for chunk in stub.GetTokenizer(common.GetTokenizerRequest())]

    chunks = served(test)
    assert [len(chunk.data) for chunk in chunks[:-1]] == [1000] * (len(chunks) - 1)
    assert len(chunks) > 1
    archive = b"".join(chunk.data for chunk in chunks)
    assert [chunk.sha256 for chunk in chunks] == [""] * (len(chunks) - 1) + [hashlib.sha256(archive).hexdigest()]
    files = zipfile.ZipFile(io.BytesIO(archive))
    assert Tokenizer.from_buffer(files.read("tokenizer.json")).encode("hi").ids == [256, 104, 105]
    assert "chat_template" in json.loads(files.read("tokenizer_config.json"))


def test_the_model_the_server_and_its_health():
    async def test(llm, stub):
        healthy = await stub.HealthCheck(pb.HealthCheckRequest())
        model = await stub.GetModelInfo(pb.GetModelInfoRequest())
        server = await stub.GetServerInfo(pb.GetServerInfoRequest())
        await llm.drain(0)
        return healthy, model, server, await stub.HealthCheck(pb.HealthCheckRequest())

    healthy, model, server, draining = served(test, max_num_seqs=7)
    assert (healthy.healthy, draining.healthy, draining.message) == (True, False, "draining")
    assert (model.served_model_name, model.tokenizer_path) == ("null", "/null/tokenizer")
    assert (model.max_context_length, model.vocab_size, model.bos_token_id) == (32768, 258, 256)
    assert json.loads(model.default_sampling_params_json)["temperature"] == 1.0
    assert (server.server_type, server.data_parallel_size, server.max_num_seqs) == ("vllm-grpc", 1, 7)


def test_the_load_is_told_when_asked_and_again_and_again(monkeypatch):
    monkeypatch.setattr(vllm_kv_events, "LOAD_INTERVAL", 0.1)

    async def test(llm, stub):
        call = stub.Generate(request(max_tokens=ENDLESS))
        await anext(aiter(call))
        await until(lambda: llm.stats.running == 1)
        loads = (await stub.GetLoads(pb.GetLoadsRequest())).loads
        records = aiter(stub.SubscribeKvEvents(common.SubscribeKvEventsRequest()))
        told = [await anext(records) for _ in range(4)]
        call.cancel()
        await llm.drain(0)
        async for _ in records:
            pass  # ends
        return loads, told

    (load,), told = served(test, null_step_ms=1, max_num_seqs=4)
    assert (load.num_running_reqs, load.max_running_requests, load.utilization) == (1, 4, 0.25)
    assert 0 < load.token_usage < 1
    assert [each.load.sample for each in told] == [0, 1, 2, 3]
    assert all(each.load.load_only and not each.sequence_number for each in told)
    assert told[1].load.running_requests == 1
    assert max(each.load.gen_throughput for each in told) > 10


def test_the_prefix_cache_is_forgotten_unless_it_is_in_use():
    async def test(llm, stub):
        prompt = tuple(range(32, 72))
        found = []

        async def cached():
            messages = [message async for message in stub.Generate(request(stream=False, input_ids=prompt))]
            found.append(messages[-1].complete.cached_tokens)

        await cached()
        await cached()
        await until(lambda: not llm.stats.running)
        flushed = await stub.FlushCache(common.FlushCacheRequest())
        await cached()
        call = stub.Generate(request("long", max_tokens=ENDLESS, input_ids=prompt))
        await anext(aiter(call))
        busy = await stub.FlushCache(common.FlushCacheRequest())
        call.cancel()
        return found, flushed.success, busy.success, busy.message

    found, flushed, busy, message = served(test, null_step_ms=1)
    assert (found, flushed, busy) == ([0, 32, 0], True, False)
    assert "in use" in message
