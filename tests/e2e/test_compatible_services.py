"""What all services of other engines have in common: the switch, health, reflection, errors, how outputs end."""

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from async_engine.compat import vllm_engine, vllm_inference
from async_engine.compat.services import ADAPTERS
from async_engine.outputs import Delta, SequenceFinish
from protos.compat import (
    kserve_pb2,
    kserve_pb2_grpc,
    vllm_control_pb2,
    vllm_inference_pb2,
    vllm_inference_pb2_grpc,
)
from protos.config import ServeConfig, build
from protos.errors import InvalidRequestError
from protos.messages import FinishReason
from protos.server_config import SERVICES
from tests.e2e.serving import run, serving, until

NAMES = {name for adapter in ADAPTERS.values() for name in adapter.names}
EVERY = ",".join(SERVICES)


def test_every_name_has_an_adapter():
    assert tuple(ADAPTERS) == SERVICES
    assert {"vllm.grpc.engine.VllmEngine", "vllm.Inference", "vllm.Control", "inference.GRPCInferenceService"} == NAMES


def test_a_service_that_there_is_not_is_refused_with_those_that_there_are():
    assert build(ServeConfig, services=" kserve, ,kserve").server.services
    with pytest.raises(InvalidRequestError, match=r"services: no service 'triton'; there are vllm-engine, "):
        build(ServeConfig, services="kserve,triton")


@pytest.mark.parametrize(("services", "served"), [("", set()), ("kserve", {*ADAPTERS["kserve"].names}), (EVERY, NAMES)])
def test_health_and_reflection_list_what_is_served_and_nothing_else_answers(services, served):
    async def main():
        async with serving(server={"services": services}) as (_, _, channel):
            health, healthy = health_pb2_grpc.HealthStub(channel), set()
            for name in NAMES:
                try:
                    await health.Check(health_pb2.HealthCheckRequest(service=name))
                    healthy.add(name)
                except grpc.aio.AioRpcError:
                    continue
            ask = reflection_pb2.ServerReflectionRequest(list_services="")
            call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([ask]))
            listed = {each.name async for answer in call for each in answer.list_services_response.service}
            ready = kserve_pb2_grpc.GRPCInferenceServiceStub(channel).ServerReady(kserve_pb2.ServerReadyRequest())
            try:
                code = grpc.StatusCode.OK if (await ready).ready else None
            except grpc.aio.AioRpcError as error:
                code = error.code()
            return healthy, listed & NAMES, code

    healthy, listed, code = run(main)
    assert healthy == listed == served
    assert code is (grpc.StatusCode.OK if "inference.GRPCInferenceService" in served else grpc.StatusCode.UNIMPLEMENTED)


@pytest.mark.parametrize(
    "method",
    [
        "/vllm.grpc.engine.VllmEngine/Generate",
        "/vllm.Inference/GenerateStream",
        "/vllm.Control/Abort",
        "/inference.GRPCInferenceService/ModelInfer",
        "/inference.GRPCInferenceService/ModelStreamInfer",
    ],
)
def test_bytes_that_are_no_message_are_refused_with_details(method):
    async def main():
        async with serving(server={"services": EVERY}) as (_, _, channel):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await anext(aiter(channel.stream_stream(method)(iter([b"\xff\xff"]))))
            return caught.value

    error = run(main)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    details = dict(error.trailing_metadata())["grpc-status-details-bin"]
    info = error_details_pb2.ErrorInfo()
    assert status_pb2.Status.FromString(details).details[0].Unpack(info)
    assert info.reason == "INVALID_REQUEST"


def test_an_idle_inference_stream_does_not_hold_a_draining_server_up():
    async def main():
        async with serving(server={"services": "kserve"}) as (llm, _, channel):
            call = kserve_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer()
            await call.write(kserve_pb2.ModelInferRequest(id="bad"))
            answer = await call.read()
            await llm.drain(0)
            with pytest.raises(grpc.aio.AioRpcError):
                await call.read()
            return answer.infer_response.id, answer.error_message, await call.code()

    assert run(main) == ("bad", "text_input: is required", grpc.StatusCode.UNAVAILABLE)


@pytest.mark.parametrize("service", ["vllm.grpc.engine.VllmEngine", "vllm.Control"])
def test_requests_are_their_principals_and_nobody_elses(tmp_path, service):
    (tmp_path / "tokens").write_text("ann:aaaaaaaaaaaaaaaa\nbob:bbbbbbbbbbbbbbbb\n")
    options = {"services": EVERY, "auth_tokens": str(tmp_path / "tokens")}
    ids = vllm_control_pb2.AbortRequest(request_ids=["mine"])

    async def main():
        async with serving(server=options, null_step_ms=1) as (llm, _, channel):

            async def abort(token):
                metadata = (("authorization", f"Bearer {token * 16}"),) if token else ()
                await channel.unary_unary(f"/{service}/Abort")(ids.SerializeToString(), metadata=metadata)

            request = vllm_inference_pb2.GenerateRequest(request_id="mine", text="x")
            call = vllm_inference_pb2_grpc.InferenceStub(channel).GenerateStream(
                request, metadata=(("authorization", "Bearer aaaaaaaaaaaaaaaa"),)
            )
            await anext(aiter(call))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await abort("")
            await abort("b")
            (state,) = llm.live_requests
            is_cancelled = [state.cancelled]
            await abort("a")
            is_cancelled.append(state.cancelled)
            await until(lambda: not llm.num_live)
            return caught.value.code(), state.caller, is_cancelled

    assert run(main) == (grpc.StatusCode.UNAUTHENTICATED, "principal ann", [False, True])


ENDS = [
    (SequenceFinish(FinishReason.EOS, matched_token_id=2), "stop", "STOP", "eos_token_id"),
    (SequenceFinish(FinishReason.STOP_TOKEN, matched_token_id=2), "stop", "STOP", "stop_token_id"),
    (SequenceFinish(FinishReason.STOP_STRING, matched_string="x"), "stop", "STOP", "stop_string"),
    (SequenceFinish(FinishReason.CONSTRAINT_DONE), "stop", "STOP", None),
    (SequenceFinish(FinishReason.REPETITION), "stop", "STOP", None),
    (SequenceFinish(FinishReason.MAX_TOKENS), "length", "LENGTH", None),
    (SequenceFinish(FinishReason.CONTEXT_FULL), "length", "LENGTH", None),
    (SequenceFinish(FinishReason.TIME_LIMIT), "length", "LENGTH", None),
    (SequenceFinish(FinishReason.ABORTED), "abort", "ABORTED", None),
]


def test_every_end_of_an_output_has_its_name():
    assert {finish.reason for finish, *_ in ENDS} == {reason for reason in FinishReason if not reason.is_failure}
    for finish, by_engine, by_inference, matched in ENDS:
        delta = Delta(0, [], "", finish)
        complete = vllm_engine.Answer([1]).complete(delta, with_output=False).complete
        info = vllm_inference.sequence_output(vllm_inference_pb2.ResponseOptions(), delta).finish_info
        assert complete.finish_reason == by_engine
        assert vllm_inference_pb2.FinishInfo.FinishReason.Name(info.finish_reason) == by_inference
        assert info.WhichOneof("stop_reason") == matched
        # The end of sequence is what has nothing matched, for VllmEngine.
        of_engine = {"stop_token_id": "matched_token_id", "stop_string": "matched_stop_str"}
        assert complete.WhichOneof("matched_stop") == of_engine.get(matched)
