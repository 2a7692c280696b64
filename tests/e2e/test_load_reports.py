"""Load reports: the trailer that balancers weigh servers by, with every answer and every refusal."""

import asyncio
import base64

import grpc
import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.duration_pb2 import Duration

from async_engine import load_report
from protos.tailrace.v1 import generation_pb2 as pb
from protos.tailrace.v1 import load_report_pb2
from tests.e2e.serving import run, serving, stream_request, until
from tests.http2 import Http2, framed

TRAILER = "endpoint-load-metrics-bin"
DOUBLE = descriptor_pb2.FieldDescriptorProto.TYPE_DOUBLE
# As cncf/xds has them in xds/data/orca/v3/orca_load_report.proto.
ORCA = {
    "cpu_utilization": 1,
    "mem_utilization": 2,
    "request_cost": 4,
    "utilization": 5,
    "rps_fractional": 6,
    "eps": 7,
    "named_metrics": 8,
    "application_utilization": 9,
}


def call(address, method, request):
    """(report, its trailers, gRPC status) of a call; gRPC's own client keeps the report to itself."""
    with Http2(address) as connection:
        stream = connection.call(f"/tailrace.v1.GenerationService/{method}", end=request is None)
        if request is not None:
            connection.send(stream, framed(request.SerializeToString()))
        answer = connection.read(stream)
    told = answer.headers.get(TRAILER)
    padded = told and base64.b64decode(told + "=" * (-len(told) % 4))
    return padded and load_report_pb2.LoadReport.FromString(padded), answer.headers, answer.status


def test_names_and_numbers_are_those_of_orca():
    fields = load_report_pb2.LoadReport.DESCRIPTOR.fields
    assert {field.name: field.number for field in fields}.items() <= ORCA.items()
    assert all(field.type == DOUBLE for field in fields if field.name != "named_metrics")


@pytest.fixture
def fresh(monkeypatch):
    """Each call has a report of its own."""
    monkeypatch.setattr(load_report, "REFRESH_SECONDS", 0)


@pytest.mark.usefixtures("fresh")
def test_every_way_a_call_ends_tells_the_load():
    async def main():
        options = {"max_num_seqs": 4, "num_kv_blocks": 17, "block_size": 16, "null_step_ms": 5}
        async with serving(server={"load_reports": True}, **options) as (llm, stub, channel):
            live = stub.GenerateStream(stream_request("x" * 60, 200, request_id="live"))
            while (await live.read()).WhichOneof("event") != "delta":
                pass
            await until(lambda: llm.stats.running == 1)
            short = stream_request("y", 1)
            return [
                await asyncio.to_thread(call, channel.address, *each)
                for each in (
                    ("Generate", pb.GenerateRequest(spec=short.spec)),
                    ("GenerateStream", short),
                    ("Generate", pb.GenerateRequest()),
                    ("Attach", None),
                )
            ]

    answers = run(main)
    reports = [told for told, _, _ in answers]
    assert [status for _, _, status in answers] == [0, 0, 3, 0]
    assert "grpc-status-details-bin" in answers[2][1]
    for told in reports:
        assert 0.25 <= told.mem_utilization < 1
        assert told.application_utilization >= 0.25
        assert told.application_utilization == max(told.mem_utilization, told.named_metrics["running"] / 4)
        assert told.named_metrics["running"] >= 1
        assert set(told.named_metrics) == {"running", "waiting", "kv_usage", "queue_seconds"}
    assert 0 < reports[0].rps_fractional < reports[-1].rps_fractional < 1
    assert reports[-1].eps == 0


@pytest.mark.usefixtures("fresh")
def test_requests_that_fail_are_told_of():
    async def main():
        async with serving(server={"load_reports": True}, null_step_ms=5, max_num_seqs=1) as (_, stub, channel):
            live = stub.GenerateStream(stream_request("x", 10_000))
            await live.read()
            hasty = pb.SchedulingOptions(queue_timeout=Duration(nanos=10_000_000))
            late = stub.Generate(pb.GenerateRequest(spec=stream_request("y", scheduling=hasty).spec))
            assert await late.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            live.cancel()
            request = pb.GenerateRequest(spec=stream_request("y", 1).spec)
            return (await asyncio.to_thread(call, channel.address, "Generate", request))[0]

    told = run(main)
    assert told.rps_fractional > told.eps > 0


def test_without_the_option_nothing_is_told():
    async def main():
        async with serving() as (_, _, channel):
            request = pb.GenerateRequest(spec=stream_request().spec)
            return await asyncio.to_thread(call, channel.address, "Generate", request)

    told, _, status = run(main)
    assert (told, status) == (None, 0)


def test_rates_fade(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(load_report.time, "monotonic", lambda: now[0])
    rate = load_report.Rate()
    for _ in range(1000):
        now[0] += 0.1
        rate.add()
    assert rate.value == pytest.approx(10, rel=0.01)
    now[0] += 100
    assert rate.value < 0.001
