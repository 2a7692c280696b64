"""What the server offers beside generation: health, reflection, channel options, metrics, logs, hostile input."""

import asyncio
import json
import logging
import os
import signal
import socket
import sys
import urllib.request
from pathlib import Path

import grpc
import pytest
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from async_engine.connect import CHANNEL_OPTIONS
from async_engine.endpoint import channel_options, check_files
from async_engine.request_log import Fields, JsonFormatter
from protos.errors import InvalidRequestError
from protos.server_config import ServerOptions
from protos.tailrace.v1 import generation_pb2 as pb
from tailrace_client.channel import merge_options
from tests.e2e.serving import run, serving, stream_request, until
from tests.http2 import Http2, framed

Status = health_pb2.HealthCheckResponse
SERVICE = "tailrace.v1.GenerationService"


def check(service=""):
    return health_pb2.HealthCheckRequest(service=service)


def test_health_is_serving_for_the_server_and_for_the_service():
    async def main():
        async with serving() as (_, _, channel):
            stub = health_pb2_grpc.HealthStub(channel)
            statuses = [(await stub.Check(check(name))).status for name in ("", SERVICE)]
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Check(check("nope"))
            return statuses, caught.value.code()

    assert run(main) == ([Status.SERVING] * 2, grpc.StatusCode.NOT_FOUND)


def test_a_health_watch_stays_open_and_one_that_leaves_does_not_cut_off_another():
    async def main():
        async with serving() as (llm, _, channel):
            stub = health_pb2_grpc.HealthStub(channel)
            first, second = (stub.Watch(check()) for _ in range(2))
            seen = [(await anext(aiter(first))).status, (await anext(aiter(second))).status]
            first.cancel()
            await llm.drain(0)
            return [*seen, (await anext(aiter(second))).status]

    assert run(main) == [Status.SERVING, Status.SERVING, Status.NOT_SERVING]


def test_a_hung_core_turns_health_not_serving_and_back():
    async def main():
        async with serving(server={"step_timeout": 1.5}) as (llm, stub, channel):
            watch = aiter(health_pb2_grpc.HealthStub(channel).Watch(check(SERVICE)))
            seen = [(await anext(watch)).status]
            os.kill(llm.core.pid, signal.SIGSTOP)
            seen.append((await anext(watch)).status)
            os.kill(llm.core.pid, signal.SIGCONT)
            seen.append((await anext(watch)).status)
            await stub.Generate(pb.GenerateRequest(spec=stream_request().spec))
            return seen

    assert run(main) == [Status.SERVING, Status.NOT_SERVING, Status.SERVING]


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_reflection_describes_the_service(version):
    async def main():
        async with serving() as (_, _, channel):
            call = channel.stream_stream(
                f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
                request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
                response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
            )()
            await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE))
            await call.done_writing()
            return [message async for message in call]

    services, file = run(main)
    assert SERVICE in {service.name for service in services.list_services_response.service}
    assert any(b"GenerateStream" in data for data in file.file_descriptor_response.file_descriptor_proto)


def test_every_service_that_reflection_lists_is_described():
    """buf lists services by asking for the descriptor of each."""

    async def main():
        async with serving() as (_, _, channel):
            call = channel.stream_stream(
                "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
                request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
                response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
            )()
            await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            services = [service.name for service in (await call.read()).list_services_response.service]
            for name in services:
                await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=name))
            await call.done_writing()
            return services, [(await call.read()).WhichOneof("message_response") for _ in services]

    services, answers = run(main)
    assert SERVICE in services
    assert answers == ["file_descriptor_response"] * len(services)


def test_channel_options_are_spelt_as_the_library_spells_them():
    """grpc ignores keys it does not know: each of ours must be a string of the library."""
    from grpc._cython import cygrpc

    library = Path(cygrpc.__file__).read_bytes()
    for key, _ in [*channel_options(ServerOptions()), *merge_options({}), *CHANNEL_OPTIONS]:
        # With its end: it is not the beginning of another one.
        assert key.encode() + b"\0" in library, key


def test_a_message_over_the_limit_is_resource_exhausted_and_the_next_request_works():
    async def main():
        async with serving(server={"max_message_mib": 1}) as (llm, stub, _):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Generate(pb.GenerateRequest(spec=stream_request("x" * (100 << 20)).spec))
            await stub.Generate(pb.GenerateRequest(spec=stream_request().spec))
            assert llm.num_live == 0
            return caught.value.code()

    assert run(main) == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_bytes_that_are_no_message_fail_and_unknown_fields_are_ignored():
    async def main():
        async with serving() as (llm, _, channel):
            raw = channel.unary_unary(f"/{SERVICE}/Generate")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await raw(b"\xff\xff\xff")
            unknown_field = b"\xfa\x7f\x03abc"  # number 2047
            spec = stream_request().spec
            data = pb.GenerateRequest(spec=spec).SerializeToString() + unknown_field
            answer = pb.GenerateResponse.FromString(await raw(data))
            with pytest.raises(grpc.aio.AioRpcError) as no_method:
                await channel.unary_unary(f"/{SERVICE}/Nope")(b"")
            assert llm.num_live == 0
            stream = channel.stream_stream(f"/{SERVICE}/Attach")()
            await stream.write(b"\xff\xff\xff")
            with pytest.raises(grpc.aio.AioRpcError) as in_stream:
                await stream.read()
            assert in_stream.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            return caught.value.code(), answer.summary.output_tokens, no_method.value.code()

    code, tokens, no_method = run(main)
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert tokens == 4
    assert no_method == grpc.StatusCode.UNIMPLEMENTED


def test_garbage_on_the_port_does_not_disturb_others():
    async def main():
        async with serving() as (_, stub, channel):
            host, port = channel.address.split(":")
            preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
            for data in (b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 4096, preface + b"\xff" * 999):
                with socket.create_connection((host, int(port))) as connection:
                    connection.sendall(data)
            await stub.Generate(pb.GenerateRequest(spec=stream_request().spec))

    run(main)


def test_metrics_count_requests_tokens_and_prefix_hits():
    async def main():
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        async with serving(server={"metrics_listen": address}) as (llm, stub, _):
            for _ in range(2):
                await stub.Generate(pb.GenerateRequest(spec=stream_request("x" * 64, 3).spec))

            def scrape():
                with urllib.request.urlopen(f"http://{address}/metrics") as answer:
                    lines = answer.read().decode().splitlines()
                return dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))

            await llm.core.call("reset_prefix_cache")
            values = await asyncio.to_thread(scrape)
            while values["tailrace_output_tokens_total"] != "6.0":
                values = await asyncio.to_thread(scrape)
            return values

    values = run(main)
    assert values['tailrace_requests_finished_total{reason="max_tokens"}'] == "2.0"
    assert values["tailrace_prompt_tokens_total"] == "130.0"
    assert values["tailrace_prefix_hits_total"] == "64.0"
    assert values["tailrace_time_to_first_token_seconds_count"] == "2.0"
    assert values["tailrace_running"] == "0.0"
    assert not any("_created" in name for name in values)


@pytest.mark.parametrize("with_text", [False, True])
def test_one_log_line_per_request_without_its_text_unless_asked(caplog, with_text):
    async def main():
        server = {"log_prompts": with_text}
        async with serving(server=server) as (llm, stub, _):
            spec = stream_request("secret words", 3, request_id="r1").spec
            response = await stub.Generate(pb.GenerateRequest(spec=spec))
            await until(lambda: llm.num_live == 0)
            return response.output.sequences[0].text

    with caplog.at_level(logging.INFO, logger="tailrace.request"):
        text = run(main)
    (record,) = [record for record in caplog.records if record.name == "tailrace.request"]
    line = JsonFormatter().format(record)
    fields = json.loads(line)
    assert (fields["request_id"], fields["finish"], fields["output_tokens"]) == ("r1", "max_tokens", 3)
    assert (fields["level"], fields["logger"]) == ("INFO", "tailrace.request")
    assert ("secret words" in line) is with_text
    assert fields.get("output") == (text if with_text else None)
    assert text
    assert record.getMessage().startswith("request_id=r1 finish=max_tokens prompt_tokens=13 ")
    assert ('prompt="<|bos|>secret words"' in record.getMessage()) is with_text


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("plain", "plain"),
        ("", '""'),
        ("two words", '"two words"'),
        ("café au lait", '"café au lait"'),
        ("a\rb\x1b[31mc", r'"a\rb\u001b[31mc"'),
        ("a\x9bc\x7f\u2028é", r'"a\u009bc\u007f\u2028\u00e9"'),
    ],
)
def test_no_value_of_the_log_reaches_the_terminal_or_makes_a_line(value, shown):
    assert str(Fields(prompt=value, n=1)) == f"prompt={shown} n=1"


def test_any_record_is_a_json_object_in_one_line():
    try:
        raise ValueError("two\nlines")
    except ValueError:
        error = sys.exc_info()
    record = logging.LogRecord("some.module", logging.ERROR, "", 0, "it %s\n", ("failed",), error)
    line = JsonFormatter().format(record)
    assert line.isascii()
    assert len(line.splitlines()) == 1
    fields = json.loads(line)
    assert (fields["level"], fields["logger"], fields["message"]) == ("ERROR", "some.module", "it failed\n")
    assert fields["exception"].endswith("ValueError: two\nlines")


def test_channelz_is_the_operators_and_opt_in(tmp_path):
    async def main():
        address = f"unix:{tmp_path}/admin"
        async with serving(server={"admin_listen": address, "channelz": True}) as (_, _, channel):
            async with grpc.aio.insecure_channel(address) as admin:
                servers = await channelz_pb2_grpc.ChannelzStub(admin).GetServers(channelz_pb2.GetServersRequest())
            call = channelz_pb2_grpc.ChannelzStub(channel).GetServers(channelz_pb2.GetServersRequest())
            assert await call.code() == grpc.StatusCode.UNIMPLEMENTED
            return servers

    servers = run(main)
    listening = [socket.name for server in servers.server for socket in server.listen_socket]
    assert len(listening) >= 2
    with pytest.raises(InvalidRequestError, match="channelz: needs --admin-listen"):
        check_files(ServerOptions(channelz=True))


@pytest.mark.parametrize("algorithm", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_requests_may_be_compressed_and_answers_are_not(algorithm):
    async def main():
        async with serving() as (_, stub, channel):
            spec = stream_request("x" * 10_000, 3).spec
            whole = await stub.Generate(pb.GenerateRequest(spec=spec), compression=algorithm)

            def raw():
                with Http2(channel.address) as connection:
                    stream = connection.call(f"/{SERVICE}/Generate", grpc_accept_encoding="gzip,deflate,identity")
                    connection.send(stream, framed(pb.GenerateRequest(spec=spec).SerializeToString()))
                    return connection.read(stream)

            return whole.started.prompt_tokens, await asyncio.to_thread(raw)

    prompt_tokens, answer = run(main)
    assert prompt_tokens == 10_001
    assert answer.data[0] == 0
    assert answer.headers.get("grpc-encoding", "identity") == "identity"
