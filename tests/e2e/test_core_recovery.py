"""The core dies or hangs while streams run: they go on, to the token."""

import asyncio
import os
import signal

import grpc

from protos.messages import Abort
from protos.tailrace.v1 import generation_pb2 as pb
from tests.e2e.serving import children, run, serving, stream_request, until
from tests.e2e.test_generation import assert_works, failure

LENGTH = 250


def mixed_specs(count):
    """Requests of every kind, each different."""
    specs = []
    for index in range(count):
        spec = pb.GenerationSpec(
            request_id=f"r{index}",
            text=f"prompt number {index} of some length",
            sampling=pb.SamplingOptions(seed=index, temperature=index % 2),
            stop=pb.StopOptions(max_tokens=LENGTH + index),
        )
        match index % 6:
            case 1:
                spec.num_sequences = 2
            case 2:
                spec.output.logprobs = 2
                spec.output.prompt_logprobs = 1
            case 3:
                spec.stop.strings.extend(["zq", "ab", "~~"])
            case 4:
                spec.constraint.regex = "[a-h]{200}x"
            case 5:
                spec.resume_from.ids.extend(b"already out")
        specs.append(spec)
    return specs


async def collect(stub, spec):
    """The whole of a stream, its offsets checked: by sequence ids, text, log-probabilities and end; the prompt's."""
    found, prompt, started, summaries = {}, [], 0, 0
    async for message in stub.GenerateStream(pb.GenerateStreamRequest(spec=spec)):
        started += message.started.request_id != ""
        prompt += message.started.prompt_logprobs.logprobs
        summaries += message.HasField("summary")
        for part in message.delta.sequences:
            ids, text, logprobs, ends = found.setdefault(part.index, ([], [], [], []))
            assert part.offset == len(ids) + len(spec.resume_from.ids)
            assert not ends
            ids += part.token_ids
            text.append(part.text)
            logprobs += part.logprobs.logprobs
            if part.HasField("finish"):
                ends.append((part.finish.reason, part.finish.output_tokens, part.finish.matched_string))
    assert (started, summaries) == (1, 1)
    return {index: (ids, "".join(text), logprobs, ends) for index, (ids, text, logprobs, ends) in found.items()}, prompt


async def with_and_without_kills(llm, stub, specs, num_kills):
    """What streams bring, and what they bring when the core is killed under them so many times; then all works."""
    undisturbed = await asyncio.gather(*(collect(stub, spec) for spec in specs))
    streams = [asyncio.create_task(collect(stub, spec)) for spec in specs]
    for count in range(1, num_kills + 1):
        await until(lambda: any(state.has_progressed for state in llm._live.values()))
        os.kill(llm.core.pid, signal.SIGKILL)
        await until(lambda count=count: llm.cores.num_restarts == count and not llm.recovering)
    disturbed = await asyncio.gather(*streams)
    await assert_works(llm, stub)
    return undisturbed, disturbed


def test_core_killed_ten_times_under_sixty_four_streams_changes_no_token():
    async def main():
        async with serving(null_step_ms=4, max_num_seqs=96) as (llm, stub, _):
            return await with_and_without_kills(llm, stub, mixed_specs(64), num_kills=10)

    undisturbed, disturbed = run(main)
    assert disturbed == undisturbed


def test_requests_that_come_while_the_core_is_dead_are_served_by_the_next():
    async def main():
        async with serving(null_step_ms=1) as (llm, stub, _):
            os.kill(llm.core.pid, signal.SIGKILL)
            await until(lambda: llm.recovering)
            answer = await stub.Generate(pb.GenerateRequest(spec=stream_request("x", 8).spec))
            await assert_works(llm, stub)
            return answer

    assert run(main).summary.output_tokens == 8


def test_requests_given_up_while_the_core_is_dead_do_not_come_back():
    async def main():
        async with serving(null_step_ms=1) as (llm, stub, _):
            left = stub.GenerateStream(stream_request("x", 30_000))
            cancelled = stub.GenerateStream(stream_request("y", 30_000, request_id="y"))
            await anext(aiter(left))
            messages = aiter(cancelled)
            await anext(messages)
            os.kill(llm.core.pid, signal.SIGKILL)
            await until(lambda: llm.recovering)
            left.cancel()
            await stub.Cancel(pb.CancelRequest(request_ids=["y"]))
            rest = [message async for message in messages]
            await until(lambda: llm.num_live == 0)
            await assert_works(llm, stub)
            return rest

    rest = run(main)
    assert rest[-2].delta.sequences[0].finish.reason == pb.FINISH_REASON_ABORTED


def test_core_that_hangs_is_replaced_and_its_streams_go_on():
    async def main():
        async with serving(server={"hang_timeout": 1.5}, null_step_ms=4) as (llm, stub, _):
            (spec,) = mixed_specs(1)
            undisturbed = await collect(stub, spec)
            stream = asyncio.create_task(collect(stub, spec))
            await until(lambda: any(state.has_progressed for state in llm._live.values()))
            os.kill(llm.core.pid, signal.SIGSTOP)
            disturbed = await stream
            await assert_works(llm, stub)
            return undisturbed, disturbed, llm.cores.num_restarts

    undisturbed, disturbed, num_restarts = run(main)
    assert num_restarts >= 1
    assert disturbed == undisturbed


def test_server_that_may_not_replace_its_core_fails_its_streams():
    async def main():
        async with serving(server={"max_core_restarts": 0}, null_step_ms=1) as (llm, stub, _):
            call = stub.GenerateStream(stream_request("x", 30_000))
            await anext(aiter(call))
            os.kill(llm.core.pid, signal.SIGKILL)
            return await failure(call), await failure(stub.Generate(pb.GenerateRequest(spec=stream_request("y").spec)))

    for error in run(main):
        assert error.code() == grpc.StatusCode.UNAVAILABLE


def test_attach_goes_on_as_streams_do():
    async def main():
        async with serving(null_step_ms=4) as (llm, stub, _):

            async def one():
                call = stub.Attach()
                for index in range(4):
                    output = pb.OutputOptions(text=index % 2 == 0)
                    spec = pb.GenerationSpec(
                        request_id=f"a{index}",
                        text=f"prompt {index}",
                        output=output,
                        sampling=pb.SamplingOptions(seed=index),
                        stop=pb.StopOptions(max_tokens=200),
                    )
                    await call.write(pb.AttachRequest(submit=spec))
                await call.done_writing()
                ids, started, slots = {}, [], {}
                async for frame in call:
                    for event in frame.events:
                        if event.HasField("slot"):
                            slots[event.slot] = event.request_id
                        started += [event.request_id] if event.HasField("started") else []
                        for part in event.delta.sequences:
                            ids.setdefault(event.request_id, []).extend(part.token_ids)
                    counts = list(frame.tokens.counts) or [1] * len(frame.tokens.slots)
                    values = iter(frame.tokens.token_ids)
                    for slot, count in zip(frame.tokens.slots, counts, strict=True):
                        ids.setdefault(slots[slot], []).extend(next(values) for _ in range(count))
                assert sorted(started) == [f"a{index}" for index in range(4)]
                return ids

            undisturbed = await one()
            disturbed = asyncio.create_task(one())
            await until(lambda: any(state.has_progressed for state in llm._live.values()))
            os.kill(llm.core.pid, signal.SIGKILL)
            return undisturbed, await disturbed

    undisturbed, disturbed = run(main)
    assert disturbed == undisturbed
    assert all(len(ids) == 200 for ids in disturbed.values())


def test_what_is_sent_to_a_dying_core_goes_nowhere_and_nothing_of_it_stays():
    async def main():
        async with serving() as (llm, stub, _):
            await assert_works(llm, stub)
            held = []
            for count in range(1, 4):
                core = llm.core
                os.kill(core.pid, signal.SIGKILL)
                await until(lambda core=core: core._disconnected)
                core.send(Abort([1]))
                await until(lambda count=count: llm.cores.num_restarts == count and not llm.recovering)
                await assert_works(llm, stub)
                held.append(len(os.listdir("/proc/self/fd")))
            return held

    held = run(main)
    assert held[0] == held[2]


def test_closing_while_another_core_starts_leaves_no_process():
    before = children(os.getpid())

    async def main(turns):
        async with serving() as (llm, _, _):
            os.kill(llm.core.pid, signal.SIGKILL)
            await until(lambda: llm.recovering)
            for _ in range(turns):
                await asyncio.sleep(0)

    for turns in (0, 5, 500):
        run(lambda turns=turns: main(turns))
        assert children(os.getpid()) == before
