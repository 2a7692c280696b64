"""Operation: status, live requests, pause, resume, the prefix cache and drain, on an address of their own."""

import asyncio
import contextlib

import grpc
import pytest
from google.protobuf import duration_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from async_engine.engine_state import EngineState
from protos.tailrace.v1 import admin_pb2 as pb
from protos.tailrace.v1 import admin_pb2_grpc
from protos.tailrace.v1.generation_pb2 import GenerateRequest, SchedulingOptions
from tests.e2e.serving import run, serving, stream_request, until
from tests.e2e.test_generation import ENDLESS, assert_works, details_of, failure, kinds


@contextlib.asynccontextmanager
async def operated(**options):
    """(AsyncLLM, callers' stub, operators' stub, operators' channel)."""
    async with (
        serving(server={"admin_listen": "127.0.0.1:0"}, **options) as (llm, stub, channel),
        grpc.aio.insecure_channel(channel.admin_address) as operators,
    ):
        yield llm, stub, admin_pb2_grpc.AdminServiceStub(operators), operators


async def health(channel):
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


def test_states_have_the_numbers_of_the_proto():
    told = {name.removeprefix("ENGINE_STATE_"): number for name, number in pb.EngineState.items() if number}
    assert {state.name: state.value for state in EngineState} == told


def test_operators_have_an_address_of_their_own():
    async def main():
        async with serving() as (_, _, channel):
            assert not channel.admin_address
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await admin_pb2_grpc.AdminServiceStub(channel).GetStatus(pb.GetStatusRequest())
            return error.value.code()

    assert run(main) is grpc.StatusCode.UNIMPLEMENTED


def test_status_counts_what_was_done():
    async def main():
        async with operated(num_kv_blocks=100) as (llm, stub, admin, _):
            before = await admin.GetStatus(pb.GetStatusRequest())
            for _ in range(3):
                await stub.Generate(GenerateRequest(spec=stream_request("the same long prompt " * 3, 5).spec))
            await failure(stub.GenerateStream(stream_request("x" * 100_000)))
            await until(lambda: llm.stats.output_tokens == 15 and not llm.stats.running)
            return before, await admin.GetStatus(pb.GetStatusRequest())

    before, after = run(main)
    assert before.state == after.state == pb.ENGINE_STATE_SERVING
    assert not before.HasField("time_to_first_token")
    assert (after.model, after.output_tokens, after.running_sequences, after.live_requests) == ("null", 15, 0, 0)
    assert after.prompt_tokens == 3 * 64
    assert after.prefix_queries >= after.prefix_hits >= 2 * 48
    assert dict(after.finished_requests) == {"max_tokens": 3}
    assert after.kv_capacity_tokens == 99 * 16
    assert after.steps >= 15
    assert after.uptime.ToMilliseconds() > 0
    for told in (after.time_to_first_token, after.inter_token, after.end_to_end):
        assert 0 < told.p50.ToNanoseconds() <= told.p90.ToNanoseconds() <= told.p99.ToNanoseconds()
    assert after.end_to_end.p50.ToNanoseconds() > after.time_to_first_token.p50.ToNanoseconds()


def test_live_requests_are_told_with_where_they_are():
    async def main():
        async with operated(null_step_ms=1, max_num_seqs=1) as (llm, stub, admin, _):
            session = SchedulingOptions(session_id="s")
            first = stub.GenerateStream(stream_request("abc", ENDLESS, request_id="first", scheduling=session))
            messages = aiter(first)
            while (await anext(messages)).WhichOneof("event") != "delta":
                pass
            second = stub.GenerateStream(stream_request("x", ENDLESS, request_id="second", num_sequences=2))
            await until(lambda: llm.num_live == 2 and llm.stats.waiting)
            all_of_them = await admin.ListRequests(pb.ListRequestsRequest())
            one = await admin.ListRequests(pb.ListRequestsRequest(page_size=1))
            first.cancel()
            second.cancel()
            return all_of_them, one

    answer, one = run(main)
    first, second = answer.requests
    assert (first.request_id, first.caller, first.phase) == ("first", "session s", pb.REQUEST_PHASE_DECODE)
    assert (first.prompt_tokens, first.sequences) == (4, 1)
    assert first.output_tokens >= 1
    assert first.age.ToNanoseconds() > second.age.ToNanoseconds() > 0
    assert (second.request_id, second.phase, second.sequences) == ("second", pb.REQUEST_PHASE_QUEUED, 2)
    assert second.caller.startswith("peer ")
    assert ([each.request_id for each in one.requests], one.omitted) == (["first"], 1)


@pytest.mark.parametrize("freeze", [False, True])
def test_pause_holds_new_requests_until_resume(freeze):
    async def main():
        async with operated(null_step_ms=1) as (llm, stub, admin, operators):
            running = stub.GenerateStream(stream_request("x", 50))
            await anext(aiter(running))
            await admin.Pause(pb.PauseRequest(freeze=freeze))
            await until(lambda: llm.paused)
            waiting = stub.GenerateStream(stream_request("y", 3))
            await until(lambda: llm.num_live == 2)
            if not freeze:
                assert kinds([message async for message in running])[-1] == "summary"
            states = [(await admin.GetStatus(pb.GetStatusRequest())).state]
            while await health(operators) != "NOT_SERVING":
                pass
            told = (await admin.ListRequests(pb.ListRequestsRequest())).requests
            await admin.Resume(pb.ResumeRequest())
            for call in [running] * freeze + [waiting]:
                assert kinds([message async for message in call])[-1] == "summary"
            states.append((await admin.GetStatus(pb.GetStatusRequest())).state)
            while await health(operators) != "SERVING":
                pass
            await assert_works(llm, stub)
            return states, [each.phase for each in told]

    states, phases = run(main)
    assert states == [pb.ENGINE_STATE_PAUSED, pb.ENGINE_STATE_SERVING]
    assert len(phases) == 1 + freeze
    assert phases[-1] == pb.REQUEST_PHASE_QUEUED


def test_a_pause_outlives_the_core_and_totals_do_too():
    async def main():
        async with operated() as (llm, stub, admin, _):
            await stub.Generate(GenerateRequest(spec=stream_request("x", 9).spec))
            await until(lambda: llm.stats.output_tokens == 9)
            await admin.Pause(pb.PauseRequest())
            pid = llm.core.pid
            llm.core._process.kill()
            await until(lambda: not llm.recovering and llm.core.pid != pid)
            waiting = stub.GenerateStream(stream_request("y", 3))
            await until(lambda: llm.stats.waiting)
            status = await admin.GetStatus(pb.GetStatusRequest())
            await admin.Resume(pb.ResumeRequest())
            assert kinds([message async for message in waiting])[-1] == "summary"
            await until(lambda: llm.stats.output_tokens == 12)
            return status

    status = run(main)
    assert (status.state, status.core_restarts) == (pb.ENGINE_STATE_PAUSED, 1)


def test_the_prefix_cache_is_reset_unless_it_is_in_use():
    async def main():
        async with operated(null_step_ms=1) as (llm, stub, admin, _):
            spec = stream_request("a prompt of some length, to fill a block or two", 2).spec

            async def cached():
                return (await stub.Generate(GenerateRequest(spec=spec))).summary.cached_tokens

            found = [await cached(), await cached()]
            await until(lambda: not llm.stats.running)
            await admin.ResetPrefixCache(pb.ResetPrefixCacheRequest())
            found.append(await cached())
            running = stub.GenerateStream(stream_request("x" * 40, 200))
            await anext(aiter(running))
            error = await failure(admin.ResetPrefixCache(pb.ResetPrefixCacheRequest()))
            await admin.ResetPrefixCache(pb.ResetPrefixCacheRequest(restart_running=True))
            found.append(await cached())
            assert kinds([message async for message in running])[-1] == "summary"
            return found, error

    found, error = run(main)
    assert found == [0, 32, 0, 0]
    assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert details_of(error)["ErrorInfo"].reason == "BUSY"


def test_drain_lets_streams_finish_and_cuts_what_is_left():
    async def main():
        async with operated(null_step_ms=1) as (_, stub, admin, operators):
            short = stub.GenerateStream(stream_request("x", 30))
            endless = stub.GenerateStream(stream_request("x", ENDLESS))
            for call in (short, endless):
                await anext(aiter(call))
            limit = duration_pb2.Duration(nanos=400_000_000)
            draining = asyncio.ensure_future(admin.Drain(pb.DrainRequest(time_limit=limit)))
            assert kinds([message async for message in short])[-1] == "summary"
            refused = await failure(stub.GenerateStream(stream_request("y")))
            cut = await failure(endless)
            answer = await draining
            status = await admin.GetStatus(pb.GetStatusRequest())
            return refused.code(), cut.code(), answer.cut_requests, status.state, await health(operators)

    unavailable = grpc.StatusCode.UNAVAILABLE
    assert run(main) == (unavailable, unavailable, 1, pb.ENGINE_STATE_DRAINING, "NOT_SERVING")


@pytest.mark.parametrize("seconds", [-1, 10**9])
def test_a_drain_without_sense_is_refused(seconds):
    async def main():
        async with operated() as (llm, stub, admin, _):
            limit = duration_pb2.Duration(seconds=seconds)
            error = await failure(admin.Drain(pb.DrainRequest(time_limit=limit)))
            await assert_works(llm, stub)
            return error.code()

    assert run(main) is grpc.StatusCode.INVALID_ARGUMENT
