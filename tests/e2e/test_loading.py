"""A server takes calls before it has a model: it says so, and serves the next one."""

from __future__ import annotations

import os
import sys

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from async_engine.async_llm import AsyncLLM
from async_engine.server import Server
from core_proc.ahead import import_ahead, module_ahead
from protos.config import EngineConfig, build
from protos.errors import StartupError
from protos.server_config import ServerOptions
from protos.tailrace.v1 import admin_pb2, admin_pb2_grpc, generation_pb2_grpc, model_pb2, model_pb2_grpc
from protos.tailrace.v1 import generation_pb2 as pb
from tests.e2e.serving import children, open_channel, run, stream_request

STATUS = health_pb2.HealthCheckResponse.ServingStatus


def calls(channel, admin):
    """One of each kind, to be made."""
    generation = generation_pb2_grpc.GenerationServiceStub(channel)
    request = stream_request()

    async def stream():
        return [event async for event in generation.GenerateStream(request)]

    async def attach():
        call = generation.Attach()
        await call.write(pb.AttachRequest())
        return await call.read()

    return [
        lambda: generation.Generate(pb.GenerateRequest(spec=request.spec)),
        stream,
        lambda: model_pb2_grpc.ModelServiceStub(channel).ListModels(model_pb2.ListModelsRequest()),
        lambda: admin_pb2_grpc.AdminServiceStub(admin).GetStatus(admin_pb2.GetStatusRequest()),
        attach,
    ]


def test_until_the_model_is_there_calls_are_told_to_come_again_and_then_they_are_served():
    async def main():
        options = ServerOptions(listen="127.0.0.1:0", admin_listen="127.0.0.1:0", load_reports=True)
        server = Server(options)
        await server.listen()
        async with open_channel(server.address) as channel, open_channel(server.admin_address) as admin:
            health = health_pb2_grpc.HealthStub(channel)
            told = [(await health.Check(health_pb2.HealthCheckRequest())).status]
            refused = []
            for call in calls(channel, admin):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call()
                refused.append(caught.value)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary("/tailrace.v1.NoService/Call")(b"")
            unknown = caught.value.code()
            async with await AsyncLLM.start(build(EngineConfig, model="null")) as llm:
                await server.start(llm)
                told.append((await health.Check(health_pb2.HealthCheckRequest())).status)
                answer, events, models, status = [await call() for call in calls(channel, admin)[:4]]
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await channel.unary_unary("/tailrace.v1.GenerationService/NoMethod")(b"")
                unknown_later = caught.value.code()
                await server.stop(drain_seconds=0)
        return told, refused, unknown, unknown_later, answer, events, models, status

    told, refused, unknown, unknown_later, answer, events, models, status = run(main)
    assert told == [STATUS.NOT_SERVING, STATUS.SERVING]
    for error in refused:
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert error.details() == "the model is loading"
        details = {detail.type_url.rpartition(".")[2]: detail for detail in rpc_status.from_call(error).details}
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        assert details["ErrorInfo"].Unpack(info)
        assert details["RetryInfo"].Unpack(retry)
        assert (info.reason, retry.retry_delay.ToSeconds()) == ("LOADING", 1)
    assert unknown is unknown_later is grpc.StatusCode.UNIMPLEMENTED
    assert answer.summary.output_tokens == 4
    assert events[-1].WhichOneof("event") == "summary"
    assert (models.models[0].name, status.model) == ("null", "null")


def test_a_server_that_stops_while_it_loads_leaves_nothing():
    async def main():
        server = Server(ServerOptions(listen="127.0.0.1:0"))
        await server.listen()
        await server.stop(drain_seconds=0)
        again = Server(ServerOptions(listen=server.address))
        await again.listen()
        await again.stop(drain_seconds=0)

    run(main)


def test_a_core_that_was_started_ahead_ends_if_there_is_no_model():
    before = children(os.getpid())

    async def main():
        with pytest.raises(StartupError, match="no-such-model"):
            await AsyncLLM.start(build(EngineConfig, model="./no-such-model"))

    run(main)
    assert children(os.getpid()) == before


def test_a_core_imports_ahead_what_takes_long():
    def module(**options):
        return module_ahead(build(EngineConfig, **options))

    assert module() == module(executor="uniproc") == "gpu_executor.worker"
    assert module(model="null") == module(tensor_parallel_size=2) == module(executor="multiproc") == ""
    sys.modules.pop("colorsys", None)
    import_ahead("colorsys").join()
    assert "colorsys" in sys.modules
    import_ahead("no.such.module").join()
    import_ahead("").join()
