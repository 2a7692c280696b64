"""`--frontends 2`: two processes on one port, over one core."""

import contextlib
import os
import re
import signal
import socket
import threading
import time
import urllib.request
from pathlib import Path

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2, health_pb2_grpc

from async_engine import cli
from protos.compat import smg_common_pb2, vllm_engine_pb2_grpc
from protos.tailrace.v1 import admin_pb2, admin_pb2_grpc, generation_pb2_grpc
from protos.tailrace.v1 import generation_pb2 as pb
from tests.e2e.serving import ServerProcess, children
from tests.e2e.test_processes import wait_gone
from tests.test_safety import sockets

NULL = ("null", "--listen", "127.0.0.1:0", "--null-step-ms", "2", "--frontends", "2")
ENDLESS = 30_000
ESTABLISHED = "01"


def command_line(pid):
    return Path(f"/proc/{pid}/cmdline").read_text()


class Served:
    """A server of two front ends, and a channel to each."""

    def __init__(self, *arguments):
        self.process = ServerProcess(*NULL, *arguments).wait_ready()
        self.main = self.process.process.pid
        self.address = self.process.address
        self.port = int(self.address.rpartition(":")[2])
        self._stack = contextlib.ExitStack()
        self.admin_address = self.process.lines[0].split()[-1]

    @property
    def other(self):
        (pid,) = (pid for pid in children(self.main) if "async_engine.front_end" in command_line(pid))
        return pid

    @property
    def cores(self):
        return [pid for pid in children(self.main) if "core_proc.proc" in command_line(pid)]

    @property
    def core(self):
        (pid,) = self.cores
        return pid

    def num_connections(self, pid):
        ours = sockets(pid)
        tables = [Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6")]
        rows = [line.split() for table in tables for line in table.splitlines()[1:]]
        return sum(
            int(row[1].rpartition(":")[2], 16) == self.port and row[3] == ESTABLISHED and row[9] in ours for row in rows
        )

    def stubs(self):
        """One to each front end, the first one first."""
        return [generation_pb2_grpc.GenerationServiceStub(channel) for channel in self.channels()]

    def channels(self):
        """One to each front end, each a connection of its own."""
        found = {}
        for _ in range(200):
            before = {pid: self.num_connections(pid) for pid in (self.main, self.other)}
            channel = self._stack.enter_context(
                grpc.insecure_channel(self.address, [("grpc.use_local_subchannel_pool", 1)])
            )
            grpc.channel_ready_future(channel).result(30)
            for pid, count in before.items():
                if self.num_connections(pid) > count:
                    found.setdefault(pid, channel)
            if len(found) == 2:
                return [found[self.main], found[self.other]]
        raise AssertionError("all connections are on one front end")

    def admin(self):
        channel = self._stack.enter_context(grpc.insecure_channel(self.admin_address))
        return admin_pb2_grpc.AdminServiceStub(channel)

    def wait_logged(self, text):
        for line in self.process.process.stderr:
            if text in line:
                return
        raise AssertionError(f"never logged: {text}")

    def close(self):
        self._stack.close()
        self.process.__exit__()


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    options = ("--admin-listen", "127.0.0.1:0", "--metrics-listen", f"127.0.0.1:{(port := free_port())}")
    served = Served(
        *options, "--services", "vllm-engine", "--kv-events", "--profile-dir", str(tmp_path_factory.mktemp("profiles"))
    )
    served.metrics_url = f"http://127.0.0.1:{port}/metrics"
    yield served
    served.close()


def spec(number, max_tokens, **fields):
    return pb.GenerationSpec(
        text=f"prompt {number}",
        sampling=pb.SamplingOptions(seed=number),
        stop=pb.StopOptions(max_tokens=max_tokens),
        **fields,
    )


class Reader:
    """Reads a stream on a thread; goes on elsewhere where it was, as clients do, if it `resumes`."""

    def __init__(self, stub, spec, elsewhere=None):
        self.token_ids, self.end, self.num_resumed = [], None, 0
        self.begun = threading.Event()
        self._stub, self._spec, self._elsewhere = stub, spec, elsewhere
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self):
        try:
            for message in self._stub.GenerateStream(pb.GenerateStreamRequest(spec=self._spec)):
                for part in message.delta.sequences:
                    self.token_ids += part.token_ids
                    self.begun.set()
                if message.HasField("summary"):
                    self.end = "summary"
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE and self._elsewhere is not None:
                self.num_resumed += 1
                self._stub = self._elsewhere
                self._spec.resume_from.ids[:] = self.token_ids
                self._read()
            else:
                self.end = error.code()

    def wait_begun(self):
        assert self.begun.wait(30)
        return self

    def join(self):
        self.thread.join(30)
        assert not self.thread.is_alive()
        return self.end


def expected(stub, *args, **kwargs):
    reader = Reader(stub, spec(*args, **kwargs))
    assert reader.join() == "summary"
    return reader.token_ids


def scrape(server):
    with urllib.request.urlopen(server.metrics_url, timeout=30) as response:
        text = response.read().decode()
    return {name: float(value) for name, value in re.findall(r"^(tailrace\S+) (\S+)$", text, re.MULTILINE)}


def test_in_each_front_end_grpcs_poller_waits_for_its_turn_and_in_cores_nothing_does(server):
    for pid, count in ((server.main, 1), (server.other, 1), (server.core, 0)):
        policies = [os.sched_getscheduler(int(task.name)) for task in Path(f"/proc/{pid}/task").iterdir()]
        assert policies.count(os.SCHED_BATCH) == count
        assert os.sched_getscheduler(pid) == os.SCHED_OTHER


def finished(server):
    return scrape(server).get('tailrace_requests_finished_total{reason="max_tokens"}', 0.0)


def test_metrics_are_those_of_both_and_the_cores_count_once(server):
    first, second = server.stubs()
    before = scrape(server)
    readers = [Reader(stub, spec(number, 10)) for stub in (first, second) for number in range(3)]
    assert [reader.join() for reader in readers] == ["summary"] * 6
    endless = [
        Reader(stub, spec(9, ENDLESS, request_id=f"e{n}")).wait_begun() for n, stub in enumerate([first, second])
    ]
    after = scrape(server)
    assert after["tailrace_live_requests"] == 2
    for name, count in (
        ('tailrace_requests_finished_total{reason="max_tokens"}', 6),
        ("tailrace_request_output_tokens_count", 6),
        ("tailrace_request_output_tokens_sum", 60),
        ('tailrace_request_output_tokens_bucket{le="32.0"}', 6),
    ):
        assert after[name] - before.get(name, 0) == count, name
    first.Cancel(pb.CancelRequest(request_ids=["e0", "e1"]))
    for reader in endless:
        reader.join()
    # The core tells every 0.25 s, and both front ends alike.
    end = time.monotonic() + 20
    while (now := scrape(server))["tailrace_prompt_tokens_total"] != now["tailrace_request_prompt_tokens_sum"]:
        assert time.monotonic() < end, now


def test_cancel_reaches_requests_of_the_other_front_end(server):
    first, second = server.stubs()
    for near, far in ((first, second), (second, first)):
        reader = Reader(far, spec(1, ENDLESS, request_id="mine")).wait_begun()
        answer = near.Cancel(pb.CancelRequest(request_ids=["mine", "nobody's"]))
        assert list(answer.cancelled_request_ids) == ["mine"]
        assert reader.join() == "summary"
        assert len(reader.token_ids) < ENDLESS


def test_operators_see_and_pause_both(server):
    channels = server.channels()
    first, second = map(generation_pb2_grpc.GenerationServiceStub, channels)
    admin = server.admin()
    readers = [
        Reader(stub, spec(n, ENDLESS, request_id=f"r{n}")).wait_begun() for n, stub in enumerate((first, second))
    ]
    listed = admin.ListRequests(admin_pb2.ListRequestsRequest())
    assert [request.request_id for request in listed.requests] == ["r0", "r1"]
    assert listed.omitted == 0
    assert admin.ListRequests(admin_pb2.ListRequestsRequest(page_size=1)).omitted == 1
    status = admin.GetStatus(admin_pb2.GetStatusRequest())
    assert status.live_requests == 2
    health = [health_pb2_grpc.HealthStub(channel) for channel in channels]
    streams = [stub.Watch(health_pb2.HealthCheckRequest(), timeout=30) for stub in health]
    assert [next(stream).status for stream in streams] == [health_pb2.HealthCheckResponse.SERVING] * 2
    admin.Pause(admin_pb2.PauseRequest())
    assert [next(stream).status for stream in streams] == [health_pb2.HealthCheckResponse.NOT_SERVING] * 2
    admin.Resume(admin_pb2.ResumeRequest())
    assert [next(stream).status for stream in streams] == [health_pb2.HealthCheckResponse.SERVING] * 2
    for stream in streams:
        stream.cancel()
    second.Cancel(pb.CancelRequest(request_ids=["r0", "r1"]))
    assert [reader.join() for reader in readers] == ["summary"] * 2


def test_what_the_prefix_cache_holds_is_told_by_both(server):
    """Whoever's request brought it there, and whoever is asked."""
    stub, _ = server.stubs()
    told = [follow_events(channel) for channel in server.channels()] + [follow_watch(server.admin())]
    before = [next(each) for each in told]
    assert before[0] == before[1] == before[2]
    stub.Generate(pb.GenerateRequest(spec=pb.GenerationSpec(text="z" * 40, stop=pb.StopOptions(max_tokens=1))))
    after = [next(held for held in each if len(held) == len(before[0]) + 2) for each in told]
    assert after[0] == after[1] == after[2]
    server.admin().ResetPrefixCache(admin_pb2.ResetPrefixCacheRequest())
    for each in told:
        while next(each):
            pass
        each.close()


def test_a_profile_is_recorded_for_one_of_them_at_a_time(server):
    first, other = map(vllm_engine_pb2_grpc.VllmEngineStub, server.channels())
    start, stop = smg_common_pb2.StartProfileRequest(), smg_common_pb2.StopProfileRequest()
    assert other.StartProfile(start).success
    assert first.StartProfile(start).message == "a profile is being recorded by another front end"
    assert not first.StopProfile(stop).success
    assert "core0.core.pstats" in other.StopProfile(stop).message
    assert len(server.admin().Profile(admin_pb2.ProfileRequest(duration=Duration(nanos=10_000_000))).files) == 2


def follow_events(channel):
    """The blocks that a subscriber of VllmEngine takes to be there, after each batch with events."""
    call = vllm_engine_pb2_grpc.VllmEngineStub(channel).SubscribeKvEvents(smg_common_pb2.SubscribeKvEventsRequest())
    held = set()
    try:
        for batch in call:
            for event in batch.events:
                if event.HasField("cleared"):
                    held.clear()
                held.difference_update(event.removed.block_hashes)
                held.update(block.block_hash % (1 << 64) for block in event.stored.blocks)
            if batch.events:
                yield set(held)
    finally:
        call.cancel()


def follow_watch(admin):
    """The same of a watcher on the operators' side."""
    call, held = admin.WatchKvEvents(admin_pb2.WatchKvEventsRequest(snapshot=True)), set()
    try:
        for response in call:
            if response.cleared:
                held.clear()
            held.difference_update(response.removed_block_hashes)
            held.update(block.block_hash for block in response.stored_blocks)
            yield set(held)
    finally:
        call.cancel()


def test_streams_of_both_go_on_when_the_core_is_killed(server):
    stubs = server.stubs()
    wanted = [expected(stubs[0], number, 250) for number in range(2)]
    readers = [Reader(stub, spec(number, 250)).wait_begun() for stub in stubs for number in range(2)]
    first = server.core
    os.kill(first, signal.SIGKILL)
    assert [reader.join() for reader in readers] == ["summary"] * 4
    assert [reader.token_ids for reader in readers] == wanted * 2
    assert server.core != first


def test_front_end_that_is_killed_loses_its_own_streams_which_resume_and_is_replaced(server):
    first, second = server.stubs()
    wanted = expected(first, 3, 250)
    before = finished(server)
    ours, theirs = Reader(first, spec(3, 250)).wait_begun(), Reader(second, spec(3, 250), first).wait_begun()
    gone = server.other
    os.kill(gone, signal.SIGKILL)
    assert [ours.join(), theirs.join()] == ["summary"] * 2
    assert (ours.num_resumed, theirs.num_resumed) == (0, 1)
    assert ours.token_ids == theirs.token_ids == wanted
    server.wait_logged("front end 1 ended by signal SIGKILL")
    server.wait_logged("front end 1 serves again")
    assert server.other != gone
    assert finished(server) >= before + 2  # what it had counted is not lost with it
    for stub in server.stubs():
        assert expected(stub, 3, 250) == wanted


def test_front_end_that_comes_later_is_paused_as_all_are(server):
    admin = server.admin()
    admin.Pause(admin_pb2.PauseRequest())
    os.kill(server.other, signal.SIGKILL)
    server.wait_logged("front end 1 serves again")
    health = [health_pb2_grpc.HealthStub(channel) for channel in server.channels()]
    streams = [stub.Watch(health_pb2.HealthCheckRequest(), timeout=30) for stub in health]
    statuses = health_pb2.HealthCheckResponse
    for stream in streams:
        while next(stream).status != statuses.NOT_SERVING:  # it may have served for a moment
            pass
    admin.Resume(admin_pb2.ResumeRequest())
    assert [next(stream).status for stream in streams] == [statuses.SERVING] * 2
    for stream in streams:
        stream.cancel()


def test_second_server_on_the_port_is_refused(server, capsys):
    assert cli.main(["serve", "null", "--listen", server.address, "--frontends", "2"]) == 2
    line = f"tailrace: cannot listen on {server.address}; is it in use? choose another --listen\n"
    assert capsys.readouterr().err == line


def test_unix_socket_is_for_one_front_end(capsys):
    assert cli.main(["serve", "null", "--listen", "unix:/tmp/x", "--frontends", "2"]) == 2
    line = "tailrace: --frontends: a unix socket is for one; several need HOST:PORT in --listen\n"
    assert capsys.readouterr().err == line


def test_sigterm_drains_both_and_every_process_is_gone():
    served = Served("--drain-timeout", "1", "--data-parallel-size", "2")
    with contextlib.closing(served):
        stubs = served.stubs()
        # Any front end reaches any core, and one of two may go.
        wanted = expected(stubs[0], 4, 300)
        readers = [Reader(stub, spec(4, 300)).wait_begun() for stub in stubs for _ in range(4)]
        gone, kept = served.cores
        os.kill(gone, signal.SIGKILL)
        assert [reader.join() for reader in readers] == ["summary"] * 8
        assert all(reader.token_ids == wanted for reader in readers)
        pids = [kept, served.other]
        finishing = [Reader(stub, spec(1, 200)).wait_begun() for stub in stubs]
        endless = [Reader(stub, spec(2, ENDLESS)).wait_begun() for stub in stubs]
        os.kill(served.other, signal.SIGTERM)  # managers tell the whole group
        served.process.process.send_signal(signal.SIGTERM)
        assert [reader.join() for reader in finishing] == ["summary"] * 2
        assert [reader.join() for reader in endless] == [grpc.StatusCode.UNAVAILABLE] * 2
        assert served.process.stop() == 0
        assert wait_gone(pids, 10) == []


def test_all_die_with_the_first_front_end():
    served = Served()
    with contextlib.closing(served):
        pids = [served.core, served.other]
        os.kill(served.main, signal.SIGKILL)
        assert wait_gone(pids, 10) == []
