"""Whatever comes to the RPCs that watch and record has an answer or a refusal, and leaves nothing."""

import asyncio
import contextlib

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from async_engine import profiler
from protos.compat import smg_common_pb2, vllm_engine_pb2_grpc
from protos.messages import Adapters
from protos.tailrace.v1 import admin_pb2, admin_pb2_grpc
from tests.adapter_files import save_adapter
from tests.async_engine.any_message import messages_of
from tests.e2e.serving import serving, until

ANYTHING = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
REFUSALS = {"INVALID_ARGUMENT", "FAILED_PRECONDITION", "UNIMPLEMENTED", "RESOURCE_EXHAUSTED", "NOT_FOUND"}
REQUESTS = {
    "WatchKvEvents": admin_pb2.WatchKvEventsRequest,
    "Profile": admin_pb2.ProfileRequest,
    "LoadAdapter": admin_pb2.LoadAdapterRequest,
    "UnloadAdapter": admin_pb2.UnloadAdapterRequest,
    "SubscribeKvEvents": smg_common_pb2.SubscribeKvEventsRequest,
    "StartProfile": smg_common_pb2.StartProfileRequest,
}


class Served:
    """A server, and a way to call it from examples that are no coroutines."""

    def __init__(self, directory):
        self._runner = asyncio.Runner()
        self._stack = contextlib.AsyncExitStack()
        self._runner.run(self._start(directory))

    async def _start(self, directory):
        server = {"admin_listen": "127.0.0.1:0", "profile_dir": str(directory)}
        server |= {"services": "vllm-engine", "kv_events": True}
        self.llm, _, channel = await self._stack.enter_async_context(serving(server=server, data_parallel_size=2))
        operators = await self._stack.enter_async_context(grpc.aio.insecure_channel(channel.admin_address))
        self._stubs = [
            admin_pb2_grpc.AdminServiceStub(operators),
            vllm_engine_pb2_grpc.VllmEngineStub(channel),
        ]

    def call(self, name, request):
        """The first message that it brings; the status if it is refused."""

        async def first():
            (method,) = (getattr(stub, name) for stub in self._stubs if hasattr(stub, name))
            call = method(request, timeout=30)
            try:
                return await (call if isinstance(call, grpc.aio.UnaryUnaryCall) else anext(aiter(call)))
            except grpc.aio.AioRpcError as error:
                return error.code().name
            finally:
                call.cancel()

        return self._runner.run(first())

    def close(self):
        self._runner.run(until(lambda: not len(self.llm.cores.kv_watches)))
        self._runner.run(self._stack.aclose())
        self._runner.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profiler, "MAX_SECONDS", 0.02)
        served = Served(tmp_path_factory.mktemp("profiles"))
        yield served
        served.close()


@pytest.mark.parametrize("name", REQUESTS)
def test_any_request_is_answered_or_refused(served, name):
    @ANYTHING
    @given(messages_of(REQUESTS[name].DESCRIPTOR))
    def call(request):
        answer = served.call(name, request)
        assert not isinstance(answer, str) or answer in REFUSALS

    call()


@ANYTHING
@given(st.lists(st.sampled_from(["StartProfile", "StopProfile", "Profile"]), max_size=6))
def test_any_order_of_starts_and_stops_leaves_a_server_that_records(served, order):
    requests = {**REQUESTS, "StopProfile": smg_common_pb2.StopProfileRequest}
    for name in order:
        answer = served.call(name, requests[name]())
        assert not isinstance(answer, str) or answer in REFUSALS
    while served.call("StopProfile", smg_common_pb2.StopProfileRequest()).success:
        pass
    assert served.call("StartProfile", smg_common_pb2.StartProfileRequest()).success
    answer = served.call("StopProfile", smg_common_pb2.StopProfileRequest())
    assert answer.message.count("core.pstats") == 2


def test_any_order_of_loads_and_unloads_left_or_waited_for_leaves_what_was_asked_for_last(served, tmp_path):
    for seed in range(3):
        save_adapter(tmp_path / str(seed), {"model.layers.0.self_attn.q_proj": (8, 8)}, seed=seed)
    refusals = {*REFUSALS, "ALREADY_EXISTS", "CANCELLED"}

    @ANYTHING
    @given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(-1, 2), st.booleans()), max_size=8))
    def play(steps):
        async def one(name, content, leaves):
            stub = served._stubs[0]
            if content < 0:
                call = stub.UnloadAdapter(admin_pb2.UnloadAdapterRequest(name=name))
            else:
                call = stub.LoadAdapter(admin_pb2.LoadAdapterRequest(name=name, path=str(tmp_path / str(content))))
            if leaves:
                await asyncio.sleep(0)
                call.cancel()
            assert (await call.code()).name in {*refusals, "OK"}

        async def all_at_once():
            await asyncio.gather(*(one(*step) for step in steps))
            for name in "abc":
                await one(name, -1, False)
            cores = [slot.core for slot in served.llm.cores.slots]
            await until(lambda: all(core.adapters == Adapters() for core in cores))

        served._runner.run(all_at_once())

    play()


@pytest.mark.parametrize("name", ["WatchKvEvents", "SubscribeKvEvents"])
def test_hundreds_that_come_and_go_at_once_leave_nothing(served, name):
    async def come_and_go():
        (method,) = (getattr(stub, name) for stub in served._stubs if hasattr(stub, name))
        calls = [method(REQUESTS[name]()) for _ in range(300)]
        for number, call in enumerate(calls):
            if number % 3 == 0:
                await asyncio.sleep(0)
            call.cancel()
        await asyncio.gather(*(call.code() for call in calls))
        await until(lambda: not len(served.llm.cores.kv_watches))

    served._runner.run(come_and_go())
    assert not isinstance(served.call(name, REQUESTS[name]()), str)
