"""Several cores behind one server: both serve, prefixes meet, and the death of one shows in no stream."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from async_engine.core_group import start_cores
from async_engine.core_source import CoreSource, LocalCores, own_devices
from async_engine.engine_state import EngineState, engine_state
from async_engine.metrics import Metrics
from async_engine.request import GenerationRequest
from core_proc.connection import OWNER
from protos.config import EngineConfig, build
from protos.errors import RequestFailedError, StartupError
from protos.messages import EngineCoreRequest
from protos.params import SamplingParams
from tests.e2e.serving import ServerProcess, children, is_alive, run, serving, until
from tests.e2e.test_core_recovery import collect, mixed_specs


def two_cores(server=None, **options):
    return serving(server=server, data_parallel_size=2, null_step_ms=2, **options)


async def generate(llm, prompt, max_tokens=8):
    params = SamplingParams(max_tokens=max_tokens)
    return [event async for event in llm.generate(GenerationRequest(prompt=prompt, params=params))][-1]


def slots(llm):
    return llm.cores.slots


def told(llm):
    """Output tokens of each core, by its statistics."""
    return [slot.stats.output_tokens for slot in slots(llm)]


def test_both_work_prefixes_meet_and_sums_are_told():
    async def main():
        # Prompts are not cut to spare outputs a wait: of one that is, the others find only what there is of it by then.
        async with two_cores(max_inter_token_gap=3600) as (llm, _, _):
            metrics = Metrics(llm)
            prompts = [f"group {group} " * 40 + str(each) for each in range(6) for group in range(4)]
            summaries = await asyncio.gather(*(generate(llm, prompt) for prompt in prompts))
            await until(lambda: sum(told(llm)) == 24 * 8)
            assert llm.ready.max_num_seqs == 2 * slots(llm)[0].core.ready.max_num_seqs
            assert llm.ready.kv_capacity_tokens == 2 * slots(llm)[0].core.ready.kv_capacity_tokens
            assert min(told(llm)) > 0
            assert llm.stats.output_tokens == 24 * 8
            assert llm.stats.running == llm.stats.waiting == 0
            assert metrics.registry.get_sample_value("tailrace_output_tokens_total") == 24 * 8
            llm.cores._router.map.audit()
            later = [await generate(llm, prompt) for prompt in prompts[:1] * 4 + prompts[1:2] * 4]
            return [[summary.cached_tokens for summary in each] for each in (summaries, later)]

    together, later = run(main)
    assert sum(tokens > 300 for tokens in together) == 24 - 4, "each prefix was computed once"
    assert min(later) > 300, "and is found where it is"


def test_killing_a_core_under_thirty_two_streams_changes_no_token():
    async def main():
        async with serving(data_parallel_size=2, null_step_ms=4) as (llm, stub, _):

            def works(slot):
                return any(state.core == slot.number and state.has_progressed for state in llm._live.values())

            undisturbed = await asyncio.gather(*(collect(stub, spec) for spec in mixed_specs(32)))
            streams = [asyncio.create_task(collect(stub, spec)) for spec in mixed_specs(32)]
            await until(lambda: llm.num_live == 32 and all(map(works, slots(llm))))
            first, second = slots(llm)
            os.kill(first.core.pid, signal.SIGKILL)
            await until(lambda: not first.is_up)
            state = engine_state(llm, 60.0)
            assert sum(state.core == second.number for state in llm._live.values()) > 16, "they go on there at once"
            await until(works, second)
            os.kill(second.core.pid, signal.SIGKILL)
            disturbed = await asyncio.gather(*streams)
            await until(lambda: llm.cores.num_restarts == 2 and first.is_up and second.is_up)
            await until(lambda: llm.num_live == 0 and not llm.output_processor.sequences)
            assert await llm.reset_prefix_cache(False), "a block is still held"
            await until(lambda: len(llm.cores._router.map) == 0)
            return undisturbed, disturbed, state

    undisturbed, disturbed, state = run(main)
    assert disturbed == undisturbed
    assert state is EngineState.SERVING


def poison(llm, slot):
    """Makes a core die of the request that asks for 666 tokens, and every one that takes its place, as it begins."""
    send = slot.core.send

    def deadly(message):
        send(message)
        if isinstance(message, EngineCoreRequest) and message.max_tokens == 666:
            # Held, so that what it was at when it died is what we say.
            pid = slot.core.pid
            os.kill(pid, signal.SIGSTOP)
            while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
                pass
            slot.core._process._black_box.write([(OWNER, message.handle)])
            os.kill(pid, signal.SIGABRT)
            os.kill(pid, signal.SIGCONT)

    slot.core.send = deadly


def test_a_request_that_kills_cores_takes_one_place_down_and_is_given_up():
    async def main():
        async with two_cores() as (llm, _, _):
            for slot in slots(llm):
                poison(llm, slot)
                start = slot._source.start

                async def restart(before, on_progress, slot=slot, start=start):
                    core = slot.core = await start(before, on_progress)
                    poison(llm, slot)
                    return core

                slot._source = CoreSource("poisoned", restart)
            others = [asyncio.create_task(generate(llm, f"other {index}", 300)) for index in range(8)]
            await until(lambda: sum(state.has_progressed for state in llm._live.values()) == 8)
            with pytest.raises(RequestFailedError, match="each time"):
                await generate(llm, "poison", 666)
            await asyncio.gather(*others)
            await until(lambda: all(slot.is_up for slot in slots(llm)))  # all restarts are counted
            return [slot.recovery.num_restarts for slot in slots(llm)]

    spared, killed = sorted(run(main))
    assert spared == 0
    assert killed >= 2  # more where the core itself wrote into the box at the moment it was killed


def test_pause_and_resume_reach_both_and_a_core_that_comes_up_meanwhile():
    async def main():
        async with two_cores() as (llm, _, _):
            await llm.pause(freeze=False)
            os.kill(slots(llm)[0].core.pid, signal.SIGKILL)
            await until(lambda: llm.cores.num_restarts == 1 and slots(llm)[0].is_up)
            tasks = [asyncio.create_task(generate(llm, f"{index}")) for index in range(8)]
            await until(lambda: len(llm.output_processor.sequences) == 8)
            await asyncio.gather(*(slot.core.call("progress", 0) for slot in slots(llm)))
            assert {state.core for state in llm.live_requests} == {0, 1}
            assert not any(state.started for state in llm.live_requests)
            await llm.resume()
            await asyncio.gather(*tasks)

    run(main)


def test_what_comes_while_all_are_dead_is_served_by_the_first_that_is_back():
    async def main():
        async with two_cores() as (llm, _, _):
            for slot in slots(llm):
                os.kill(slot.core.pid, signal.SIGKILL)
            await until(lambda: llm.recovering)
            assert engine_state(llm, 60.0) is EngineState.RECOVERING
            return await asyncio.gather(*(generate(llm, f"{index}") for index in range(4)))

    assert [summary.output_tokens for summary in run(main)] == [8] * 4


def test_the_engine_ends_with_its_last_core():
    async def main():
        async with two_cores(server={"max_core_restarts": 0}) as (llm, stub, _):
            streams = [asyncio.create_task(collect(stub, spec)) for spec in mixed_specs(2)]
            os.kill(slots(llm)[0].core.pid, signal.SIGKILL)
            await until(lambda: slots(llm)[0].error is not None)
            await asyncio.gather(*streams)
            assert llm.error is None
            os.kill(slots(llm)[1].core.pid, signal.SIGKILL)
            await llm.died()
            return llm.error

    assert "SIGKILL" in str(run(main))


def test_a_place_that_stays_empty_is_tried_again_while_another_serves_those_it_had_just_begun_with():
    async def main():
        async with two_cores(server={"max_core_restarts": 1}) as (llm, _, _):
            slot, tries, served = slots(llm)[0], [], asyncio.Event()
            start = slot._source.start

            async def restart(before, on_progress):
                tries.append(before)
                if len(tries) < 3:
                    raise StartupError("no memory")
                await served.wait()
                return await start(before, on_progress)

            slot._source = CoreSource("late", restart)
            slot.recovery.next_delay = lambda others_serve, ask=slot.recovery.next_delay: (
                None if ask(others_serve) is None else 0.0
            )
            poison(llm, slot)
            assert (await generate(llm, "the first core is as good as the other", 666)).output_tokens == 666
            served.set()
            await until(lambda: slot.is_up and len(tries) == 3)

    run(main)


@pytest.mark.parametrize("second", [{"max_model_len": 512}, None], ids=["other context", "none"])
def test_cores_that_do_not_go_together_are_one_line_and_leave_no_process(second):
    before = children(os.getpid())

    async def failing(*_):
        raise StartupError("no core differs more")

    async def main():
        first = LocalCores(build(EngineConfig, model="null", max_model_len=1024)).sources((), 60.0)
        config = build(EngineConfig, model="null", **(second or {}))
        others = [CoreSource("failing", failing)] if second is None else LocalCores(config).sources((), 60.0)
        with pytest.raises(StartupError, match="differ") as error:
            await start_cores([*first, *others], None)
        return str(error.value)

    assert "\n" not in run(main)
    assert children(os.getpid()) == before


def test_progress_of_all_is_told_as_one():
    async def main():
        told = []
        cores = await start_cores(
            LocalCores(build(EngineConfig, model="null", data_parallel_size=2)).sources((), 60.0),
            lambda done, total: told.append((done, total)),
        )
        await asyncio.gather(*(core.close() for _, core in cores))
        return told

    assert run(main) == [(2, 2)]


def test_each_core_sees_gpus_of_its_own(monkeypatch):
    def visible(**options):
        config = build(EngineConfig, model="null", data_parallel_size=2, **options)
        return [each.get("CUDA_VISIBLE_DEVICES") for each in own_devices(config)]

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible() == ["0", "1"]
    assert visible(device="cpu") == [None, None]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert visible(tensor_parallel_size=2) == ["4,5", "6,7"]


def test_the_command_takes_its_size_and_leaves_nothing():
    with ServerProcess("null", "--listen", "127.0.0.1:0", "--data-parallel-size", "2") as server:
        server.wait_ready()
        cores = children(server.process.pid)
        assert len(cores) == 2
        assert server.stop() == 0
    assert not any(map(is_alive, cores))
