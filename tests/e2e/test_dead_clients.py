"""Clients that do not read, are stopped, or are cut off without a word: what they hold is bounded, and given back."""

import asyncio
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import grpc
import pytest

import async_engine  # noqa: F401
from protos.tailrace.v1 import generation_pb2_grpc
from tests.e2e.serving import ROOT, ServerProcess, run, serving, stream_request, until

QUICK = {"keepalive_time": 0.3, "keepalive_timeout": 0.5}
ENDLESS = 30_000
CLIENT = """
import sys, grpc
from protos.tailrace.v1 import generation_pb2 as pb, generation_pb2_grpc
stub = generation_pb2_grpc.GenerationServiceStub(grpc.insecure_channel(sys.argv[1]))
spec = pb.GenerationSpec(text="hi", stop=pb.StopOptions(max_tokens=30000))
for message in stub.GenerateStream(pb.GenerateStreamRequest(spec=spec)):
    print(message.WhichOneof("event"), flush=True)
"""


class Proxy:
    """Forwards bytes both ways until it is told to stop; then its connections stay open, and nothing passes."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(*self._target)
        self._writers += [writer, back]
        for source, sink in ((reader, back), (there, writer)):
            self._tasks.add(asyncio.create_task(self._pump(source, sink)))

    @staticmethod
    async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            sink.write(data)
            await sink.drain()

    async def cut(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)

    async def close(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.close()


def test_a_client_process_that_is_stopped_loses_its_request():
    async def main():
        async with serving(server=QUICK, null_step_ms=5) as (llm, _, channel):
            client = await asyncio.create_subprocess_exec(
                sys.executable, "-c", CLIENT, channel.address, cwd=ROOT, stdout=subprocess.PIPE
            )
            try:
                await client.stdout.readline()
                assert llm.num_live == 1
                client.send_signal(signal.SIGSTOP)
                await until(lambda: llm.num_live == 0)
            finally:
                client.kill()
                await client.communicate()

    run(main)


def test_a_connection_that_is_cut_silently_loses_its_requests_and_no_other():
    async def main():
        async with serving(server=QUICK, null_step_ms=5) as (llm, stub, channel):
            host, _, port = channel.address.rpartition(":")
            proxy = Proxy(host, int(port))
            other = aiter(stub.GenerateStream(stream_request("other", ENDLESS)))
            await anext(other)
            async with grpc.aio.insecure_channel(await proxy.start()) as cut_off:
                far = generation_pb2_grpc.GenerationServiceStub(cut_off)
                calls = [aiter(far.GenerateStream(stream_request(str(i), ENDLESS))) for i in range(5)]
                for call in calls:
                    await anext(call)
                assert llm.num_live == 6
                await proxy.cut()
                await until(lambda: llm.num_live == 1)
                await anext(other)
                await proxy.close()

    run(main)


def test_a_client_that_hears_nothing_for_long_keeps_its_request():
    async def main():
        async with serving(server=QUICK, null_step_ms=1500) as (_, stub, _):
            call = stub.GenerateStream(stream_request("hi", 2))
            return [message.WhichOneof("event") async for message in call]

    assert run(main) == ["started", "delta", "delta", "summary"]


NUM_SILENT = 1000
TOKENS = 300
PER_CLIENT = 96 << 10
"""Bytes that a client who never reads may cost the server: its request, its call, and one merged delta."""


def metric(address: str, name: str) -> float:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
        return float(re.search(rf"^{name} (\S+)$", answer.read().decode(), re.MULTILINE)[1])


def resident(pid: int) -> int:
    (pages,) = re.findall(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(pages) << 10


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_thousand_clients_that_never_read_cost_little_and_stop_nobody():
    metrics = f"127.0.0.1:{free_port()}"
    arguments = ("null", "--listen", "127.0.0.1:0", "--metrics-listen", metrics, "--max-num-seqs", "1100")
    arguments += ("--log-level", "error")  # nobody reads its log here, and a full pipe would stop it

    async def main(server):
        async with grpc.aio.insecure_channel(server.address) as reading, asyncio.timeout(150):
            stub = generation_pb2_grpc.GenerationServiceStub(reading)
            async for _ in stub.GenerateStream(stream_request("warm", TOKENS)):
                pass
            before = resident(server.process.pid)
            async with grpc.aio.insecure_channel(server.address) as silent:
                far = generation_pb2_grpc.GenerationServiceStub(silent)
                calls = [far.GenerateStream(stream_request(str(i), TOKENS)) for i in range(NUM_SILENT)]
                while await asyncio.to_thread(metric, metrics, "tailrace_output_tokens_total") < NUM_SILENT * TOKENS:
                    assert not any(call.done() for call in calls)
                held = resident(server.process.pid) - before
                last = [m.WhichOneof("event") async for m in stub.GenerateStream(stream_request("read", TOKENS))][-1]
            while await asyncio.to_thread(metric, metrics, "tailrace_live_requests"):
                pass
            return held, last

    with ServerProcess(*arguments) as server:
        server.wait_ready()
        held, last = asyncio.run(main(server))
        assert server.stop() == 0
    assert last == "summary"
    assert held < NUM_SILENT * PER_CLIENT
    sys.stdout.write(f"{held / NUM_SILENT / 1024:.1f} KiB per silent client\n")


@pytest.mark.parametrize("seconds", [0, 1e6])
def test_keepalive_can_be_as_good_as_off(seconds):
    async def main():
        async with serving(server={"keepalive_time": seconds}) as (_, stub, _):
            return [m.WhichOneof("event") async for m in stub.GenerateStream(stream_request())][-1]

    assert run(main) == "summary"
