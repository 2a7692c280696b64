"""Adapters from the RPC to the tokens: loaded, asked for, unloaded, and there again when a core has died."""

import asyncio
import contextlib
import functools
import os
import signal
import urllib.request

import grpc
import pytest
from google.rpc import status_pb2

from async_engine.async_llm import AsyncLLM
from async_engine.llm import LLM
from async_engine.metrics import Metrics
from async_engine.outputs import Delta
from async_engine.request import GenerationRequest
from protos.errors import AdapterNotFoundError, StartupError, UnavailableError
from protos.messages import Adapters, ControlReply
from protos.params import SamplingParams
from protos.tailrace.v1 import admin_pb2 as pb
from protos.tailrace.v1 import admin_pb2_grpc, generation_pb2, model_pb2, model_pb2_grpc
from protos.tailrace.v1.generation_pb2 import GenerateRequest
from tests.adapter_files import save_adapter
from tests.e2e.serving import ServerProcess, run, serving, stream_request, until
from tests.e2e.test_admin_service import operated
from tests.e2e.test_core_recovery import collect, mixed_specs, with_and_without_kills
from tests.e2e.test_front_ends import Served, free_port
from tests.e2e.test_generation import ENDLESS, assert_works, details_of, failure
from tests.e2e.test_kv_events import Follower
from tests.fakes import make_adapter

SHAPES = {"model.layers.0.self_attn.q_proj": (8, 8)}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Directories of three adapters, by their names."""
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate("abc"):
        save_adapter(root / name, SHAPES, seed=seed)
    return {name: str(root / name) for name in "abc"}


def load(name, path):
    return pb.LoadAdapterRequest(name=name, path=path)


def unload(name):
    return pb.UnloadAdapterRequest(name=name)


async def names(admin):
    listed = await admin.ListAdapters(pb.ListAdaptersRequest())
    return {adapter.name: adapter.unloading for adapter in listed.adapters}


async def say(stub, text, adapter="", max_tokens=8, **fields):
    spec = stream_request(text, max_tokens, adapter=adapter, **fields).spec
    return await stub.Generate(GenerateRequest(spec=spec))


async def text_of(stub, text, adapter="", max_tokens=8, **fields):
    fields.setdefault("sampling", generation_pb2.SamplingOptions(seed=1))
    answer = await say(stub, text, adapter, max_tokens, **fields)
    return answer.output.sequences[0].text


# Loading and asking ---------------------------------------------------------------------------


def test_an_adapter_is_loaded_told_asked_for_and_unloaded(paths):
    async def main():
        async with (
            serving(server={"admin_listen": "127.0.0.1:0"}, max_adapters=5) as (llm, stub, channel),
            grpc.aio.insecure_channel(channel.admin_address) as operators,
        ):
            models, admin = model_pb2_grpc.ModelServiceStub(channel), admin_pb2_grpc.AdminServiceStub(operators)
            metrics = Metrics(llm)
            told = (await admin.LoadAdapter(load("b", paths["b"]))).adapter
            await admin.LoadAdapter(load("a", paths["a"]))
            listed = await admin.ListAdapters(pb.ListAdaptersRequest())
            (model,) = (await models.ListModels(model_pb2.ListModelsRequest())).models
            count = metrics.registry.get_sample_value("tailrace_adapters")
            texts = [await text_of(stub, "hi", adapter) for adapter in ("", "a", "b", "a", "")]
            await admin.UnloadAdapter(unload("a"))
            error = await failure(say(stub, "hi", "a"))
            texts.append(await text_of(stub, "hi", "b"))
            return told, listed, list(model.adapters), count, texts, error, await names(admin)

    told, listed, discovered, count, texts, error, left = run(main)
    assert (told.name, told.path, told.rank, told.size_bytes) == ("b", paths["b"], 4, 256)
    assert len(told.digest) == 32
    assert [adapter.name for adapter in listed.adapters] == discovered == ["a", "b"]
    assert listed.adapters[1] == told
    assert (listed.max_adapters, count) == (5, 2)
    base, first, second, *again = texts
    assert len({base, first, second}) == 3
    assert again == [first, base, second]
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert left == {"b": False}


def test_a_model_may_be_named_by_its_adapter(paths):
    async def main():
        async with operated(adapters=f"a={paths['a']}") as (_, stub, admin, _):
            by_adapter, by_model = await say(stub, "hi", "a"), await say(stub, "hi", model="a")
            both = await say(stub, "hi", "a", model="null")
            unknown = await failure(say(stub, "hi", model="b"))
            taken = await failure(admin.LoadAdapter(load("null", paths["a"])))
            return [answer.started.effective for answer in (by_adapter, by_model, both)], unknown, taken

    effective, unknown, taken = run(main)
    assert [(spec.model, spec.adapter) for spec in effective] == [("null", "a")] * 3
    assert details_of(unknown)["ErrorInfo"].reason == "MODEL_NOT_FOUND"
    assert taken.code() is grpc.StatusCode.ALREADY_EXISTS


def test_what_may_not_be_loaded_has_its_status_and_leaves_nothing(paths, tmp_path):
    save_adapter(tmp_path / "dora", SHAPES, use_dora=True)
    save_adapter(tmp_path / "large", SHAPES, rank=5)
    invalid = {
        ("", paths["b"]): "name",
        ("x" * 129, paths["b"]): "name",
        ("new\nline", paths["b"]): "name",
        ("b", ""): "path",
        ("b", "nul\0"): "path",
        ("b", "x" * 5000): "path",
        ("b", str(tmp_path / "nowhere")): "path",
        ("b", str(tmp_path / "dora")): "path",
        ("b", str(tmp_path / "large")): "path",
        ("b", __file__): "path",
    }

    async def main():
        async with operated(max_adapters=1, max_adapter_rank=4) as (llm, stub, admin, _):
            errors = {each: await failure(admin.LoadAdapter(load(*each))) for each in invalid}
            await admin.LoadAdapter(load("a", paths["a"]))
            again = await admin.LoadAdapter(load("a", paths["a"]))
            others = [await failure(admin.LoadAdapter(load(*each))) for each in (("a", paths["b"]), ("b", paths["b"]))]
            unknown = await failure(admin.UnloadAdapter(unload("b")))
            await assert_works(llm, stub)
            return errors, again, others, unknown, await names(admin)

    errors, again, (exists, full), unknown, left = run(main)
    for each, error in errors.items():
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, each
        assert "\n" not in error.details()
        (violation,) = details_of(error)["BadRequest"].field_violations
        assert violation.field == invalid[each]
    assert again.adapter.name == "a"
    assert (exists.code(), details_of(exists)["ErrorInfo"].reason) == (
        grpc.StatusCode.ALREADY_EXISTS,
        "ADAPTER_EXISTS",
    )
    assert (full.code(), details_of(full)["ErrorInfo"].reason) == (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "ADAPTER_LIMIT",
    )
    assert unknown.code() is grpc.StatusCode.NOT_FOUND
    assert details_of(unknown)["BadRequest"].field_violations[0].field == "name"
    assert left == {"a": False}


@pytest.mark.parametrize("name", ["nobody", "x" * 100_000, "new\nline"])
def test_a_request_for_an_adapter_that_is_not_there_is_not_found(name):
    async def main():
        async with operated() as (llm, stub, _, _):
            errors = [await failure(say(stub, "hi", name))]
            errors.append(await failure(stub.GenerateStream(stream_request("hi", adapter=name))))
            call = stub.Attach()
            await call.write(
                generation_pb2.AttachRequest(submit=stream_request("hi", adapter=name, request_id="x").spec)
            )
            await call.done_writing()
            events = [event async for frame in call for event in frame.events]
            await assert_works(llm, stub)
            return errors, [status_pb2.Status.FromString(event.status).code for event in events]

    errors, attached = run(main)
    for error in errors:
        assert error.code() is grpc.StatusCode.NOT_FOUND
        details = details_of(error)
        assert details["ErrorInfo"].reason == "ADAPTER_NOT_FOUND"
        assert [violation.field for violation in details["BadRequest"].field_violations] == ["adapter"]
    assert attached == [grpc.StatusCode.NOT_FOUND.value[0]]


def test_every_way_to_ask_takes_an_adapter(paths):
    async def main():
        async with operated(adapters=f"a={paths['a']}") as (_, stub, _, _):
            seeded = {"sampling": generation_pb2.SamplingOptions(seed=1)}
            expected = await text_of(stub, "hi", "a", 12)
            spec = stream_request("hi", 12, adapter="a", **seeded).spec
            streamed, _ = await collect(stub, spec)
            several = await say(stub, "hi", "a", 12, num_sequences=2, **seeded)
            resumed = generation_pb2.TokenIds(ids=expected.encode()[:5])
            rest = await text_of(stub, "hi", "a", 12, resume_from=resumed)
            call = stub.Attach()
            spec.request_id = "x"
            await call.write(generation_pb2.AttachRequest(submit=spec))
            await call.done_writing()
            deltas = [event.delta async for frame in call for event in frame.events]
            attached = [sequence.text for delta in deltas for sequence in delta.sequences]
            return expected, streamed, several, rest, "".join(attached)

    expected, streamed, several, rest, attached = run(main)
    assert streamed[0][1] == several.output.sequences[0].text == expected
    assert expected[5:] == rest
    assert attached == expected


def test_the_library_takes_an_adapter(paths):
    params = SamplingParams(max_tokens=6, seed=1)
    with LLM("null", progress=False) as llm:
        base, beams = llm.generate("hi", params)[0].text, llm.beam_search("hi", width=2, max_tokens=4)
        llm.load_adapter("a", paths["a"])
        adapted = llm.generate("hi", params, adapter="a")[0].text
        assert llm.generate("hi", params)[0].text == base != adapted
        assert llm.beam_search("hi", width=2, max_tokens=4, adapter="a") != beams
        turn = [{"role": "user", "content": "hi"}]
        assert llm.chat(turn, params, adapter="a")[0].text != llm.chat(turn, params)[0].text
        llm.score("hello", adapter="a")
        llm.unload_adapter("a")
        for call in (llm.generate, llm.score, llm.beam_search):
            with pytest.raises(AdapterNotFoundError):
                call("hi", adapter="a")


# Unloading ------------------------------------------------------------------------------------


async def begun(stub, text, max_tokens, **fields):
    """A stream of which something has come."""
    call = stub.GenerateStream(stream_request(text, max_tokens, **fields))
    messages = aiter(call)
    while (await anext(messages)).WhichOneof("event") != "delta":
        pass
    return call, messages


def test_unloading_refuses_what_is_new_and_waits_for_what_runs_and_waits(paths):
    async def main():
        async with operated(adapters=f"a={paths['a']}", max_num_seqs=1, null_step_ms=1) as (llm, stub, admin, _):
            _, running = await begun(stub, "x", 400, adapter="a")
            waiting = asyncio.create_task(say(stub, "y", "a"))
            await until(lambda: len(llm.output_processor.sequences) == 2)
            live = (await admin.ListRequests(pb.ListRequestsRequest())).requests
            unloading = asyncio.ensure_future(admin.UnloadAdapter(unload("a")))
            while not (await names(admin))["a"]:
                pass
            refused = await failure(say(stub, "z", "a"))
            reload = await failure(admin.LoadAdapter(load("a", paths["a"])))
            assert not unloading.done()
            ends = [[message async for message in running][-1].WhichOneof("event")]
            assert not unloading.done()
            ends.append((await waiting).summary.output_tokens)
            await unloading
            await admin.LoadAdapter(load("b", paths["b"]))
            return [each.adapter for each in live], refused, reload, ends, await names(admin)

    live, refused, reload, ends, left = run(main)
    assert live == ["a", "a"]
    assert refused.code() is grpc.StatusCode.NOT_FOUND
    assert (reload.code(), details_of(reload)["ErrorInfo"].reason) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        "ADAPTER_LEAVING",
    )
    assert ends == ["summary", 8]
    assert left == {"b": False}


def test_a_client_that_leaves_undoes_no_unloading_even_if_the_core_then_dies(paths):
    async def main():
        async with operated(adapters=f"a={paths['a']}", null_step_ms=1) as (llm, stub, admin, _):
            call, _ = await begun(stub, "x", ENDLESS, adapter="a")
            leaving = asyncio.ensure_future(admin.UnloadAdapter(unload("a")))
            while not (await names(admin))["a"]:
                pass
            leaving.cancel()
            refused = await failure(say(stub, "z", "a"))
            os.kill(llm.core.pid, signal.SIGKILL)
            await until(lambda: llm.cores.num_restarts == 1 and not llm.recovering)
            told = await names(admin)
            call.cancel()
            while await names(admin):
                pass
            await assert_works(llm, stub)
            return refused.code(), told

    assert run(main) == (grpc.StatusCode.NOT_FOUND, {"a": True})


def test_who_calls_again_waits_too(paths):
    async def main():
        async with operated(adapters=f"a={paths['a']}", null_step_ms=1) as (_, stub, admin, _):
            call, _ = await begun(stub, "x", ENDLESS, adapter="a")
            calls = [asyncio.ensure_future(admin.UnloadAdapter(unload("a"))) for _ in range(3)]
            while not (await names(admin))["a"]:
                pass
            calls.append(asyncio.ensure_future(admin.UnloadAdapter(unload("a"))))
            await names(admin)
            assert not any(each.done() for each in calls)
            call.cancel()
            await asyncio.gather(*calls)
            return await names(admin)

    assert run(main) == {}


def test_closing_the_engine_ends_what_waits_for_it(paths):
    async def main():
        async with operated(adapters=f"a={paths['a']}") as (llm, _, _, _):
            os.kill(llm.core.pid, signal.SIGSTOP)
            unloading = asyncio.create_task(llm.cores.adapters.unload("a"))
            asking = asyncio.create_task(llm.cores.adapters.resolve(GenerationRequest(prompt="x", adapter="b"), ()))
            await until(lambda: len(llm.core._calls) == 2)
        return await asyncio.gather(unloading, asking, return_exceptions=True)

    unloading, asking = run(main)
    assert isinstance(unloading, UnavailableError)
    assert isinstance(asking, AdapterNotFoundError)


# What is shared -------------------------------------------------------------------------------


def test_prompts_with_other_adapters_share_nothing_and_watchers_are_told(paths):
    text = "a prompt of some length, to fill a block or two"

    async def main():
        async with operated(adapters=f"a={paths['a']},b={paths['b']}") as (_, stub, admin, _):
            found = [(await say(stub, text, name)).summary.cached_tokens for name in ("", "a", "b", "a", "")]
            await admin.UnloadAdapter(unload("a"))
            await admin.LoadAdapter(load("a", paths["c"]))
            found.append((await say(stub, text, "a")).summary.cached_tokens)
            follower = Follower(admin, snapshot=True)
            await follower.read()
            return found, sorted(block.adapter for block in follower.held[0].values())

    found, told = run(main)
    assert found == [0, 0, 0, 32, 32, 0]
    assert told == ["", "", "", "a", "a", "a", "a", "a", "a", "b", "b", "b"]


# Cores that die -------------------------------------------------------------------------------


def adapted_specs(count):
    specs = mixed_specs(count)
    for index, spec in enumerate(specs):
        spec.adapter = ("", "a", "b")[index % 3]
    return specs


def test_streams_with_adapters_go_on_when_the_core_is_killed(paths):
    async def main():
        adapters = f"a={paths['a']},b={paths['b']}"
        async with operated(adapters=adapters, null_step_ms=4, max_num_seqs=40) as (llm, stub, admin, _):
            return *await with_and_without_kills(llm, stub, adapted_specs(24), num_kills=3), await names(admin)

    undisturbed, disturbed, left = run(main)
    assert disturbed == undisturbed
    assert left == {"a": False, "b": False}


def test_requests_that_come_while_the_core_is_dead_find_their_adapter_in_the_next(paths):
    async def main():
        async with operated(adapters=f"a={paths['a']}") as (llm, stub, _, _):
            expected = await text_of(stub, "hi", "a")
            os.kill(llm.core.pid, signal.SIGKILL)
            await until(lambda: llm.recovering)
            refused = await failure(say(stub, "hi", "b"))
            return expected, await text_of(stub, "hi", "a"), refused.code()

    expected, found, code = run(main)
    assert found == expected
    assert code is grpc.StatusCode.NOT_FOUND


def test_unloading_outlives_the_core(paths):
    async def main():
        async with operated(adapters=f"a={paths['a']}", null_step_ms=2) as (llm, stub, admin, _):
            (spec,) = mixed_specs(1)
            spec.adapter = "a"
            expected = await collect(stub, spec)
            stream = asyncio.create_task(collect(stub, spec))
            await until(lambda: any(state.has_progressed for state in llm._live.values()))
            unloading = asyncio.ensure_future(admin.UnloadAdapter(unload("a")))
            while not (await names(admin))["a"]:
                pass
            os.kill(llm.core.pid, signal.SIGKILL)
            await until(lambda: llm.cores.num_restarts == 1 and not llm.recovering)
            refused = await failure(say(stub, "hi", "a"))
            told = await names(admin)
            found = await stream
            await unloading
            return expected, found, refused.code(), told, await names(admin)

    expected, found, code, told, left = run(main)
    assert found == expected
    assert code is grpc.StatusCode.NOT_FOUND
    assert (told, left) == ({"a": True}, {})


def test_unloading_while_the_core_is_dead_is_done_by_the_next(paths):
    async def main():
        async with operated(adapters=f"a={paths['a']}") as (llm, _, admin, _):
            os.kill(llm.core.pid, signal.SIGKILL)
            await until(lambda: llm.recovering)
            await admin.UnloadAdapter(unload("a"))
            return llm.recovering, llm.core.adapters

    assert run(main) == (False, Adapters())


def test_requests_that_come_back_one_at_a_time_find_what_is_being_unloaded(paths):
    """Those with which the core had just begun when it died."""

    async def main():
        async with operated(adapters=f"a={paths['a']}", null_step_ms=300) as (llm, stub, admin, _):
            await llm.pause(freeze=True)
            asked = [asyncio.create_task(say(stub, f"x{number}", "a", 2)) for number in range(3)]
            await until(lambda: len(llm.output_processor.sequences) == 3)
            await llm.resume()
            await until(lambda: len(llm.core.entering or ()) == 3)
            unloading = asyncio.ensure_future(admin.UnloadAdapter(unload("a")))
            await until(lambda: llm.cores.adapters.find("a") is None)
            os.kill(llm.core.pid, signal.SIGKILL)
            answers = await asyncio.gather(*asked)
            await unloading
            return [answer.summary.output_tokens for answer in answers], await names(admin)

    assert run(main) == ([2, 2, 2], {})


def test_an_adapter_that_the_next_core_cannot_load_fails_its_requests_and_no_others(paths):
    async def main():
        async with operated(adapters=f"a={paths['a']},b={paths['b']}", null_step_ms=2) as (llm, stub, admin, _):
            lost = stub.GenerateStream(stream_request("x", ENDLESS, adapter="a"))
            kept = asyncio.create_task(say(stub, "y", "b", 200))
            await until(lambda: sum(state.has_progressed for state in llm._live.values()) == 2)
            llm.core.adapters = Adapters([adapter for adapter in llm.core.adapters.loaded if adapter.name == "b"])
            os.kill(llm.core.pid, signal.SIGKILL)
            error = await failure(lost)
            assert (await kept).summary.output_tokens == 200
            return error, await names(admin)

    error, left = run(main)
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert details_of(error)["BadRequest"].field_violations[0].field == "adapter"
    assert left == {"b": False}


def test_nothing_is_loaded_while_a_core_is_replaced(paths):
    async def main():
        async with operated() as (llm, _, admin, _):
            os.kill(llm.core.pid, signal.SIGKILL)
            await until(lambda: llm.recovering)
            error = await failure(admin.LoadAdapter(load("a", paths["a"])))
            await until(lambda: not llm.recovering)
            await admin.LoadAdapter(load("a", paths["a"]))
            return error.code(), await names(admin)

    assert run(main) == (grpc.StatusCode.UNAVAILABLE, {"a": False})


# Several cores --------------------------------------------------------------------------------


def test_all_cores_have_an_adapter_or_none_has(paths):
    async def main():
        async with operated(data_parallel_size=2) as (llm, stub, admin, _):
            second = llm.cores.slots[1].core
            ask = second.load_adapter

            async def full(adapter):
                await until(lambda: llm.cores.slots[0].core.adapters.loaded)
                return ControlReply(0, [], error="no memory", reason="INVALID_ADAPTER")

            second.load_adapter = full
            error = await failure(admin.LoadAdapter(load("a", paths["a"])))
            left = await names(admin)
            second.load_adapter = ask
            await admin.LoadAdapter(load("a", paths["a"]))
            expected = await text_of(stub, "hi", "a")
            texts = await asyncio.gather(*(text_of(stub, "hi", "a") for _ in range(16)))
            await until(lambda: min(slot.stats.output_tokens for slot in llm.cores.slots) > 0)
            return error, left, expected, set(texts)

    error, left, expected, texts = run(main)
    assert (error.code(), error.details()) == (grpc.StatusCode.INVALID_ARGUMENT, "no memory")
    assert left == {}
    assert texts == {expected}


def test_a_client_that_leaves_undoes_no_loading(paths):
    async def main():
        async with operated(data_parallel_size=2) as (llm, stub, admin, _):
            second, go = llm.cores.slots[1].core, asyncio.Event()
            ask = second.load_adapter

            async def late(adapter):
                await go.wait()
                return await ask(adapter)

            second.load_adapter = late
            leaving = asyncio.ensure_future(admin.LoadAdapter(load("a", paths["a"])))
            await until(lambda: llm.cores.slots[0].core.adapters.loaded)
            half = await failure(say(stub, "hi", "a"))
            leaving.cancel()
            await asyncio.wait([leaving])
            go.set()
            await until(lambda: llm.cores.adapters.names == ["a"])
            return half.code(), (await say(stub, "hi", "a")).summary.output_tokens

    assert run(main) == (grpc.StatusCode.NOT_FOUND, 8)


def test_a_name_with_other_content_in_another_core_is_nobodys(paths):
    async def main():
        async with operated(data_parallel_size=2, adapters=f"a={paths['a']}") as (llm, _, _, _):
            llm.cores.slots[1].core.adapters = Adapters([make_adapter("a", 1)])
            return llm.cores.adapters.names

    assert run(main) == []


def test_the_router_knows_which_core_holds_a_prompt_with_its_adapter(paths):
    text = "a prompt of some length " * 20

    async def main():
        adapters = f"a={paths['a']},b={paths['b']}"
        async with operated(data_parallel_size=2, adapters=adapters, max_inter_token_gap=3600) as (llm, stub, _, _):
            router, asked = llm.cores._router, []
            route = router.route
            router.route = lambda hashes, *rest: asked.append(hashes) or route(hashes, *rest)
            found = [(await say(stub, text, name)).summary.cached_tokens for name in ["", "a", "b"] * 4]
            router.map.audit()
            held = [max(router.map.lookup(hashes)) for hashes in asked]
            return found, asked, held

    found, asked, held = run(main)
    assert found[:3] == [0, 0, 0]
    assert min(found[3:]) > 400
    assert held == [len(asked[0])] * 12, "the cores tell of what the router asks for"
    assert not set(asked[0]) & set(asked[1]) | set(asked[1]) & set(asked[2])
    assert asked[:3] == asked[3:6]


def test_a_core_that_comes_back_has_what_the_others_have(paths):
    async def main():
        async with operated(data_parallel_size=2, adapters=f"a={paths['a']}", null_step_ms=2) as (llm, stub, admin, _):
            specs = [stream_request(f"x{index}", 200, adapter="a", request_id=f"{index}").spec for index in range(8)]
            expected = [await text_of(stub, f"x{index}", "a", 200) for index in range(8)]
            for spec in specs:
                spec.sampling.seed = 1
            streams = [asyncio.create_task(collect(stub, spec)) for spec in specs]
            await until(lambda: sum(state.has_progressed for state in llm._live.values()) == 8)
            os.kill(llm.cores.slots[0].core.pid, signal.SIGKILL)
            found = [(await stream)[0][0][1] for stream in streams]
            await until(lambda: all(slot.is_up for slot in llm.cores.slots))
            for slot in llm.cores.slots:
                assert [adapter.name for adapter in slot.core.adapters.loaded] == ["a"]
            await admin.UnloadAdapter(unload("a"))
            return expected, found, await names(admin)

    expected, found, left = run(main)
    assert found == expected
    assert left == {}


# Several front ends ---------------------------------------------------------------------------


def test_what_one_front_end_loads_all_know_also_in_the_next_core(paths):
    metrics = f"127.0.0.1:{free_port()}"
    arguments = ("--admin-listen", "127.0.0.1:0", "--metrics-listen", metrics, "--adapters", f"b={paths['b']}")
    server = Served(*arguments, "--log-level", "error")
    with contextlib.closing(server):
        admin, stubs = server.admin(), server.stubs()

        def texts(name, max_tokens=8):
            spec = stream_request("hi", max_tokens, adapter=name).spec
            spec.sampling.seed = 1
            answers = [stub.Generate(GenerateRequest(spec=spec)) for stub in stubs]
            return [answer.output.sequences[0].text for answer in answers]

        def refused(name):
            codes = []
            for stub in stubs:
                with pytest.raises(grpc.RpcError) as error:
                    stub.Generate(GenerateRequest(spec=stream_request("hi", adapter=name).spec))
                codes.append(error.value.code())
            return codes

        assert refused("a") == [grpc.StatusCode.NOT_FOUND] * 2
        admin.LoadAdapter(load("a", paths["a"]))
        with urllib.request.urlopen(f"http://{metrics}/metrics") as answer:
            assert b"\ntailrace_adapters 2.0\n" in answer.read()
        first, second = texts("a", 60)
        assert first == second != texts("b", 60)[0]
        spec = stream_request("hi", 60, adapter="a").spec
        spec.sampling.seed = 1
        calls = [stub.GenerateStream(generation_pb2.GenerateStreamRequest(spec=spec)) for stub in stubs]
        streams = [iter(call) for call in calls]
        got = [[] for _ in streams]
        for parts, stream in zip(got, streams, strict=True):
            while not any(parts):
                parts += [sequence.text for sequence in next(stream).delta.sequences]
        os.kill(server.core, signal.SIGKILL)
        for parts, stream in zip(got, streams, strict=True):
            parts += [sequence.text for message in stream for sequence in message.delta.sequences]
        assert ["".join(parts) for parts in got] == [first, first]
        assert texts("a", 60) == [first, first]
        admin.UnloadAdapter(unload("a"))
        assert refused("a") == [grpc.StatusCode.NOT_FOUND] * 2


def test_a_core_of_others_has_its_adapters_for_all_that_come_and_after_its_death(paths, tmp_path):
    (tmp_path / "secret").write_bytes(b"a secret of this test")
    arguments = ("--listen", "127.0.0.1:0", "--secret-file", str(tmp_path / "secret"), "--null-step-ms", "1")
    request = GenerationRequest(prompt="hi", params=SamplingParams(max_tokens=300, seed=1), adapter="a")

    async def main():
        join = functools.partial(AsyncLLM.join, [core.address], b"a secret of this test")
        async with await join() as first, await join() as second:
            second.core._transport.pause_reading()  # it hears of it too late
            await first.load_adapter("a", paths["a"])
            asking = asyncio.create_task(text_from(second, request))
            await until(lambda: second.core._calls)
            second.core._transport.resume_reading()
            undisturbed = await asking
            streams = [asyncio.create_task(text_from(llm, request)) for llm in (first, second)]
            await until(lambda: all(any(s.has_progressed for s in llm._live.values()) for llm in (first, second)))
            os.kill(core.core_pid, signal.SIGKILL)
            disturbed = [await stream for stream in streams]
            await second.cores.adapters.unload("a")
            with pytest.raises(AdapterNotFoundError):
                await text_from(first, request)
            return undisturbed, disturbed

    with ServerProcess("null", *arguments, "--adapters", f"b={paths['b']}", command="core") as core:
        core.wait_ready()
        undisturbed, disturbed = run(main)
    assert disturbed == [undisturbed] * 2


async def text_from(llm, request):
    return "".join([event.text async for event in llm.generate(request) if isinstance(event, Delta)])


# Starting -------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["a", "=x", "a=", "a=x,a=y"])
def test_what_is_no_list_of_adapters_is_one_line_before_anything_starts(option):
    with ServerProcess("null", "--listen", "127.0.0.1:0", "--adapters", option) as server:
        with pytest.raises(RuntimeError, match=r"--adapters:? (must|'a')") as error:
            server.wait_ready()
        assert server.process.wait() == 2
    assert len(str(error.value).strip().splitlines()) == 1


def test_an_adapter_that_cannot_be_loaded_at_start_is_one_line_and_leaves_no_process(paths, tmp_path):
    async def main():
        with pytest.raises(StartupError) as error:
            async with operated(adapters=f"a={paths['a']},bad={tmp_path / 'nowhere'}"):
                pass
        return str(error.value)

    text = run(main)
    assert text.startswith("adapter bad: ")
    assert "\n" not in text


def test_a_server_over_cores_of_others_loads_none_at_start():
    arguments = ("--core", "127.0.0.1:1", "--secret-file", __file__, "--adapters", "a=x")
    with ServerProcess("null", *arguments) as server, pytest.raises(RuntimeError, match="who starts the core"):
        server.wait_ready()


def test_no_adapters_may_be_wanted(paths):
    async def main():
        async with operated(max_adapters=0) as (_, _, admin, _):
            return (await failure(admin.LoadAdapter(load("a", paths["a"])))).code()

    assert run(main) is grpc.StatusCode.RESOURCE_EXHAUSTED
