"""Peers that break the rules of HTTP/2 or gRPC, or flood: a status or a closed connection, and others are served."""

import asyncio
import contextlib
import select
import socket
import sys
import time
import zlib

import grpc
import pytest

from async_engine.bench.load import process_cpu_seconds
from protos.tailrace.v1 import generation_pb2 as pb
from tests.e2e.serving import ServerProcess, run, serving, stream_request, until
from tests.e2e.test_dead_clients import resident
from tests.http2 import Http2, framed

SERVICE = "/tailrace.v1.GenerationService"
WHOLE = framed(pb.GenerateRequest(spec=stream_request().spec).SerializeToString())
INVALID, EXHAUSTED, INTERNAL = 3, 8, 13


def answer(address, data, method="Generate", **headers):
    with Http2(address) as connection:
        stream = connection.call(f"{SERVICE}/{method}", **headers)
        connection.send(stream, data)
        return connection.read(stream)


@pytest.mark.parametrize(
    ("data", "headers", "status", "words"),
    [
        (b"", {}, INVALID, "no whole message came"),
        (WHOLE[:3], {}, INVALID, "no whole message came"),
        (WHOLE[:-2], {}, INVALID, "no whole message came"),
        (framed(b"\xff\xff"), {}, INVALID, "no message of this type"),
        (framed(b"x", length=0x7FFFFFFF), {}, EXHAUSTED, "larger than max"),
        (framed(b"x", compressed=1), {}, INTERNAL, "no encoding"),
        (framed(b"x", compressed=1), {"grpc_encoding": "gzip"}, INTERNAL, "Decompression failed"),
        (WHOLE, {"grpc_encoding": "none-such"}, INTERNAL, "grpc-encoding"),
        (WHOLE, {"grpc_timeout": "soon"}, INTERNAL, "grpc-timeout"),
    ],
)
def test_broken_messages_and_headers_have_a_status(data, headers, status, words):
    async def main():
        async with serving() as (llm, stub, channel):
            for method in ("Generate", "GenerateStream", "Cancel"):
                told = await asyncio.to_thread(answer, channel.address, data, method, **headers)
                assert told.status == status, method
                assert words in told.headers["grpc-message"]
            await stub.Generate(pb.GenerateRequest(spec=stream_request().spec))
            await until(lambda: llm.num_live == 0)

    run(main)


def test_a_compressed_message_that_swells_is_refused_before_it_does():
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    bomb = b"".join([*(packer.compress(bytes(1 << 20)) for _ in range(500)), packer.flush()])
    with ServerProcess("null", "--listen", "127.0.0.1:0") as server:
        server.wait_ready()
        assert answer(server.address, WHOLE).status == 0
        before = resident(server.process.pid)
        assert answer(server.address, framed(bomb[:60_000], compressed=1), grpc_encoding="gzip").status in (8, 13)
        assert resident(server.process.pid) - before < 64 << 20
        assert answer(server.address, WHOLE).status == 0


@pytest.mark.parametrize("request_id", ["a\nb", "a\x1b[2J", "a\x00", "é", "x" * 257])
def test_ids_that_would_spoil_a_log_or_a_header_are_refused_wherever_they_come(request_id):
    spec = stream_request(request_id=request_id).spec

    async def main():
        async with serving() as (llm, stub, _):
            stream = stub.GenerateStream(pb.GenerateStreamRequest(spec=spec))
            for call in (stub.Generate(pb.GenerateRequest(spec=spec)), stream):
                assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT
            attach = stub.Attach()
            await attach.write(pb.AttachRequest(submit=spec))
            assert (await attach.read()).events[0].HasField("status")
            attach.cancel()
            cancelled = await stub.Cancel(pb.CancelRequest(request_ids=[request_id]))
            assert list(cancelled.cancelled_request_ids) == []
            assert llm.num_live == 0

    run(main)


def test_huge_metadata_is_refused():
    async def main():
        async with serving() as (llm, stub, _):
            metadata = (("x", "y" * 1_000_000),)
            call = stub.Generate(pb.GenerateRequest(spec=stream_request().spec), metadata=metadata)
            assert await call.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            await stub.Generate(pb.GenerateRequest(spec=stream_request().spec))
            assert llm.num_live == 0

    run(main)


def test_what_is_no_call_ends_alone():
    async def main():
        async with serving() as (_, stub, channel):

            def get():
                with Http2(channel.address) as connection:
                    stream = connection.call(f"{SERVICE}/Generate", end=True, **{":method": "GET"})
                    return connection.read(stream)

            assert (await asyncio.to_thread(get)).error is not None
            # Any content type is taken: gRPC's core does not look at it.
            other = await asyncio.to_thread(answer, channel.address, WHOLE, content_type="application/json")
            assert (other.status, other.headers["content-type"]) == (0, "application/grpc")
            await stub.Generate(pb.GenerateRequest(spec=stream_request().spec))

    run(main)


ROUNDS, CALLS = 3, 3000


def flood(address):
    """Calls that are reset as soon as they are open, on one connection, in as few packets as that takes."""
    with contextlib.suppress(OSError), Http2(address) as connection:
        for _ in range(CALLS):
            stream = connection.call(f"{SERVICE}/GenerateStream", flush=False)
            connection.h2.send_data(stream, WHOLE)
            connection.h2.reset_stream(stream)
        connection.flush()


def settle(pid):
    """Until a server has nothing to do: what it still works off is no memory that stays."""
    used = process_cpu_seconds(pid)
    while True:
        select.select([], [], [], 0.2)
        before, used = used, process_cpu_seconds(pid)
        if used - before < 0.01:
            return


def test_thousands_of_calls_that_are_opened_and_reset_cost_no_memory_that_stays():
    with ServerProcess("null", "--listen", "127.0.0.1:0", "--log-level", "error") as server:
        server.wait_ready()
        held = []
        for _ in range(ROUNDS):
            flood(server.address)
            began = time.monotonic()
            assert answer(server.address, WHOLE).status == 0
            assert time.monotonic() - began < 10
            settle(server.process.pid)
            held.append(resident(server.process.pid))
        assert server.stop() == 0
    sys.stdout.write(f"{[size >> 20 for size in held]} MiB after each round of {CALLS} calls\n")
    assert held[-1] - held[-2] < 16 << 20


def test_connections_and_calls_that_say_nothing_stop_nobody():
    """Slow-loris: half a preface, half of a request's headers, and calls whose request does not come."""

    async def main():
        async with serving() as (llm, stub, channel), contextlib.AsyncExitStack() as stack:
            host, port = channel.address.split(":")
            for data in (b"", b"PRI * HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n") * 50:
                connection = stack.enter_context(socket.create_connection((host, int(port))))
                connection.sendall(data)
            lazy = stack.enter_context(Http2(channel.address))
            for _ in range(200):
                lazy.send(lazy.call(f"{SERVICE}/GenerateStream"), WHOLE[:1], end=False)
            answers = await asyncio.gather(
                *(stub.Generate(pb.GenerateRequest(spec=stream_request().spec)) for _ in range(20))
            )
            assert [told.summary.output_tokens for told in answers] == [4] * 20
            assert llm.num_live == 0

    run(main)
