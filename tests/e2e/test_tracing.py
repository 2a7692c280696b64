"""OpenTelemetry: a span per call below the caller's, a span per request below that, and no cost when off."""

import asyncio
import logging
import subprocess
import sys

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from async_engine import tracing
from protos.tailrace.v1 import generation_pb2 as pb
from tests.adapter_files import save_adapter
from tests.e2e.serving import ROOT, ServerProcess, run, serving, stream_request, until

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
METADATA = (("traceparent", f"00-{TRACE}-{PARENT}-01"),)
SERVICE = "tailrace.v1.GenerationService"


class Exporter(InMemorySpanExporter):
    is_closed = False

    def shutdown(self):
        self.is_closed = True


@pytest.fixture
def exporter(monkeypatch):
    exporter = Exporter()

    def provider(endpoint):
        assert endpoint == "http://collector:4317"
        made = TracerProvider()
        made.add_span_processor(SimpleSpanProcessor(exporter))
        return made

    monkeypatch.setattr(tracing, "otlp_provider", provider)
    return exporter


def traced(**engine):
    return serving(server={"otlp_endpoint": "http://collector:4317"}, **engine)


def named(exporter, name):
    return [span for span in exporter.get_finished_spans() if span.name == name]


def test_a_request_is_a_span_below_its_call_and_that_below_the_callers(exporter):
    async def main():
        async with traced(null_step_ms=5) as (_, stub, _):
            request = stream_request("abc", 5, request_id="mine")
            async for _ in stub.GenerateStream(request, metadata=METADATA):
                pass
            await until(lambda: named(exporter, "request"))
            await until(lambda: named(exporter, f"{SERVICE}/GenerateStream"))

    run(main)
    (call,), (request,) = named(exporter, f"{SERVICE}/GenerateStream"), named(exporter, "request")
    assert f"{call.context.trace_id:032x}" == TRACE
    assert f"{call.parent.span_id:016x}" == PARENT
    assert call.kind is tracing.trace.SpanKind.SERVER
    assert call.attributes["rpc.grpc.status_code"] == 0
    assert request.parent.span_id == call.context.span_id
    told = request.attributes
    assert "tailrace.adapter" not in told
    assert told["gen_ai.response.id"] == "mine"
    assert told["gen_ai.request.model"] == "null"
    assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (4, 5)
    assert told["gen_ai.response.finish_reasons"] == ("max_tokens",)
    assert told["tailrace.decode_seconds"] > 0.015
    admitted, first_token = request.events
    assert (admitted.name, first_token.name) == ("admitted", "first_token")
    assert request.start_time <= admitted.timestamp < first_token.timestamp < request.end_time
    assert request.end_time - first_token.timestamp >= 0.015 * 1e9
    assert call.start_time <= request.start_time
    assert exporter.is_closed, "the server stopped, and with it the thread that sends"


def test_a_request_with_an_adapter_says_so(exporter, tmp_path, caplog):
    save_adapter(tmp_path / "a", {"model.layers.0.self_attn.q_proj": (8, 8)})

    async def main():
        async with traced(adapters=f"a={tmp_path / 'a'}") as (_, stub, _):
            with caplog.at_level(logging.INFO, logger="tailrace.request"):
                await stub.Generate(pb.GenerateRequest(spec=stream_request("abc", 5, adapter="a").spec))
                await stub.Generate(pb.GenerateRequest(spec=stream_request("abc", 5).spec))
            await until(lambda: len(named(exporter, "request")) == 2)

    run(main)
    assert [span.attributes.get("tailrace.adapter") for span in named(exporter, "request")] == ["a", None]
    lines = [record.getMessage() for record in caplog.records if record.name == "tailrace.request"]
    assert [" adapter=a" in line for line in lines] == [True, False]


def test_refused_calls_have_a_span_with_the_status_and_many_requests_share_their_call(exporter):
    async def main():
        async with traced() as (_, stub, _):
            refused = stub.Generate(pb.GenerateRequest(spec=pb.GenerationSpec()), metadata=METADATA)
            assert await refused.code() == grpc.StatusCode.INVALID_ARGUMENT
            attach = stub.Attach(metadata=METADATA)
            for name in "ab":
                await attach.write(pb.AttachRequest(submit=stream_request(request_id=name).spec))
            await attach.done_writing()
            async for _ in attach:
                pass
            await until(lambda: len(named(exporter, "request")) == 2 and named(exporter, f"{SERVICE}/Attach"))

    run(main)
    (refused,), (attach,) = named(exporter, f"{SERVICE}/Generate"), named(exporter, f"{SERVICE}/Attach")
    assert refused.attributes["rpc.grpc.status_code"] == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert refused.attributes["error.type"] == "INVALID_REQUEST"
    assert not refused.status.is_ok
    requests = named(exporter, "request")
    assert {request.parent.span_id for request in requests} == {attach.context.span_id}
    assert {request.attributes["gen_ai.response.id"] for request in requests} == {"a", "b"}


def test_a_caller_that_leaves_ends_its_span(exporter):
    async def main():
        async with traced(null_step_ms=5) as (_, stub, _):
            call = stub.GenerateStream(stream_request("abc", 30_000), metadata=METADATA)
            await call.read()
            call.cancel()
            await until(lambda: named(exporter, f"{SERVICE}/GenerateStream") and named(exporter, "request"))

    run(main)
    (call,), (request,) = named(exporter, f"{SERVICE}/GenerateStream"), named(exporter, "request")
    assert call.attributes["rpc.grpc.status_code"] == grpc.StatusCode.CANCELLED.value[0]
    assert request.attributes["gen_ai.response.finish_reasons"] == ("aborted",)


def test_a_caller_that_does_not_sample_is_not_traced(exporter):
    async def main():
        async with traced() as (_, stub, _):
            metadata = (("traceparent", f"00-{TRACE}-{PARENT}-00"),)
            await stub.Generate(pb.GenerateRequest(spec=stream_request().spec), metadata=metadata)
            await stub.Generate(pb.GenerateRequest(spec=stream_request(request_id="other").spec))
            await until(lambda: named(exporter, "request"))

    run(main)
    assert [span.attributes["gen_ai.response.id"] for span in named(exporter, "request")] == ["other"]


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self):
        self.spans, self.services = [], set()

    async def Export(self, request, context):
        for resource in request.resource_spans:
            attributes = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
            self.services.add(attributes["service.name"])
            for scope in resource.scope_spans:
                self.spans += [span.name for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.mark.parametrize("way", ["option", "variable"])
def test_the_command_sends_its_spans_to_the_collector_before_it_ends(way):
    async def main():
        collector = Collector()
        server = grpc.aio.server()
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
        endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        flags = ("--otlp-endpoint", endpoint) if way == "option" else ()
        variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint} if way == "variable" else {}
        await use_server(flags, variables)
        await server.stop(0)
        return collector

    collector = run(main)
    assert sorted(collector.spans) == ["request", f"{SERVICE}/Generate"]
    assert collector.services == {"tailrace"}


async def use_server(flags, variables):

    def use():
        with ServerProcess("null", "--listen", "127.0.0.1:0", *flags, env=variables) as server:
            server.wait_ready()
            with grpc.insecure_channel(server.address) as channel:
                call = channel.unary_unary(f"/{SERVICE}/Generate")
                call(pb.GenerateRequest(spec=stream_request().spec).SerializeToString())
            assert server.stop() == 0

    await asyncio.to_thread(use)


def test_nothing_of_opentelemetry_is_loaded_when_it_is_off():
    code = "import sys, async_engine.server; sys.exit('opentelemetry' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_without_the_extra_it_is_one_line():
    code = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "from async_engine import cli; sys.exit(cli.main(['serve', '/no/model', '--otlp-endpoint', 'http://a:1']))"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert ended.stderr == "tailrace: tracing needs OpenTelemetry: pip install 'tailrace[tracing]'\n"
