"""Profiles: recorded on demand, one at a time, into files; whoever leaves leaves nothing."""

import contextlib
import marshal
import os
import shutil
import signal

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from async_engine import cli, profiler
from protos.compat import smg_common_pb2 as common
from protos.compat import vllm_engine_pb2_grpc
from protos.python_profile import PythonProfile
from protos.tailrace.v1 import admin_pb2 as pb
from protos.tailrace.v1 import admin_pb2_grpc
from tests.e2e.serving import run, serving, stream_request, until
from tests.e2e.test_generation import ENDLESS, assert_works, details_of, failure


@contextlib.asynccontextmanager
async def operated(directory, **options):
    """(AsyncLLM, callers' stub, operators' stub, gateways' stub)."""
    server = {"admin_listen": "127.0.0.1:0", "services": "vllm-engine", "profile_dir": str(directory)}
    async with (
        serving(server=server, **options) as (llm, stub, channel),
        grpc.aio.insecure_channel(channel.admin_address) as operators,
    ):
        yield llm, stub, admin_pb2_grpc.AdminServiceStub(operators), vllm_engine_pb2_grpc.VllmEngineStub(channel)


def request(seconds):
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return pb.ProfileRequest(duration=duration)


def functions(path):
    """(file, name) of the functions in a profile."""
    return {(file.rpartition("/")[2], name) for file, _, name in marshal.loads(path.read_bytes())}


async def is_recording(admin):
    error = await failure(admin.Profile(request(0.01)))
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert details_of(error)["ErrorInfo"].reason == "BUSY"


def test_front_end_and_cores_are_recorded_and_the_files_are_told(tmp_path):
    async def main():
        async with operated(tmp_path, data_parallel_size=2) as (_, stub, admin, _):
            calls = [stub.GenerateStream(stream_request("x", ENDLESS)) for _ in range(4)]
            for call in calls:
                await anext(aiter(call))
            answer = await admin.Profile(request(0.3))
            for call in calls:
                call.cancel()
            return {file.path.rpartition("-")[2]: file for file in answer.files}

    files = run(main)
    assert files.keys() == {"frontend.pstats", "core0.core.pstats", "core1.core.pstats"}
    assert {path.name: path.stat().st_size for path in tmp_path.iterdir()} == {
        file.path.rpartition("/")[2]: file.size_bytes for file in files.values()
    }
    found = {name.rpartition("-")[2]: functions(tmp_path / name) for name in os.listdir(tmp_path)}
    assert ("output_processor.py", "process") in found["frontend.pstats"]
    for core in ("core0.core.pstats", "core1.core.pstats"):
        assert {("scheduler.py", "schedule"), ("null.py", "execute")} <= found[core]
        assert ("output_processor.py", "process") not in found[core]


class SeenProfile(PythonProfile):
    """How many there were."""

    begun = 0

    def __init__(self):
        super().__init__()
        SeenProfile.begun += 1


def test_one_at_a_time_and_one_whose_client_leaves_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(profiler, "PythonProfile", SeenProfile)

    async def main():
        async with operated(tmp_path) as (llm, stub, admin, _):
            before = SeenProfile.begun
            first = admin.Profile(request(50))
            await until(lambda: SeenProfile.begun > before)
            await is_recording(admin)
            first.cancel()
            while (answer := await unless_busy(admin)) is None:
                pass
            await assert_works(llm, stub)
            return len(answer.files)

    assert (run(main), len(list(tmp_path.iterdir()))) == (2, 2)


async def unless_busy(admin):
    try:
        return await admin.Profile(request(0.01))
    except grpc.aio.AioRpcError:
        return None


def test_gateways_start_and_stop_one(tmp_path):
    async def main():
        async with operated(tmp_path) as (_, _, admin, gateway):
            start, stop = common.StartProfileRequest(), common.StopProfileRequest()
            answers = [await gateway.StopProfile(stop), await gateway.StartProfile(start)]
            await is_recording(admin)
            answers += [await gateway.StartProfile(start), await gateway.StopProfile(stop)]
            answers += [await gateway.StopProfile(stop)]
            refused = await failure(gateway.StartProfile(common.StartProfileRequest(output_dir="/tmp")))
            return [(answer.success, answer.message) for answer in answers], refused.code()

    answers, refused = run(main)
    assert [success for success, _ in answers] == [False, True, False, True, False]
    assert sorted(answers[3][1].split(", ")) == sorted(map(str, tmp_path.iterdir()))
    assert len(list(tmp_path.iterdir())) == 2
    assert refused is grpc.StatusCode.UNIMPLEMENTED


def test_one_that_nobody_stops_ends_by_itself_and_its_files_are_there(tmp_path, monkeypatch):
    monkeypatch.setattr(profiler, "MAX_SECONDS", 0.05)

    async def main():
        async with operated(tmp_path) as (_, _, admin, gateway):
            assert (await gateway.StartProfile(common.StartProfileRequest())).success
            await until(lambda: len(list(tmp_path.iterdir())) == 2)
            await admin.Profile(request(0.01))
            return await gateway.StopProfile(common.StopProfileRequest())

    assert run(main).success


def test_a_server_that_stops_waits_for_none(tmp_path):
    async def main():
        async with operated(tmp_path) as (_, _, _, gateway):
            assert (await gateway.StartProfile(common.StartProfileRequest())).success

    run(main)
    assert not list(tmp_path.iterdir())


def test_a_core_that_dies_takes_its_part_along_and_no_more(tmp_path):
    async def main():
        async with operated(tmp_path, data_parallel_size=2) as (llm, _, _, gateway):
            assert (await gateway.StartProfile(common.StartProfileRequest())).success
            os.kill(llm.cores.slots[0].core.pid, signal.SIGKILL)
            await until(lambda: llm.cores.num_restarts == 1 and llm.cores.slots[0].is_up)
            first = await gateway.StopProfile(common.StopProfileRequest())
            assert (await gateway.StartProfile(common.StartProfileRequest())).success
            return first.message, (await gateway.StopProfile(common.StopProfileRequest())).message

    died, after = run(main)
    assert sorted(path.rpartition("-")[2] for path in died.split(", ")) == ["core1.core.pstats", "frontend.pstats"]
    assert after.count("core.pstats") == 2


@pytest.mark.parametrize("seconds", [-1, 0, 60.001, 10**9])
def test_a_duration_without_sense_is_refused(tmp_path, seconds):
    async def main():
        async with operated(tmp_path) as (_, _, admin, _):
            return (await failure(admin.Profile(request(seconds)))).code()

    assert run(main) is grpc.StatusCode.INVALID_ARGUMENT


def test_without_a_directory_there_are_none(tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()

    async def main():
        async with operated("") as (_, _, admin, gateway), operated(gone) as (_, _, other, _):
            shutil.rmtree(gone)
            errors = [await failure(stub.Profile(request(0.01))) for stub in (admin, other)]
            return errors, await gateway.StartProfile(common.StartProfileRequest())

    errors, answer = run(main)
    assert [error.code() for error in errors] == [grpc.StatusCode.FAILED_PRECONDITION] * 2
    assert [details_of(error)["ErrorInfo"].reason for error in errors] == ["WRONG_STATE"] * 2
    assert "--profile-dir" in errors[0].details()
    assert "No such file" in errors[1].details()
    assert not answer.success


def test_a_directory_that_is_none_is_told_at_the_start(tmp_path, capsys):
    assert cli.main(["serve", "null", "--listen", "127.0.0.1:0", "--profile-dir", str(tmp_path / "none")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"tailrace: --profile-dir: {tmp_path / 'none'} is no directory that can be written to"
