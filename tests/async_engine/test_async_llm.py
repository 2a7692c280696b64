"""AsyncLLM: registration, cancellation at each await, and what is left of it."""

import asyncio
import contextlib

import msgspec
import pytest

from async_engine.async_llm import DEFAULT_ADMISSION, AsyncLLM
from async_engine.outputs import Delta, Summary
from async_engine.request import GenerationRequest
from async_engine.stream import RequestStream
from protos.config import EngineConfig, build
from protos.errors import (
    CoreDiedError,
    DuplicateRequestError,
    OverloadedError,
    QueueTimeoutError,
    RequestFailedError,
    UnavailableError,
)
from protos.messages import NO_STATS, Abort, FinishReason, GrammarSpec, Vocabulary
from protos.params import SamplingParams
from protos.server_config import AdmissionOptions
from tests.e2e.serving import run, until

ENDLESS = GenerationRequest(prompt="x", params=SamplingParams(max_tokens=30_000))


CONSTRAINED = GenerationRequest(prompt="x", params=SamplingParams(grammar=GrammarSpec("regex", "ab")))


def engine(admission=DEFAULT_ADMISSION, max_core_restarts=5, **options):
    return AsyncLLM.start(
        build(EngineConfig, model="null", **options),
        admission=admission,
        max_core_restarts=max_core_restarts,
    )


async def assert_idle(llm):
    """Nothing is live here, and the core holds no block."""
    await until(lambda: llm.num_live == 0 and not llm.output_processor.sequences)
    assert await llm.core.call("reset_prefix_cache") == [1]


def test_generate_yields_deltas_then_the_summary():
    async def main():
        async with await engine() as llm:
            request = GenerationRequest(prompt="hi", params=SamplingParams(max_tokens=3))
            return [event async for event in llm.generate(request)]

    *deltas, summary = run(main)
    assert all(isinstance(delta, Delta) for delta in deltas)
    assert isinstance(summary, Summary)
    assert deltas[-1].finish.reason is FinishReason.MAX_TOKENS


def test_leaving_the_iteration_aborts_the_request():
    async def main():
        async with await engine(null_step_ms=1) as llm:
            async with contextlib.aclosing(llm.generate(ENDLESS)) as events:
                await anext(events)
                assert llm.num_live == 1
            await assert_idle(llm)

    run(main)


@pytest.mark.parametrize("turns", range(12))
def test_cancelled_at_any_await_a_request_leaves_nothing(turns):
    """The loop runs `turns` times before the task is cancelled: each time it is at another await."""

    async def main():
        async with await engine(null_step_ms=1) as llm:

            async def consume():
                async for _ in llm.generate(ENDLESS):
                    pass

            task = asyncio.create_task(consume())
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await assert_idle(llm)

    run(main)


def test_cancelled_while_it_is_tokenized_a_request_never_reaches_the_core():
    async def main():
        async with await engine() as llm:
            long = GenerationRequest(prompt="x" * 5_000, params=SamplingParams(max_tokens=30_000))
            stream = RequestStream()
            state = llm.register("a", stream)
            submitting = asyncio.create_task(llm.submit(state, long))
            await asyncio.sleep(0)  # it waits for the tokenizer's thread
            assert not llm.output_processor.sequences
            assert llm.cancel("a")
            await submitting
            assert not llm.output_processor.sequences
            events = [event async for event in stream]
            llm.release(state)
            await assert_idle(llm)
            return events

    _, delta, summary = run(main)
    assert delta.finish.reason is FinishReason.ABORTED
    assert summary.output_tokens == 0


def test_ids_are_unique_while_live():
    async def main():
        async with await engine() as llm:
            state = llm.register("a", RequestStream())
            with pytest.raises(DuplicateRequestError):
                llm.register("a", RequestStream())
            llm.release(state)
            llm.release(llm.register("a", RequestStream()))

    run(main)


def test_requests_beyond_the_capacity_are_refused_also_while_the_core_has_yet_to_end_old_ones():
    async def main():
        async with await engine(admission=AdmissionOptions(max_queued_requests=0), max_num_seqs=2) as llm:
            states = [llm.register(f"{i}", RequestStream()) for i in range(2)]
            with pytest.raises(OverloadedError):
                llm.register("c", RequestStream())
            for state in states:
                await llm.submit(state, ENDLESS)
                llm.release(state)
            assert llm.num_live == 0
            with pytest.raises(OverloadedError):
                llm.register("c", RequestStream())
            await assert_idle(llm)

    run(main)


def test_the_death_of_the_last_core_reaches_every_waiter_and_later_callers():
    async def main():
        async with await engine(null_step_ms=1, max_core_restarts=0) as llm:
            streams = [asyncio.create_task(collect(llm)) for _ in range(3)]
            await until(lambda: len(llm.output_processor.sequences) == 3)
            call = asyncio.create_task(llm.core.call("freeze"))
            llm.core._process.kill()
            results = await asyncio.gather(*streams, call, return_exceptions=True)
            with pytest.raises(CoreDiedError, match="SIGKILL"):
                llm.register("late", RequestStream())
            return results, await llm.died()

    results, death = run(main)
    assert all(isinstance(result, CoreDiedError) for result in results[:3])
    assert "SIGKILL" in str(death)


def test_a_crash_of_the_output_processor_reaches_every_waiter(caplog):
    async def main():
        async with await engine(null_step_ms=1) as llm:
            llm.on_stats.append(lambda stats: 1 / 0)
            with pytest.raises(RequestFailedError):
                await collect(llm)
            await llm.died()

    run(main)
    assert "ZeroDivisionError" in caplog.text


def test_a_drain_waits_for_what_is_live_and_fails_it_when_time_is_up():
    async def main():
        async with await engine(null_step_ms=1) as llm:
            short = GenerationRequest(prompt="x", params=SamplingParams(max_tokens=50))
            finishing = asyncio.create_task(collect(llm, short))
            endless = asyncio.create_task(collect(llm))
            await until(lambda: len(llm.output_processor.sequences) == 2)
            await llm.drain(1)
            with pytest.raises(UnavailableError):
                llm.register("late", RequestStream())
            return await asyncio.gather(finishing, endless, return_exceptions=True)

    finished, cut = run(main)
    assert isinstance(finished[-1], Summary)
    assert isinstance(cut, UnavailableError)


async def collect(llm, request=ENDLESS):
    return [event async for event in llm.generate(request)]


def record_sent(llm):
    """The messages that go to the core from now on."""
    sent = []
    send = llm.core.send
    llm.core.send = lambda message: (sent.append(message), send(message))
    return sent


def test_each_sequence_counts_as_a_request_and_has_a_handle_of_its_own():
    async def main():
        async with await engine(admission=AdmissionOptions(max_queued_requests=0), max_num_seqs=4) as llm:
            first = llm.register("a", RequestStream(num_sequences=3), 3)
            with pytest.raises(OverloadedError):
                llm.register("b", RequestStream(num_sequences=2), 2)
            llm.release(first)
            second = llm.register("b", RequestStream(num_sequences=4), 4)
            llm.release(second)
            return [sequence.handle for state in (first, second) for sequence in state.sequences]

    handles = run(main)
    assert len(set(handles)) == 7


def test_cancelled_before_the_core_knows_it_a_request_ends_in_all_its_sequences():
    async def main():
        async with await engine() as llm:
            request = GenerationRequest(prompt="x", params=SamplingParams(n=3))
            stream = RequestStream(num_sequences=3)
            state = llm.register("a", stream, 3)
            assert llm.cancel("a")
            await llm.submit(state, request)
            events = [event async for event in stream]
            llm.release(state)
            return events

    _, *deltas, _ = run(main)
    assert [(delta.index, delta.finish.reason) for delta in deltas] == [(i, FinishReason.ABORTED) for i in range(3)]


def test_resumed_output_streams_on_from_its_offset():
    async def main():
        async with await engine() as llm:
            return await collect(
                llm, GenerationRequest(prompt="x", params=SamplingParams(max_tokens=4), resume_token_ids=[97, 98])
            )

    first, *_ = run(main)
    assert first.offset == 2


def test_vocabulary_is_told_once_and_before_the_first_request_that_needs_it():
    async def main():
        async with await engine() as llm:
            sent = record_sent(llm)
            await asyncio.gather(*(collect(llm, CONSTRAINED) for _ in range(3)))
            return sent

    first, *others = run(main)
    assert isinstance(first, Vocabulary)
    assert not any(isinstance(message, Vocabulary) for message in others)


def test_request_given_up_while_the_vocabulary_is_told_does_not_take_it_from_others():
    async def main():
        async with await engine() as llm:
            first = asyncio.create_task(collect(llm, CONSTRAINED))
            await until(lambda: llm.cores._telling_vocabulary is not None)
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            return await collect(llm, CONSTRAINED)

    *_, delta, _ = run(main)
    assert delta.finish.reason is FinishReason.CONSTRAINT_DONE


def test_request_that_a_stop_string_ends_is_complete_in_the_core_too():
    async def main():
        async with await engine() as llm:
            sent = record_sent(llm)
            stop = tuple(chr(code) for code in range(32, 96))
            await collect(llm, GenerationRequest(prompt="x", params=SamplingParams(max_tokens=30_000, stop=stop)))
            return [message for message in sent if isinstance(message, Abort)]

    (abort,) = run(main)
    assert abort.stopped


class TestQueuedTokens:
    """At most 100 wait; one request runs at a time."""

    @staticmethod
    def request(tokens, **fields):
        return GenerationRequest(prompt=[1] * tokens, params=SamplingParams(max_tokens=400, ignore_eos=True), **fields)

    @staticmethod
    def engine(**options):
        return engine(admission=AdmissionOptions(max_queued_tokens=100, **options), max_num_seqs=1, null_step_ms=1)

    async def submit(self, llm, tokens, **fields):
        stream = RequestStream()
        state = llm.register("", stream, caller=f"{id(stream)}")
        try:
            await llm.submit(state, self.request(tokens, **fields))
        except OverloadedError:
            llm.release(state)
            raise
        return state, stream

    async def running(self, llm):
        state, stream = await self.submit(llm, 90)
        await stream.ready()
        return state

    def test_more_are_refused_until_some_are_admitted_or_leave(self):
        async def main():
            async with await self.engine() as llm:
                running = await self.running(llm)
                first, _ = await self.submit(llm, 60)
                with pytest.raises(OverloadedError) as error:
                    await self.submit(llm, 41)
                assert error.value.retry_after >= 1
                second, _ = await self.submit(llm, 30, resume_token_ids=[1] * 10)
                with pytest.raises(OverloadedError):
                    await self.submit(llm, 1)
                llm.release(first)
                third, stream = await self.submit(llm, 60)
                for state in (running, second):
                    llm.release(state)
                await stream.ready()
                fourth, _ = await self.submit(llm, 100)
                for state in (third, fourth):
                    llm.release(state)
                await assert_idle(llm)
                assert llm._admission._queued_tokens == 0

        run(main)

    def test_one_that_is_alone_may_have_any_length(self):
        async def main():
            async with await self.engine() as llm:
                running = await self.running(llm)
                large, _ = await self.submit(llm, 300)
                with pytest.raises(OverloadedError):
                    await self.submit(llm, 1)
                for state in (running, large):
                    llm.release(state)

        run(main)

    def test_the_wait_that_the_core_tells_is_what_a_refused_caller_is_told(self):
        async def main():
            async with await self.engine() as llm:
                running = await self.running(llm)
                waiting, _ = await self.submit(llm, 100)
                found = []
                for seconds in (0.0, 20.0, 1e9):
                    llm._admission.observe(msgspec.structs.replace(NO_STATS, queue_seconds=seconds), 0)
                    with pytest.raises(OverloadedError) as error:
                        await self.submit(llm, 1)
                    found.append(error.value.retry_after)
                for state in (running, waiting):
                    llm.release(state)
                return found

        assert run(main) == [1.0, 10.0, 60.0]

    def test_a_request_that_names_no_queue_timeout_has_the_servers(self):
        async def main():
            async with await self.engine(queue_timeout=0.05) as llm:
                running = await self.running(llm)
                sent = record_sent(llm)
                with pytest.raises(QueueTimeoutError):
                    await collect(llm, self.request(1))
                own, _ = await self.submit(llm, 1, queue_timeout=60.0)
                timeouts = [message.queue_timeout for message in sent if hasattr(message, "queue_timeout")]
                for state in (running, own):
                    llm.release(state)
                return timeouts

        named_none, named_one = run(main)
        assert named_none <= 0.05
        assert 50 < named_one <= 60.0


def test_no_caller_fills_the_queue_alone():
    async def main():
        async with await engine(admission=AdmissionOptions(max_queued_requests=16), max_num_seqs=4) as llm:
            crowd = [llm.register("", RequestStream(), 1, "crowd") for _ in range(18)]
            with pytest.raises(OverloadedError, match="18 sequences"):
                llm.register("", RequestStream(), 1, "crowd")
            others = [llm.register("", RequestStream(), 1, caller) for caller in ("a", "b")]
            with pytest.raises(OverloadedError, match="20 sequences"):
                llm.register("", RequestStream(), 1, "c")
            for state in [*crowd, *others]:
                llm.release(state)
            assert not llm._admission._of_caller

    run(main)


def test_no_caller_fills_the_queue_with_tokens_alone():
    async def main():
        async with await engine(
            admission=AdmissionOptions(max_queued_tokens=80), max_num_seqs=1, null_step_ms=1
        ) as llm:

            async def submit(tokens, caller):
                state = llm.register("", stream := RequestStream(), 1, caller)
                params = SamplingParams(max_tokens=400, ignore_eos=True)
                try:
                    await llm.submit(state, GenerationRequest(prompt=[1] * tokens, params=params, caller=caller))
                except OverloadedError:
                    llm.release(state)
                    raise
                return state, stream

            running, stream = await submit(1, "crowd")
            await stream.ready()
            first, _ = await submit(70, "crowd")
            with pytest.raises(OverloadedError, match="70 tokens"):
                await submit(1, "crowd")
            other, _ = await submit(10, "other")
            for state in (running, first, other):
                llm.release(state)

    run(main)
