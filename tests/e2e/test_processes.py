"""Processes and signals: how the server starts, ends and dies, with the command users run."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time

import grpc
import pytest

import async_engine  # noqa: F401
from async_engine.bench.load import process_cpu_seconds
from protos.tailrace.v1 import generation_pb2_grpc
from tests.e2e.serving import ROOT, ServerProcess, children, is_alive, stream_request

NULL = ("null", "--listen", "127.0.0.1:0")
ENDLESS = 30_000


@pytest.fixture(scope="module")
def shared_memory_before():
    return set(os.listdir("/dev/shm"))


def wait_gone(pids, seconds):
    """Waits until processes are gone; those still there after so long."""
    end = time.monotonic() + seconds
    while (left := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < end:
        select.select([], [], [], 0.02)
    return left


class Streams:
    """Streams of a client on threads, and how each ended."""

    def __init__(self, address, count, max_tokens=ENDLESS):
        self.channel = grpc.insecure_channel(address)
        stub = generation_pb2_grpc.GenerationServiceStub(self.channel)
        self.calls = [stub.GenerateStream(stream_request(f"{i}", max_tokens)) for i in range(count)]
        self.ends = [None] * count
        self._begun = [threading.Event() for _ in self.calls]
        self._threads = [threading.Thread(target=self._read, args=(i,)) for i in range(count)]
        for thread in self._threads:
            thread.start()
        for begun in self._begun:
            assert begun.wait(30)

    def _read(self, index):
        last = None
        try:
            for message in self.calls[index]:
                last = message.WhichOneof("event")
                if last == "delta":
                    self._begun[index].set()
            self.ends[index] = last
        except grpc.RpcError as error:
            self.ends[index] = error.code()

    def join(self):
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()
        self.channel.close()
        return self.ends


def test_the_ready_line_says_where_and_what():
    with ServerProcess(*NULL, "--max-model-len", "1000") as server:
        server.wait_ready()
        (line,) = server.lines
        for part in ("127.0.0.1:", "null, scripted tokens", "KV cache", "context 1000", " s"):
            assert part in line
        assert "weights" not in line
        assert server.stop() == 0


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["/no/such/model"], "no such file or directory"),
        (["null", "--max-num-seqs", "0"], "--max-num-seqs must be at least 1, not 0"),
        (["null", "--block-size", "12"], "--block-size must be a multiple of 8, not 12"),
        (["/no/such/model", "--listen", "256.0.0.1:1"], "cannot listen on 256.0.0.1:1: "),
        (["/no/such/model", "--listen", "127.0.0.1:999999"], "--listen: port must be 0-65535"),
        (["/no/such/model", "--listen", "127.0.0.1:-1"], "--listen: port must be 0-65535"),
        (["/no/such/model", "--listen", "somewhere"], "--listen must be HOST:PORT or unix:PATH, not 'somewhere'"),
        (["/no/such/model", "--listen", "a..b:1"], "--listen: no host can have the name of 'a..b:1'"),
        (["/no/such/model", "--listen", "unix:/no/such/socket"], "No such file or directory; choose another --listen"),
        (["/no/such/model", "--metrics-listen", ":65536"], "--metrics-listen: port must be 0-65535"),
        (["/no/such/model", "--metrics-listen", "unix:/tmp/x"], "--metrics-listen must be HOST:PORT, not"),
    ],
)
def test_a_start_that_fails_says_why_in_one_line_and_leaves_no_orphan(arguments, problem):
    with ServerProcess(*arguments) as server:
        _, errors = server.process.communicate(timeout=60)
    assert server.process.returncode == 2
    (line,) = errors.strip().splitlines()
    assert line.startswith("tailrace: ")
    assert problem in line


def test_a_core_that_cannot_load_the_model_reports_its_root_cause(tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + b"\x00" * 64)
    with ServerProcess(str(broken)) as server:
        _, errors = server.process.communicate(timeout=60)
    assert server.process.returncode == 2
    (line,) = errors.strip().splitlines()
    assert "broken.gguf" in line


def test_a_port_in_use_is_one_clear_line():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        # No model is looked for before that is known.
        with ServerProcess("/no/such/model", "--listen", address) as server:
            _, errors = server.process.communicate(timeout=60)
    assert server.process.returncode == 2
    assert errors == f"tailrace: cannot listen on {address}; is it in use? choose another --listen\n"


@pytest.mark.parametrize("listen", [":0", "[::1]:0", "unix:{}/socket"])
def test_addresses_that_are_served(listen, tmp_path):
    with ServerProcess("null", "--listen", listen.format(tmp_path)) as server:
        address = server.wait_ready().address
        assert address.startswith(listen.format(tmp_path).replace(":0", ":") if listen != ":0" else "0.0.0.0:")
        Streams(address, 1, max_tokens=3).join()
        assert server.stop() == 0


def test_sigterm_drains_then_aborts_and_every_process_is_gone():
    with ServerProcess(*NULL, "--null-step-ms", "2", "--drain-timeout", "1") as server:
        server.wait_ready()
        core = server.core_pid
        finishing = Streams(server.address, 2, max_tokens=100)
        endless = Streams(server.address, 2)
        server.process.send_signal(signal.SIGTERM)
        server.process.send_signal(signal.SIGTERM)  # managers repeat it: harmless
        start = time.monotonic()
        assert finishing.join() == ["summary"] * 2
        assert endless.join() == [grpc.StatusCode.UNAVAILABLE] * 2
        assert server.stop() == 0
        assert time.monotonic() - start < 11
        assert wait_gone([core], 10) == []


def test_sigint_twice_ends_at_once():
    with ServerProcess(*NULL, "--null-step-ms", "2", "--drain-timeout", "60") as server:
        server.wait_ready()
        streams = Streams(server.address, 1)
        server.process.send_signal(signal.SIGINT)
        assert wait_gone([server.process.pid], 0.3) == [server.process.pid]
        server.process.send_signal(signal.SIGINT)
        assert streams.join() == [grpc.StatusCode.UNAVAILABLE]
        _, errors = server.process.communicate(timeout=10)
        assert server.process.returncode == 0
        assert "INFO draining 1 requests, at most 60 s; Ctrl-C again to stop now\n" in errors


def test_a_signal_while_starting_stops_the_start():
    with ServerProcess(*NULL) as server:
        while not children(server.process.pid):
            select.select([], [], [], 0.005)
        core = server.core_pid
        server.process.send_signal(signal.SIGTERM)
        server.process.communicate(timeout=10)
        assert wait_gone([core], 10) == []


def test_a_json_log_has_one_object_per_line():
    with ServerProcess(*NULL, "--null-step-ms", "2", "--drain-timeout", "0.1", "--log-format", "json") as server:
        server.wait_ready()
        streams = Streams(server.address, 1)
        server.process.send_signal(signal.SIGTERM)
        streams.join()
        _, errors = server.process.communicate(timeout=10)
    draining, request = map(json.loads, errors.splitlines())
    assert draining["message"].startswith("draining 1 requests")
    assert request["finish"] == "error"
    assert all(line["level"] == "INFO" and line["time"].endswith("+00:00") for line in (draining, request))


def test_a_quiet_log():
    with ServerProcess(*NULL, "--log-level", "warning") as server:
        server.wait_ready()
        Streams(server.address, 1, max_tokens=3).join()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.communicate(timeout=10)[1] == ""


def test_the_death_of_the_core_fails_its_streams_as_unavailable_and_leaves_nothing(shared_memory_before):
    with ServerProcess(*NULL, "--null-step-ms", "2", "--max-core-restarts", "0") as server:
        server.wait_ready()
        core = server.core_pid
        streams = Streams(server.address, 4)
        os.kill(core, signal.SIGKILL)
        assert streams.join() == [grpc.StatusCode.UNAVAILABLE] * 4
        _, errors = server.process.communicate(timeout=10)
        assert server.process.returncode == 1
        assert "SIGKILL" in errors
    assert set(os.listdir("/dev/shm")) == shared_memory_before


def test_a_core_that_was_killed_is_replaced_and_nothing_is_left_of_either(shared_memory_before):
    with ServerProcess(*NULL, "--null-step-ms", "2") as server:
        server.wait_ready()
        first = server.core_pid
        streams = Streams(server.address, 4, max_tokens=2_000)
        os.kill(first, signal.SIGKILL)
        assert streams.join() == ["summary"] * 4
        second = server.core_pid
        assert second != first
        assert server.stop() == 0
        assert wait_gone([first, second], 10) == []
    assert set(os.listdir("/dev/shm")) == shared_memory_before


def test_the_core_dies_with_a_front_end_that_is_killed(shared_memory_before):
    with ServerProcess(*NULL, "--null-step-ms", "2") as server:
        server.wait_ready()
        core = server.core_pid
        Streams(server.address, 1, max_tokens=20).join()
        server.process.kill()
        assert wait_gone([core], 10) == []
    assert set(os.listdir("/dev/shm")) == shared_memory_before


def test_a_hung_core_does_not_keep_the_server_from_ending():
    with ServerProcess(*NULL) as server:
        server.wait_ready()
        core = server.core_pid
        os.kill(core, signal.SIGSTOP)
        assert server.stop() == 0
        assert wait_gone([core], 10) == []


def test_an_idle_server_uses_under_one_percent_of_a_cpu():
    with ServerProcess(*NULL) as server:
        server.wait_ready()
        Streams(server.address, 1, max_tokens=20).join()
        pids = [server.process.pid, server.core_pid]
        before, start = sum(map(process_cpu_seconds, pids)), time.monotonic()
        select.select([], [], [], 4)  # what is measured is doing nothing
        used = sum(map(process_cpu_seconds, pids)) - before
        assert used / (time.monotonic() - start) < 0.01
        server.stop()


def test_help_is_quick_and_loads_neither_grpc_nor_torch():
    code = (
        "import sys, async_engine.cli as cli\n"
        "try: cli.main(['serve', '--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit(any(name in sys.modules for name in ('grpc', 'torch', 'tokenizers')))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0
    assert "--max-num-batched-tokens" in result.stdout
