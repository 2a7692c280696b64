"""Attach: many requests on one call."""

import asyncio
from collections import defaultdict

import grpc
import pytest
from google.rpc import status_pb2

from async_engine.attach_sink import Piece
from async_engine.outputs import Extra
from protos.tailrace.v1 import generation_pb2 as pb
from tests.async_engine.test_stream import make_logprobs
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


def test_requests_are_of_their_session_or_of_the_connection():
    async def main():
        async with serving(null_step_ms=1) as (llm, stub, _):
            call = stub.Attach()
            await call.write(submit("a", max_tokens=ENDLESS, scheduling=pb.SchedulingOptions(session_id="s")))
            await call.write(submit("b", max_tokens=ENDLESS))
            await call.write(submit("c", scheduling=pb.SchedulingOptions(session_id="x" * 300)))
            await until(lambda: llm.num_live == 2)
            callers = [state.caller for state in llm.live_requests]
            requests = Requests()
            async for frame in call:
                requests.take(frame)
                if "c" in requests.status:
                    break
            call.cancel()
            return callers, requests.status["c"].code

    (session, peer), code = run(main)
    assert session == "session s"
    assert peer.startswith("peer ipv4:127.0.0.1:")
    assert code == grpc.StatusCode.INVALID_ARGUMENT.value[0]


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
            await until(lambda: not llm.output_processor.sequences)  # the core has made all of it
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
            await until(lambda: llm.num_live == 0 and not llm.output_processor.sequences)
            assert await llm.core.call("reset_prefix_cache") == [1]

    run(main)


def test_a_reader_that_never_reads_is_bounded_and_the_call_ends_with_it():
    async def main():
        async with serving() as (llm, stub, _):
            call = stub.Attach()
            for i in range(8):
                await call.write(submit(f"r{i}", max_tokens=5_000))
            await until(lambda: llm.num_live == 8)
            await until(lambda: not llm.output_processor.sequences)
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


def test_credit_lets_text_go_with_its_tokens():
    async def main():
        async with serving() as (_, stub, _):
            call = stub.Attach()
            await call.write(submit("a", max_tokens=12, output=pb.OutputOptions(initial_credit=3)))
            requests, seen = Requests(), []
            frames = aiter(call)
            while "summary" not in requests.events["a"]:
                requests.take(await anext(frames))
                if len(requests.ids["a"]) == 3 * (len(seen) + 1):
                    seen.append((len(requests.ids["a"]), len(requests.text["a"])))
                    await call.write(pb.AttachRequest(credit=pb.Credit(request_id="a", tokens=3)))
            await call.done_writing()
            return seen

    assert run(main) == [(n, n) for n in (3, 6, 9, 12)]


def test_several_sequences_and_log_probabilities_are_events():
    async def main():
        async with serving() as (_, stub, _):
            call = stub.Attach()
            await call.write(submit("n", max_tokens=5, num_sequences=3))
            output = pb.OutputOptions(text=False, logprobs=1, prompt_logprobs=0)
            await call.write(submit("l", "prompt", max_tokens=5, output=output))
            await call.done_writing()
            return [frame async for frame in call]

    frames = run(main)
    assert not any(frame.HasField("tokens") for frame in frames)
    events = [event for frame in frames for event in frame.events]
    parts = [part for event in events if event.request_id == "n" for part in event.delta.sequences]
    assert [sum(len(part.token_ids) for part in parts if part.index == index) for index in range(3)] == [5, 5, 5]
    of_l = [event for event in events if event.request_id == "l"]
    told = [value for event in of_l for value in event.started.prompt_logprobs.logprobs]
    assert len(told) == of_l[0].started.prompt_tokens - 1
    assert sum(len(part.logprobs.logprobs) for event in of_l for part in event.delta.sequences) == 5
    assert [event.WhichOneof("event") for event in of_l][-1] == "summary"


def test_coalesced_output_comes_in_as_few_events():
    async def main():
        async with serving(null_step_ms=1) as (_, stub, _):
            output = pb.OutputOptions(text=False, coalesce_tokens=4)
            call = stub.Attach()
            await call.write(submit("a", max_tokens=9, output=output))
            await call.done_writing()
            return [frame async for frame in call]

    parts = [part for frame in run(main) for event in frame.events for part in event.delta.sequences]
    assert [len(part.token_ids) for part in parts] == [1, 4, 4]


def test_endless_request_id_fails_alone():
    async def main():
        async with serving() as (_, stub, _):
            return await attach(stub, submit("x" * 3_000_000), submit("good"))

    requests = run(main)
    assert requests.events["good"][-1] == "summary"
    (name,) = requests.status
    assert name == "x" * 256


def test_backlog_of_many_requests_comes_in_frames_that_clients_accept():
    async def main():
        async with serving(max_num_seqs=64) as (llm, stub, _):
            call = stub.Attach()
            for i in range(60):
                await call.write(submit(f"r{i}", max_tokens=20_000))
                await call.write(submit(f"t{i}", max_tokens=2_000, plain=False))
            await call.done_writing()
            await until(lambda: llm.num_live == 120)
            await until(lambda: not llm.output_processor.sequences)
            frames = [frame async for frame in call]
            requests = Requests()
            for frame in frames:
                requests.take(frame)
            return frames, requests

    frames, requests = run(main)
    assert max(frame.ByteSize() for frame in frames) < 2 << 20
    assert [len(requests.ids[f"r{i}"]) for i in range(60)] == [20_000] * 60
    assert [len(requests.text[f"t{i}"]) for i in range(60)] == [2_000] * 60


def test_log_probabilities_of_long_prompts_and_many_sequences_come_in_frames_that_clients_accept():
    async def main():
        async with serving(max_num_seqs=64, max_num_batched_tokens=8192) as (_, stub, _):
            call = stub.Attach()
            ids = pb.TokenIds(ids=range(128))
            output = pb.OutputOptions(text=False, prompt_logprobs=128, logprob_token_ids=ids)
            await call.write(submit("p", "x" * 5_000, max_tokens=1, output=output))
            output = pb.OutputOptions(text=False, logprobs=128, coalesce_tokens=200)
            await call.write(submit("n", num_sequences=64, max_tokens=201, output=output))
            await call.done_writing()
            return [frame async for frame in call]

    frames = run(main)
    assert max(frame.ByteSize() for frame in frames) < 3 << 20
    events = [event for frame in frames for event in frame.events]
    pieces = [event.started.prompt_logprobs for event in events if event.started.prompt_logprobs.logprobs]
    offset = 1
    for piece in pieces:
        assert piece.offset == offset
        offset += len(piece.logprobs)
    assert offset == 5_001
    parts = [part for event in events if event.request_id == "n" for part in event.delta.sequences]
    assert sum(len(part.logprobs.logprobs) for part in parts) == 64 * 201


def test_output_cut_by_credit_keeps_text_back_and_log_probabilities_with_their_tokens():
    piece = Piece(None, [1, 2, 3], "abc", Extra(make_logprobs([1, 2, 3]), "hm"))
    head = piece.split(1)
    assert head == Piece(None, [1], "", Extra(make_logprobs([1])))
    assert piece == Piece(None, [2, 3], "abc", Extra(make_logprobs([2, 3]), "hm"))


def test_credit_lets_log_probabilities_go_with_their_tokens():
    async def main():
        async with serving() as (_, stub, _):
            call = stub.Attach()
            await call.write(submit("a", max_tokens=9, output=pb.OutputOptions(logprobs=1, initial_credit=3)))
            parts = []
            async for frame in call:
                for event in frame.events:
                    parts += event.delta.sequences
                if sum(len(part.token_ids) for part in parts) == 3:
                    await call.write(pb.AttachRequest(credit=pb.Credit(request_id="a", tokens=6)))
                    await call.done_writing()
            return parts

    parts = run(main)
    assert [len(part.logprobs.logprobs) for part in parts] == [len(part.token_ids) for part in parts]
    assert sum(len(part.token_ids) for part in parts) == 9


@pytest.mark.parametrize("credit", [None, 100])
@pytest.mark.parametrize("plain", [True, False])
def test_resumed_request_goes_on_at_its_offset(plain, credit):
    async def main():
        async with serving() as (_, stub, _):
            requests = Requests()
            requests.ids["a"] = [97, 98]  # `Requests` compares the offset of each delta with what it has
            output = pb.OutputOptions(text=not plain, initial_credit=credit)
            resumed = submit("a", max_tokens=6, output=output, resume_from=pb.TokenIds(ids=[97, 98]))
            return await attach(stub, resumed, requests=requests)

    requests = run(main)
    assert len(requests.ids["a"]) == 6
    assert requests.events["a"][-1] == "summary"


def test_second_use_of_an_id_on_a_call_is_refused_and_the_first_goes_on():
    async def main():
        async with serving(null_step_ms=1) as (llm, stub, _):
            call = stub.Attach()
            await call.write(submit("same", max_tokens=ENDLESS, plain=False))
            await call.write(submit("same", plain=False))
            kinds = []
            async for frame in call:
                kinds += [event.WhichOneof("event") for event in frame.events]
                if "status" in kinds and kinds[-1] == "delta":
                    break  # it still brings something
            assert llm.num_live == 1
            await call.write(pb.AttachRequest(cancel="same"))
            await call.done_writing()
            async for frame in call:
                kinds += [event.WhichOneof("event") for event in frame.events]
            assert llm.num_live == 0
            return kinds

    kinds = run(main)
    assert kinds.count("status") == 1
    assert kinds[-1] == "summary"
