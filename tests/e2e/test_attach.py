"""Attach: many requests on one call."""

import asyncio
from collections import defaultdict

import grpc
import pytest
from google.rpc import status_pb2

from protos.tailrace.v1 import generation_pb2 as pb
from tests.e2e.serving import run, serving, until

ENDLESS = 30_000


def submit(request_id, text="hi", max_tokens=4, plain=True, **fields):
    output = fields.pop("output", pb.OutputOptions(text=not plain))
    fields.setdefault("stop", pb.StopOptions(max_tokens=max_tokens))
    return pb.AttachRequest(submit=pb.GenerationSpec(request_id=request_id, text=text, output=output, **fields))


class Requests:
    """What frames say, request by request, checked as a careful client would."""

    def __init__(self):
        self.ids = defaultdict(list)
        self.text = defaultdict(str)
        self.events = defaultdict(list)
        self.status = {}
        self._slots = {}

    def take(self, frame):
        for event in frame.events:
            if event.WhichOneof("event") == "started":
                self._event(event)
        self._columns(frame.tokens)
        for event in frame.events:
            if event.WhichOneof("event") != "started":
                self._event(event)

    def _columns(self, tokens):
        counts = list(tokens.counts) or [1] * len(tokens.slots)
        assert sum(counts) == len(tokens.token_ids)
        at = 0
        for slot, count in zip(tokens.slots, counts, strict=True):
            self.ids[self._slots[slot]] += tokens.token_ids[at : at + count]
            at += count

    def _event(self, event):
        name = event.request_id
        assert event.HasField("slot") == (not self.events[name]), "the slot comes with the first event, once"
        if event.HasField("slot"):
            self._slots[event.slot] = name
        kind = event.WhichOneof("event")
        self.events[name].append(kind)
        if kind == "delta":
            (sequence,) = event.delta.sequences
            assert sequence.offset == len(self.ids[name])
            self.ids[name] += sequence.token_ids
            self.text[name] += sequence.text
        elif kind == "status":
            self.status[name] = status_pb2.Status.FromString(event.status)


async def attach(stub, *commands, requests=None):
    """Sends commands, closes our side, and reads to the end."""
    requests = requests or Requests()
    call = stub.Attach()
    for command in commands:
        await call.write(command)
    await call.done_writing()
    async for frame in call:
        requests.take(frame)
    return requests


async def expected(stub, text, max_tokens):
    answer = await stub.Generate(
        pb.GenerateRequest(spec=submit("", text, max_tokens, sampling=pb.SamplingOptions(temperature=0)).submit)
    )
    return list(answer.output.sequences[0].token_ids)


def test_many_requests_share_one_call_and_each_gets_its_own_tokens():
    async def main():
        async with serving() as (llm, stub, _):
            greedy = pb.SamplingOptions(temperature=0)
            commands = [submit(f"r{i}", f"text {i}", 10 + i % 7, sampling=greedy) for i in range(50)]
            requests = await attach(stub, *commands)
            for i in (0, 17, 49):
                assert requests.ids[f"r{i}"] == await expected(stub, f"text {i}", 10 + i % 7)
            assert llm.num_live == 0
            return requests

    requests = run(main)
    assert len(requests.events) == 50
    for events in requests.events.values():
        assert events == ["started", "delta", "summary"]  # the delta tells the finish


def test_text_requests_get_deltas_and_plain_ones_columns():
    async def main():
        async with serving() as (_, stub, _):
            return await attach(stub, submit("plain", plain=True), submit("text", plain=False))

    requests = run(main)
    assert requests.text["plain"] == ""
    assert requests.text["text"] == bytes(requests.ids["text"]).decode()
    assert len(requests.ids["plain"]) == 4


def test_one_frame_carries_the_step_of_all_requests():
    async def main():
        async with serving(null_step_ms=20) as (_, stub, _):
            call = stub.Attach()
            for i in range(20):
                await call.write(submit(f"r{i}", max_tokens=30))
            await call.done_writing()
            return [len(frame.tokens.slots) async for frame in call]

    sizes = run(main)
    assert max(sizes) == 20
    assert len(sizes) < 60


def test_a_bad_request_fails_alone_with_its_status():
    async def main():
        async with serving() as (llm, stub, _):
            bad = pb.SamplingOptions(temperature=-1)
            requests = await attach(stub, submit("bad", sampling=bad), submit("good"), submit(""))
            assert llm.num_live == 0
            return requests

    requests = run(main)
    assert requests.events["good"].count("summary") == 1
    assert requests.status["bad"].code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert requests.status[""].code == grpc.StatusCode.INVALID_ARGUMENT.value[0]


def test_a_live_id_is_refused_on_the_same_and_on_another_connection():
    async def main():
        async with serving(null_step_ms=1) as (_, stub, _):
            call = stub.Attach()
            await call.write(submit("same", max_tokens=ENDLESS))
            await anext(aiter(call))
            other = await attach(stub, submit("same"))
            call.cancel()
            return other

    assert run(main).status["same"].code == grpc.StatusCode.ALREADY_EXISTS.value[0]


def test_cancel_ends_one_request_and_not_the_others():
    async def main():
        async with serving(null_step_ms=1) as (llm, stub, _):
            call = stub.Attach()
            await call.write(submit("a", max_tokens=ENDLESS))
            await call.write(submit("b", max_tokens=200))
            requests = Requests()
            frames = aiter(call)
            while not requests.ids["a"]:
                requests.take(await anext(frames))
            await call.write(pb.AttachRequest(cancel="a"))
            await call.write(pb.AttachRequest(cancel="unknown"))
            await call.done_writing()
            async for frame in frames:
                requests.take(frame)
            assert llm.num_live == 0
            return requests

    requests = run(main)
    assert requests.events["a"][-1] == "summary"
    assert len(requests.ids["a"]) < ENDLESS
    assert len(requests.ids["b"]) == 200


def test_a_request_cancelled_in_the_queue_has_started_all_the_same():
    async def main():
        async with serving(null_step_ms=1, max_num_seqs=1) as (_, stub, _):
            call = stub.Attach()
            await call.write(submit("first", max_tokens=ENDLESS))
            frames = aiter(call)
            requests = Requests()
            while not requests.ids["first"]:
                requests.take(await anext(frames))
            await call.write(submit("queued"))
            await call.write(pb.AttachRequest(cancel="queued"))
            while "summary" not in requests.events["queued"]:
                requests.take(await anext(frames))
            call.cancel()
            return requests

    assert run(main).events["queued"] == ["started", "delta", "summary"]


@pytest.mark.parametrize("plain", [True, False])
def test_credit_bounds_what_is_sent_and_nothing_is_lost(plain):
    async def main():
        async with serving() as (llm, stub, _):
            output = pb.OutputOptions(text=not plain, initial_credit=3)
            call = stub.Attach()
            await call.write(submit("a", max_tokens=10, output=output))
            await call.write(submit("free", max_tokens=50))
            requests = Requests()
            frames = aiter(call)
            while "summary" not in requests.events["free"]:
                requests.take(await anext(frames))
            await until(lambda: not llm.output_processor.states)  # the core has made all of it
            held = len(requests.ids["a"])
            await call.write(pb.AttachRequest(credit=pb.Credit(request_id="a", tokens=5)))
            while len(requests.ids["a"]) < 8:
                requests.take(await anext(frames))
            await call.write(pb.AttachRequest(credit=pb.Credit(request_id="a", tokens=100)))
            await call.done_writing()
            async for frame in frames:
                requests.take(frame)
            return held, requests

    held, requests = run(main)
    assert held == 3
    assert len(requests.ids["a"]) == 10
    assert requests.events["a"][-1] == "summary"
    if not plain:
        assert requests.text["a"] == bytes(requests.ids["a"]).decode()


def test_cancelling_the_call_aborts_all_its_requests():
    async def main():
        async with serving(null_step_ms=1) as (llm, stub, _):
            call = stub.Attach()
            for i in range(10):
                await call.write(submit(f"r{i}", max_tokens=ENDLESS))
            await until(lambda: llm.num_live == 10)
            call.cancel()
            await until(lambda: llm.num_live == 0 and not llm.output_processor.states)
            assert await llm.core.call("reset_prefix_cache") == [1]

    run(main)


def test_a_reader_that_never_reads_is_bounded_and_the_call_ends_with_it():
    async def main():
        async with serving() as (llm, stub, _):
            call = stub.Attach()
            for i in range(8):
                await call.write(submit(f"r{i}", max_tokens=5_000))
            await until(lambda: llm.num_live == 8)
            await until(lambda: not llm.output_processor.states)
            call.cancel()
            await until(lambda: llm.num_live == 0)

    run(main)


def test_a_drained_server_ends_an_idle_call_as_unavailable():
    async def main():
        async with serving() as (llm, stub, _):
            call = stub.Attach()
            await call.write(submit("a"))
            requests = Requests()
            frames = aiter(call)
            while "summary" not in requests.events["a"]:
                requests.take(await anext(frames))
            await llm.drain(5)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await anext(frames)
            return caught.value

    assert run(main).code() == grpc.StatusCode.UNAVAILABLE


def test_commands_and_frames_interleave_while_requests_come_and_go():
    async def main():
        async with serving() as (_, stub, _):
            call = stub.Attach()
            requests = Requests()

            async def read():
                async for frame in call:
                    requests.take(frame)

            reader = asyncio.create_task(read())
            for i in range(200):
                await call.write(submit(f"r{i}", max_tokens=1 + i % 9, plain=i % 2 == 0))
            await call.done_writing()
            await reader
            return requests

    requests = run(main)
    for i in range(200):
        assert len(requests.ids[f"r{i}"]) == 1 + i % 9
        assert requests.events[f"r{i}"][-1] == "summary"
