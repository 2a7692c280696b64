"""What the clients make of a server that breaks the rules."""

import asyncio
import contextlib

import grpc
import pytest

from protos.tailrace.v1 import generation_pb2 as pb
from protos.tailrace.v1 import generation_pb2_grpc
from tailrace_client import AsyncClient, Client, ProtocolError, RequestCancelledError
from tests.clients.test_stream_state import STARTED, SUMMARY, delta, end
from tests.e2e.serving import run


class Scripted(generation_pb2_grpc.GenerationServiceServicer):
    """Sends what it is told to; None cancels the call."""

    def __init__(self, messages):
        self.messages = messages

    async def GenerateStream(self, request, context):
        for message in self.messages:
            if message is None:
                await context.abort(grpc.StatusCode.CANCELLED, "by the server")
            await context.write(message)

    async def Generate(self, request, context):
        return pb.GenerateResponse(started=pb.RequestStarted(), summary=pb.RequestSummary())


@contextlib.asynccontextmanager
async def scripted(tmp_path, messages):
    server = grpc.aio.server()
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(Scripted(messages), server)
    server.add_insecure_port(f"unix:{tmp_path}/socket")
    await server.start()
    try:
        yield f"unix:{tmp_path}/socket"
    finally:
        await server.stop(0)


async def read_async(address):
    async with AsyncClient(address) as client, client.generate("abc") as stream:
        await stream.text()


def read(address):
    with Client(address) as client, client.generate("abc") as stream:
        stream.text()


def outcome(tmp_path, messages, reader):
    async def main():
        async with scripted(tmp_path, messages) as address:
            with pytest.raises(Exception) as caught:  # noqa: PT011  callers look at the type
                await (read_async(address) if reader is read_async else asyncio.to_thread(read, address))
            return caught.value

    return run(main)


@pytest.mark.parametrize("reader", [read_async, read])
@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "ended without a summary"),
        ([STARTED, delta(0, [7]), end(1)], "ended without a summary"),
        ([delta(0, [7])], "before started"),
        ([STARTED, delta(5, [7])], "at token 5, not at 0"),
        ([STARTED, end(0), SUMMARY, STARTED], "after the summary"),
    ],
)
def test_a_broken_stream_raises(tmp_path, reader, messages, words):
    error = outcome(tmp_path, messages, reader)
    assert type(error) is ProtocolError
    assert words in error.message
    assert error.request_id


@pytest.mark.parametrize("reader", [read_async, read])
def test_a_call_the_server_cancels_is_no_cancelled_task(tmp_path, reader):
    error = outcome(tmp_path, [STARTED, None], reader)
    assert type(error) is RequestCancelledError


def test_a_failure_after_the_summary_is_a_failure(tmp_path):
    error = outcome(tmp_path, [STARTED, end(0), SUMMARY, None], read_async)
    assert type(error) is RequestCancelledError


def test_an_answer_with_a_part_missing_raises(tmp_path):
    async def main():
        async with scripted(tmp_path, []) as address, AsyncClient(address) as client:
            with pytest.raises(ProtocolError, match="not whole"):
                await client.complete("abc")

    run(main)
