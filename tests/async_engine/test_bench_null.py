"""`tailrace bench null`: its parts, the shape of its report, and that it leaves nothing running."""

import asyncio
import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
import time

import grpc
import pytest

from async_engine import cli
from async_engine.bench import null as bench_null
from async_engine.bench.bare import BareServicer
from async_engine.bench.child import Child
from async_engine.bench.client import Record
from async_engine.bench.core import BATCHES, DEPTHS, measure_busy, measure_core
from async_engine.bench.load import Job, process_cpu_seconds
from async_engine.bench.load import run as run_job
from async_engine.bench.options import NullBenchOptions
from async_engine.bench.stamps import StampWriter, latencies
from protos.errors import StartupError
from protos.tailrace.v1 import generation_pb2 as pb
from protos.tailrace.v1 import generation_pb2_grpc
from tests.e2e.serving import ROOT, children, is_alive, run, serving, until

TINY = ["--streams", "4", "--step-ms", "5", "--steps", "4", "--seconds", "0.1", "--core-tokens", "16", "--rounds", "1"]


def receipts(*times):
    record = Record()
    for now, count in times:
        record.add(now, [1] * count)
    return record


def write_stamps(path, *times):
    path.write_bytes(struct.pack(f"<{len(times)}d", *times))
    return str(path)


def test_a_latency_is_from_the_tokens_own_step(tmp_path):
    async def main():
        path = write_stamps(tmp_path / "stamps", 1.0, 2.0, 3.0, 4.0, 5.0)
        # From the second step on; the first and third token are late by more than a step.
        late = receipts((3.25, 1), (3.5, 1), (5.5, 2))
        early = receipts((1.125, 1), (2.125, 1), (3.125, 1))
        return list(latencies(path, [late, early], 2.0, 6.0))

    assert run(main) == [1.25, 0.5, 1.5, 0.5, 0.125, 0.125]


def test_stamps_are_seen_at_once(tmp_path):
    async def main():
        record = Record()
        with contextlib.closing(StampWriter(str(tmp_path / "stamps"))) as writer:
            writer.stamp()
            record.add(time.monotonic(), [1])
            return latencies(str(tmp_path / "stamps"), [record], 0.0, time.monotonic())

    (latency,) = run(main)
    assert 0 <= latency < 1


def test_the_cpu_clock_of_a_process_is_read_by_its_id():
    before = time.process_time()
    seen = process_cpu_seconds(os.getpid())
    assert before <= seen <= time.process_time()


def test_the_core_is_timed_at_each_batch_size():
    costs = measure_core(rounds=1, tokens_per_round=16)
    assert tuple(costs) == BATCHES
    assert all(cost > 0 for cost in costs.values())


def test_it_is_seen_how_busy_steps_in_flight_keep_a_device():
    busy = measure_busy(rounds=1, device_ms=0.5)
    assert tuple(busy) == DEPTHS
    for shares in busy.values():
        assert tuple(shares) == BATCHES
        assert all(0 < share < 1.5 for share in shares.values())


@contextlib.asynccontextmanager
async def bare(tmp_path):
    """A channel to a bare server that steps each millisecond."""
    server = grpc.aio.server()
    stamps = StampWriter(str(tmp_path / "stamps"))
    servicer = BareServicer(stamps, 0.001)
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)
    server.add_insecure_port(f"unix:{tmp_path}/socket")
    await server.start()
    ticking = asyncio.create_task(servicer.run())
    try:
        async with grpc.aio.insecure_channel(f"unix:{tmp_path}/socket") as channel:
            yield channel
        assert not ticking.done()
    finally:
        ticking.cancel()
        await server.stop(0)
        stamps.close()


def test_the_bare_handler_sends_what_the_server_would(tmp_path):
    async def main():
        async with bare(tmp_path) as channel:
            call = generation_pb2_grpc.GenerationServiceStub(channel).GenerateStream(pb.GenerateStreamRequest())
            messages = [await call.read() for _ in range(5)]
            call.cancel()
        return messages

    first, *rest = run(main)
    assert first.HasField("started")
    for offset, message in enumerate(rest):
        (sequence,) = message.delta.sequences
        assert (sequence.offset, list(sequence.token_ids), len(sequence.text)) == (offset, [32 + offset], 1)


def test_a_stream_that_leaves_the_bare_handler_does_not_stop_the_others(tmp_path):
    async def main():
        async with bare(tmp_path) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            leaving, staying = (stub.GenerateStream(pb.GenerateStreamRequest()) for _ in range(2))
            await leaving.read()
            leaving.cancel()
            for _ in range(50):
                assert await staying.read() is not grpc.aio.EOF
            staying.cancel()

    run(main)


@pytest.mark.parametrize(("method", "text"), [("stream", True), ("attach", False), ("attach", True)])
def test_a_job_counts_whole_steps(tmp_path, method, text):
    async def main():
        address = f"unix:{tmp_path}/socket"
        async with serving(server={"listen": address}, null_step_ms=10):
            job = Job(address=address, server_pid=os.getpid(), method=method, num_streams=5, num_tokens=6, text=text)
            return await run_job(job)

    result = run(main)
    assert result.num_tokens >= 5 * 6
    assert 0 < result.num_messages <= result.num_tokens
    assert result.seconds > 0.05
    assert result.server_cpu > 0
    assert result.latency_ms == {}


def test_a_job_can_be_limited_by_time_and_hold_the_core(tmp_path):
    async def main():
        address = f"unix:{tmp_path}/socket"
        async with serving(server={"listen": address}) as (llm, _, _):
            job = Job(
                address=address,
                server_pid=os.getpid(),
                method="stream",
                num_streams=3,
                seconds=0.05,
                hold_pid=llm.core.pid,
                settle_seconds=0.01,
            )
            result = await run_job(job)
            await until(lambda: llm.num_live == 0)
            assert await llm.core.call("reset_prefix_cache") == [1], "the core goes on"
            return result

    result = run(main)
    assert result.num_tokens > 0
    assert result.seconds >= 0.05


@pytest.mark.parametrize("method", ["stream", "attach"])
def test_a_job_whose_streams_end_says_why(tmp_path, method):
    async def main():
        address = f"unix:{tmp_path}/socket"
        async with serving(server={"listen": address}, max_model_len=16, num_kv_blocks=64):
            job = Job(address=address, server_pid=os.getpid(), method=method, num_streams=2, num_tokens=100)
            with pytest.raises(RuntimeError, match="streams ended early: OK"):
                await run_job(job)

    run(main)


def test_a_child_that_ends_leaves_its_last_words():
    with Child("async_engine.bench.load") as child, pytest.raises(StartupError, match=r"Error: .*malformed") as caught:
        child.ask("no JSON")
    assert "\n" not in str(caught.value)
    child.stop()


def test_the_command_prints_one_line_of_json(capsys):
    assert cli.main(["bench", "null", "--json", *TINY]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    report = json.loads(line)
    assert report["core_us_per_request_step"].keys() == {"1", "32", "256", "1024"}
    assert {depth: len(shares) for depth, shares in report["device_busy"].items()} == {"1": 4, "2": 4}
    assert report["front_us_per_token"].keys() == {
        "generate_stream",
        "generate_stream_logprobs",
        "attach",
        "attach_text",
        "attach_logprobs",
        "bare_handler",
    }
    assert report["tokens_per_s"].keys() == {"generate_stream", "attach"}
    assert {"generate_stream", "attach"} <= report["latency_ms"].keys()
    assert all(figures.keys() == {"p50", "p99"} for figures in report["latency_ms"].values())
    assert report["options"]["streams"] == 4
    table = bench_null.format_report(report)
    assert "generate_stream / bare_handler: " in table
    assert children(os.getpid()) == []


def test_a_failure_leaves_nothing_running(monkeypatch):
    seen = []

    def fail(*_):
        seen.extend(children(os.getpid()))
        raise ZeroDivisionError

    monkeypatch.setattr(bench_null, "measure_core", fail)
    with pytest.raises(ZeroDivisionError):
        bench_null.measure(NullBenchOptions())
    assert len(seen) == 4
    assert children(os.getpid()) == []


def test_ctrl_c_leaves_nothing_running():
    command = [sys.executable, "-m", "async_engine.cli", "bench", "null", "--steps", "8192"]
    bench = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)

    async def all_started():
        await until(lambda: len(children(bench.pid)) == 4)
        servers = children(bench.pid)
        await until(lambda: sum(len(children(pid)) for pid in servers) == 2)
        return [*servers, *(core for pid in servers for core in children(pid))]

    processes = run(all_started)
    bench.send_signal(signal.SIGINT)
    _, errors = bench.communicate(timeout=60)
    assert bench.returncode == 130
    assert errors == b""
    assert not any(is_alive(pid) for pid in processes)
