"""`vllm.Inference` and `vllm.Control` themselves: what their clients rely on and do not show."""

import grpc
import msgspec
import pytest

from async_engine.compat.vllm_inference import to_request
from protos.compat import vllm_control_pb2 as control
from protos.compat import vllm_control_pb2_grpc, vllm_inference_pb2_grpc
from protos.compat import vllm_inference_pb2 as pb
from tests.adapter_files import save_adapter
from tests.e2e.serving import run, serving, until

ENDLESS = 30_000


def served(test, **engine):
    """What `test(llm, inference, control)` returns."""

    async def main():
        async with serving(server={"services": "vllm-inference"}, **engine) as (llm, _, channel):
            stubs = vllm_inference_pb2_grpc.InferenceStub(channel), vllm_control_pb2_grpc.ControlStub(channel)
            return await test(llm, *stubs)

    return run(main)


def request(request_id="", max_new_tokens=8, stopping=None, sampling=None, **fields):
    fields.setdefault("token_ids", pb.TokenIds(ids=[72, 105]))
    return pb.GenerateRequest(
        request_id=request_id,
        stopping=pb.StoppingCriteria(max_new_tokens=max_new_tokens, **(stopping or {})),
        sampling=pb.RandomSampling(seed=1, **(sampling or {})),
        **fields,
    )


def test_unset_means_greedy_and_no_limit_but_the_context():
    found = to_request(pb.GenerateRequest(text="x"), "", "", None, 64).params
    assert (found.temperature, found.max_tokens, found.top_p, found.seed) == (0, None, None, None)
    assert found.repetition_penalty == 1


def test_a_stream_is_the_prompt_then_deltas_the_last_with_its_end():
    async def test(llm, stub, _):
        options = pb.ResponseOptions(output_token_ids=True, prompt_token_ids=True)
        streamed = [message async for message in stub.GenerateStream(request(response=options))]
        return streamed, await stub.Generate(request(response=options))

    (prompt, *deltas), whole = served(test)
    assert prompt.prompt_info == whole.prompt_info
    assert (prompt.prompt_info.num_prompt_tokens, list(prompt.prompt_info.token_ids)) == (2, [72, 105])
    assert not prompt.HasField("outputs")
    assert [each.outputs.HasField("finish_info") for each in deltas] == [False] * (len(deltas) - 1) + [True]
    assert all(each.outputs.num_tokens == len(each.outputs.token_ids) for each in deltas)
    ids = [token_id for each in deltas for token_id in each.outputs.token_ids]
    assert ids == list(whole.outputs.token_ids)
    assert "".join(each.outputs.text for each in deltas) == whole.outputs.text == bytes(ids).decode()
    finish = whole.outputs.finish_info
    assert (finish.finish_reason, finish.num_output_tokens) == (pb.FinishInfo.LENGTH, 8)
    assert finish == deltas[-1].outputs.finish_info


def test_text_and_ids_come_as_asked():
    async def test(llm, stub, _):
        return (await stub.Generate(request(response=pb.ResponseOptions(output_text=False)))).outputs

    output = served(test)
    assert (output.text, list(output.token_ids), output.num_tokens) == ("", [], 8)


def test_what_stopped_a_sequence_is_told():
    async def test(llm, stub, _):
        ids = list((await stub.Generate(request())).outputs.text.encode())
        ends = ({"stop_token_ids": [ids[4]]}, {"stop_strings": [bytes(ids[3:5]).decode()]})
        return ids, [(await stub.Generate(request(stopping=end))).outputs.finish_info for end in ends]

    ids, (by_id, by_string) = served(test)
    assert by_id == pb.FinishInfo(finish_reason=pb.FinishInfo.STOP, stop_token_id=ids[4], num_output_tokens=4)
    assert by_string.stop_string == bytes(ids[3:5]).decode()


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_come_with_ranks_and_the_candidates_beside(stream):
    response = pb.ResponseOptions(
        output_token_ids=True,
        output_logprobs=True,
        output_candidates=pb.CandidateTokens(top_n=3),
        prompt_logprobs=True,
        prompt_candidates=pb.CandidateTokens(top_n=1),
    )

    async def test(llm, stub, _):
        if not stream:
            whole = await stub.Generate(request(response=response))
            return whole.prompt_info, [whole.outputs]
        first, *rest = [message async for message in stub.GenerateStream(request(response=response))]
        return first.prompt_info, [message.outputs for message in rest]

    prompt, outputs = served(test)
    assert (len(prompt.logprobs), prompt.logprobs[0], prompt.ranks[0]) == (2, 0, 0)
    assert len(prompt.candidate_tokens) == 2
    for output in outputs:
        assert len(output.logprobs) == len(output.ranks) == len(output.candidate_tokens) == output.num_tokens
        for token_id, rank, beside in zip(output.token_ids, output.ranks, output.candidate_tokens, strict=True):
            assert rank == 1
            assert token_id not in {each.id for each in beside.tokens}
            assert [each.rank for each in beside.tokens] == [2, 3]


def test_candidates_that_were_asked_for_have_no_rank():
    async def test(llm, stub, _):
        ids = pb.CandidateTokens(token_ids=pb.TokenIds(ids=[5, 6]))
        response = pb.ResponseOptions(output_logprobs=True, output_candidates=ids)
        return (await stub.Generate(request(response=response))).outputs

    output = served(test)
    assert [[(each.id, each.rank) for each in told.tokens] for told in output.candidate_tokens] == [
        [(5, 0), (6, 0)]
    ] * 8


def test_several_sequences_stream_but_do_not_fit_one_answer():
    async def test(llm, stub, _):
        both = request(sampling={"num_sequences": 2})
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(both)
        return caught.value.code(), [message.outputs async for message in stub.GenerateStream(both)]

    code, outputs = served(test)
    assert code is grpc.StatusCode.UNIMPLEMENTED
    assert {output.index for output in outputs if output.HasField("finish_info")} == {0, 1}


@pytest.mark.parametrize("way", ["cancel", "abort"])
def test_a_request_that_is_given_up_is_gone_from_the_engine(way):
    async def test(llm, stub, control_stub):
        call = stub.GenerateStream(request("mine", ENDLESS))
        messages = aiter(call)
        await anext(messages)
        reason = None
        if way == "cancel":
            call.cancel()
        else:
            await control_stub.Abort(control.AbortRequest(request_ids=["mine", "unknown"]))
            reason = [message async for message in messages][-1].outputs.finish_info.finish_reason
        await until(lambda: not llm.num_live and not llm.stats.running)
        return reason, llm.stats.output_tokens

    reason, drawn = served(test, null_step_ms=1)
    assert reason == (None if way == "cancel" else pb.FinishInfo.ABORTED)
    assert drawn < 1000


def test_a_deadline_reaches_the_core_and_frees_the_request():
    async def test(llm, stub, _):
        call = stub.GenerateStream(request(max_new_tokens=ENDLESS), timeout=0.5)
        messages = aiter(call)
        await anext(messages)
        (state,) = llm.live_requests
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in messages:
                pass
        await until(lambda: not llm.num_live)
        return state.message.deadline, caught.value.code()

    deadline, code = served(test, null_step_ms=1)
    assert 0 < deadline <= 0.51  # on its way a timeout is rounded up, by milliseconds
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize(
    ("bad", "code", "text"),
    [
        (request(model="nope"), "NOT_FOUND", "no model 'nope'"),
        (request(token_ids=pb.TokenIds(ids=[999_999])), "INVALID_ARGUMENT", "outside the vocabulary"),
        (pb.GenerateRequest(), "INVALID_ARGUMENT", "one of text and token_ids"),
        (request(session_id="x" * 300), "INVALID_ARGUMENT", "session_id"),
        (request(lora_name="a"), "NOT_FOUND", "no adapter 'a'"),
        (request(media=[pb.MediaItem()]), "UNIMPLEMENTED", "media"),
        (request(kv=pb.KVCacheParameters(kv_transfer_params={})), "UNIMPLEMENTED", "kv_transfer_params"),
    ],
)
def test_what_cannot_be_served_is_refused(bad, code, text):
    async def test(llm, stub, _):
        errors = []
        for call in (stub.Generate(bad), anext(aiter(stub.GenerateStream(bad)))):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            errors.append(caught.value)
        assert not llm.num_live
        return errors

    for error in served(test):
        assert error.code().name == code
        assert text in error.details()


def test_the_server_and_its_model():
    async def test(llm, _, stub):
        return (
            await stub.GetServerInfo(control.GetServerInfoRequest()),
            await stub.GetModelInfo(control.GetModelInfoRequest()),
            await stub.GetKvEventSources(control.GetKvEventSourcesRequest()),
            await stub.ListLoras(control.ListLorasRequest()),
            await stub.IsPaused(control.IsPausedRequest()),
        )

    server, model, _, loras, _ = served(test, num_kv_blocks=100, max_num_seqs=7, max_adapters=3)
    assert (server.api_version, server.kv_block_size, server.total_kv_blocks) == ("vllm", 16, 99)
    assert (server.max_running_requests, server.parallelism.data_parallel_size_local) == (7, 1)
    assert server.instance_id
    assert (model.model_id, model.served_model_name) == ("null", "null")
    assert model.supports_token_ids_input
    assert (server.max_loras, model.supports_lora, len(loras.adapters)) == (3, True, 0)


def test_loras_are_the_adapters(tmp_path):
    for seed, name in enumerate("ab"):
        save_adapter(tmp_path / name, {"model.layers.0.self_attn.q_proj": (8, 8)}, seed=seed)

    async def test(llm, stub, control_stub):
        for name in "ba":
            await llm.load_adapter(name, str(tmp_path / name))
        asked = [request(), request(lora_name="a"), request(model="a"), request(lora_name="b")]
        texts = [(await stub.Generate(each)).outputs.text for each in asked]
        return texts, (await control_stub.ListLoras(control.ListLorasRequest())).adapters

    texts, (first, second) = served(test)
    assert texts[1] == texts[2]
    assert len(set(texts)) == 3
    assert (first.lora_name, second.lora_name) == ("a", "b")
    assert 0 < first.lora_id != second.lora_id > 0
    assert not first.source_path


def test_the_path_that_is_told_for_the_models_id_names_the_model():
    async def test(llm, stub, _):
        llm.model = msgspec.structs.replace(llm.model, path="/m")
        return await stub.Generate(request(model="/m"))

    assert served(test).outputs.num_tokens == 8
