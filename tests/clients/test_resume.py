"""Streams that a server loses go on: the same ids, texts and columns as if nothing had happened."""

import asyncio
import contextlib
import random

import grpc
import pytest

from async_engine import core_request
from protos.tailrace.v1 import generation_pb2 as pb
from protos.tailrace.v1 import generation_pb2_grpc
from tailrace_client import (
    AsyncClient,
    Client,
    InvalidRequestError,
    OverloadedError,
    RequestCancelledError,
    ResumePolicy,
    UnavailableError,
)
from tailrace_client.attempt import sequence_seed
from tailrace_client.errors import make_error
from tailrace_client.resume import Route
from tests.e2e.serving import run, serving

QUICK = ResumePolicy(attempts=50, initial=0.001, maximum=0.01)
PROMPT = "Once upon a time"
SEED = 11


class Cutter(generation_pb2_grpc.GenerationServiceServicer):
    """Stands before a server. Each call is cut after the next number of messages of `cuts`; then none is."""

    def __init__(self, stub, cuts, code=grpc.StatusCode.UNAVAILABLE):
        self.stub, self.cuts, self.code = stub, iter(cuts), code
        self.codes = iter([])
        self.specs = []

    async def GenerateStream(self, request, context):
        self.specs.append(request.spec)
        left = next(self.cuts, None)
        call = self.stub.GenerateStream(request)
        try:
            while left is None or left > 0:
                message = await call.read()
                if message is grpc.aio.EOF:
                    return
                await context.write(message)
                left = left and left - 1
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details(), error.trailing_metadata())
        finally:
            call.cancel()
        await context.abort(next(self.codes, self.code), "cut")

    async def Attach(self, commands, context):
        left = next(self.cuts, None)
        call = self.stub.Attach()

        async def forward():
            async for command in commands:
                if command.HasField("submit"):
                    self.specs.append(command.submit)
                await call.write(command)
            await call.done_writing()

        forwarding = asyncio.create_task(forward())
        try:
            async for frame in call:
                if left == 0:
                    await context.abort(self.code, "cut")
                await context.write(frame)
                left = left and left - 1
        finally:
            call.cancel()
            forwarding.cancel()
            await asyncio.wait([forwarding])

    async def Generate(self, request, context):
        self.specs.append(request.spec)
        if next(self.cuts, None) is not None:
            await context.abort(self.code, "cut")
        return await self.stub.Generate(request)


@contextlib.asynccontextmanager
async def cutting(tmp_path, cuts, name="cutter", options=(), **servicer):
    """(address, Cutter) before a server of its own with scripted tokens."""
    engine = {"null_step_ms": 5} | servicer.pop("engine", {})
    async with serving(**engine) as (_, stub, _):
        server = grpc.aio.server(options=options)
        cutter = Cutter(stub, cuts, **servicer)
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(cutter, server)
        address = f"unix:{tmp_path}/{name}"
        server.add_insecure_port(address)
        await server.start()
        try:
            yield address, cutter
        finally:
            await server.stop(0)


class Whole:
    """What a stream brought, put together."""

    def __init__(self, stream, deltas):
        self.texts, self.ids, self.rows, self.finishes = {}, {}, {}, {}
        hides_ids = stream.spec.output.HasField("token_ids") and not stream.spec.output.token_ids
        for delta in deltas:
            ids = self.ids.setdefault(delta.index, [])
            assert hides_ids or delta.offset == len(stream.spec.resume_from.ids) + len(ids)
            assert delta.index not in self.finishes
            assert not (hides_ids and delta.token_ids)
            ids += delta.token_ids
            self.texts[delta.index] = self.texts.get(delta.index, "") + delta.text
            if delta.logprobs is not None:
                rows = self.rows.setdefault(delta.index, [])
                assert delta.logprobs.offset == len(stream.spec.resume_from.ids) + len(rows)
                columns = delta.logprobs
                rows += zip(columns.logprobs, columns.top_ids or [[]] * len(columns.logprobs), strict=True)
            if delta.finish is not None:
                self.finishes[delta.index] = delta.finish
        assert self.finishes == stream.finishes
        assert stream.summary is not None
        self.prompt = [
            row for piece in stream.started.prompt_logprobs for row in zip(piece.logprobs, piece.ranks, strict=True)
        ]

    def __eq__(self, other):
        return vars(self) == vars(other)

    def __repr__(self):
        return f"Whole({vars(self)})"


async def read_async(addresses, resume=QUICK, prompt=PROMPT, **options):
    async with AsyncClient(*addresses, resume=resume) as client, client.generate(prompt, **options) as stream:
        deltas = [delta async for delta in stream]
    return stream, Whole(stream, deltas)


def read_sync(addresses, resume=QUICK, prompt=PROMPT, **options):
    with Client(*addresses, resume=resume) as client, client.generate(prompt, **options) as stream:
        deltas = list(stream)
    return stream, Whole(stream, deltas)


async def read(kind, addresses, **options):
    if kind == "async":
        return await read_async(addresses, **options)
    return await asyncio.to_thread(read_sync, addresses, **options)


async def failure(awaitable):
    with pytest.raises(Exception) as caught:  # noqa: PT011  callers look at the type
        await awaitable
    return caught.value


async def undisturbed(address, **options):
    async with AsyncClient(address, resume=None) as client, client.generate(PROMPT, **options) as stream:
        return Whole(stream, [delta async for delta in stream])


async def stops(address):
    """Strings that hold much of the text back, and one that ends it."""
    text = (await undisturbed(address, max_tokens=40, seed=SEED)).texts[0]
    return [*(text[at : at + 4] + "\x01" for at in range(2, 34, 3)), text[34:37]]


CASES = {
    "plain": {},
    "text alone": {"want_token_ids": False},
    "ids alone": {"want_text": False},
    "end alone": {"want_text": False, "want_token_ids": False, "num_sequences": 2},
    "log-probabilities": {"logprobs": 2, "logprob_token_ids": [65], "prompt_logprobs": 1, "want_token_ids": False},
    "sequences": {"num_sequences": 3, "logprobs": 1},
    "sequences' texts": {"num_sequences": 3, "want_token_ids": False},
    "gathered": {"coalesce_tokens": 7},
    "greedy": {"temperature": 0},
    "regex": {"regex": "[a-f]{30}"},
    "resumed by the caller": {"resume_from": [72, 105], "resume_text_bytes": 1},
}


@pytest.mark.parametrize("kind", ["async", "sync"])
@pytest.mark.parametrize("case", [*CASES, "stop strings"])
def test_a_stream_that_is_cut_again_and_again_is_whole(tmp_path, case, kind):
    rng = random.Random(case)
    rounds = [[rng.randint(0, 9) for _ in range(rng.randint(1, 12))] for _ in range(3)]

    async def main():
        async with cutting(tmp_path, [], engine={"null_step_ms": 1}) as (address, cutter):
            options = {"stop": await stops(address)} if case == "stop strings" else CASES[case]
            options = {"max_tokens": 40, "seed": SEED} | options
            expected = await undisturbed(address, **options)
            for cuts in ([0, 1, 1, 2, 2, 2], [3, 0, 0, 3, 2, 50], *rounds):
                cutter.specs.clear()
                cutter.cuts = iter(cuts)
                stream, whole = await read(kind, [address], **options)
                cutter.cuts = iter([])
                assert whole == expected, cuts
                assert len(cutter.specs) > 1 or cuts[0] > 2
                assert stream.resumptions <= len(cuts)

    run(main)


def test_a_seed_the_server_drew_is_kept(tmp_path):
    async def main():
        async with cutting(tmp_path, [2, 2]) as (address, cutter):
            stream, whole = await read_async([address], max_tokens=30)
            seed = stream.started.effective.sampling.seed
            _, again = await read_async([address], max_tokens=30, seed=seed)
        assert whole == again
        assert stream.resumptions == 2
        assert not cutter.specs[0].sampling.HasField("seed")
        assert [len(spec.resume_from.ids) > 0 for spec in cutter.specs[:3]] == [False, True, True]
        assert {spec.request_id for spec in cutter.specs[:3]} == {stream.request_id}
        assert all(spec.stop.max_tokens == 30 and spec.model == "null" for spec in cutter.specs[1:3])

    run(main)


def test_what_is_sent_again_is_what_is_left(tmp_path):
    """Of time limits; time in the queue was had; the prompt's log-probabilities are here."""

    async def main():
        async with cutting(tmp_path, [1, 3]) as (address, cutter):
            options = {"time_limit": 30, "queue_timeout": 20, "prompt_logprobs": 0, "logprobs": 0}
            stream, _ = await read_async([address], max_tokens=40, timeout=40, **options)
        first, unseen, seen = cutter.specs
        assert first.stop.time_limit.ToNanoseconds() > unseen.stop.time_limit.ToNanoseconds() > 20e9
        assert unseen.scheduling.HasField("queue_timeout")
        assert not seen.scheduling.HasField("queue_timeout")
        assert unseen.output.HasField("prompt_logprobs")
        assert not seen.output.HasField("prompt_logprobs")
        assert [piece.offset for piece in stream.started.prompt_logprobs] == [1]
        assert stream.finish.cumulative_logprob == pytest.approx(40 * -0.6931, abs=0.01)
        assert stream.finish.output_tokens == 40
        assert stream.summary.output_tokens == 40 - len(seen.resume_from.ids)

    run(main)


def test_text_alone_is_resumed_by_ids_that_the_caller_does_not_see(tmp_path):
    async def main():
        async with cutting(tmp_path, [2]) as (address, cutter):
            stream, _ = await read_async([address], max_tokens=40, want_token_ids=False)
            assert all(spec.output.token_ids for spec in cutter.specs)
            assert stream.started.effective.output.token_ids is False
            assert stream.spec.output.token_ids is False
            await read_async([address], resume=None, max_tokens=40, want_token_ids=False)
            assert cutter.specs[-1].output.token_ids is False

    run(main)


def test_each_of_several_sequences_goes_on_as_a_request_of_its_own(tmp_path):
    async def main():
        options = {"num_sequences": 3, "max_tokens": 10_000, "request_id": "mine"}
        async with (
            cutting(tmp_path, [2]) as (address, cutter),
            AsyncClient(address, resume=QUICK) as client,
            client.generate(PROMPT, **options) as stream,
        ):
            assert stream.request_ids == ["mine"]
            async for _ in stream:
                if len(cutter.specs) == 4:
                    break
            assert sorted(stream.request_ids) == ["mine", "mine/1", "mine/2"]
        assert stream.resumptions == 1
        assert [spec.num_sequences for spec in cutter.specs] == [3, 1, 1, 1]
        assert len({spec.sampling.seed for spec in cutter.specs[1:]}) == 3

    run(main)


def test_only_the_summary_was_lost(tmp_path):
    async def main():
        async with cutting(tmp_path, [2]) as (address, cutter):
            stream, whole = await read_async([address], max_tokens=1, seed=SEED)
        assert len(cutter.specs) == 1
        assert (len(whole.ids[0]), stream.summary.output_tokens, stream.summary.prompt_tokens) == (1, 1, 17)

    run(main)


@pytest.mark.parametrize("kind", ["async", "sync"])
def test_connections_that_reach_their_age(tmp_path, kind):
    """GOAWAY, then the end of what the connection carries."""
    age = [("grpc.max_connection_age_ms", 200), ("grpc.max_connection_age_grace_ms", 50)]

    async def main():
        async with cutting(tmp_path, [], options=age, engine={"null_step_ms": 2}) as (address, cutter):
            stream, whole = await read(kind, [address], max_tokens=400, seed=SEED)
            expected = await cutter.stub.Generate(pb.GenerateRequest(spec=cutter.specs[0]))
        assert whole.texts[0] == expected.output.sequences[0].text
        assert whole.ids[0] == expected.output.sequences[0].token_ids
        assert stream.resumptions >= 2

    run(main)


def test_a_server_that_still_takes_the_lost_call_for_live_is_asked_again(tmp_path):
    async def main():
        async with cutting(tmp_path, [2, 0, 0]) as (address, cutter):
            cutter.codes = iter([grpc.StatusCode.UNAVAILABLE, *[grpc.StatusCode.ALREADY_EXISTS] * 2])
            stream, whole = await read_async([address], max_tokens=40)
        assert len(whole.ids[0]) == 40
        assert (len(cutter.specs), stream.resumptions) == (4, 1)

    run(main)


def test_the_seeds_of_sequences_are_the_servers():
    for seed, index in ((0, 0), (0, 1), (7, 3), (2**64 - 1, 127)):
        assert sequence_seed(seed, index) == core_request.sequence_seed(seed, index)


# What is not resumed ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["async", "sync"])
def test_it_can_be_switched_off(tmp_path, kind):
    async def main():
        async with cutting(tmp_path, [2]) as (address, cutter):
            error = await failure(read(kind, [address], resume=None, max_tokens=40))
        assert type(error) is UnavailableError
        assert error.message == "cut"
        assert len(cutter.specs) == 1

    run(main)


@pytest.mark.parametrize(
    "code", ["DEADLINE_EXCEEDED", "CANCELLED", "INVALID_ARGUMENT", "INTERNAL", "RESOURCE_EXHAUSTED", "ALREADY_EXISTS"]
)
def test_other_failures_are_failures(tmp_path, code):
    async def main():
        async with cutting(tmp_path, [2], code=grpc.StatusCode[code]) as (address, cutter):
            error = await failure(read_async([address], max_tokens=40))
        assert error.code is grpc.StatusCode[code]
        assert len(cutter.specs) == 1

    run(main)


def test_a_server_that_refuses_what_another_began(tmp_path):
    async def main():
        listen = f"unix:{tmp_path}/other"
        async with cutting(tmp_path, [2]) as (first, _), serving(server={"listen": listen}, max_model_len=16):
            return await failure(read_async([first, listen], max_tokens=40))

    error = run(main)
    assert type(error) is InvalidRequestError
    assert "(when resuming after UNAVAILABLE: cut)" in str(error)
    assert isinstance(error.__cause__, UnavailableError)


def test_a_deadline_ends_the_trying(tmp_path):
    policy = ResumePolicy(attempts=1000, initial=0.01, maximum=0.01, total=1000)

    async def main():
        nobody = [f"unix:{tmp_path}/nobody"]
        loop = asyncio.get_running_loop()
        begin = loop.time()
        error = await failure(read_async(nobody, resume=policy, timeout=0.3))
        assert type(error) is UnavailableError
        async with AsyncClient(*nobody, resume=policy) as client:
            assert type(await failure(client.complete(PROMPT, timeout=0.3))) is UnavailableError
        assert loop.time() - begin < 30

    run(main)


def test_closing_the_client_ends_the_trying(tmp_path):
    policy = ResumePolicy(attempts=1000, initial=0.01, maximum=0.01, total=1000)

    async def main():
        client = AsyncClient(f"unix:{tmp_path}/nobody", resume=policy)

        async def stream():
            async with client.generate(PROMPT) as stream:
                await stream.text()

        tasks = [asyncio.create_task(stream()), asyncio.create_task(client.complete(PROMPT))]
        await asyncio.wait(tasks, timeout=0.05)
        await client.close()
        for task in tasks:
            assert type(await failure(task)) is RequestCancelledError

    run(main)


# One answer ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["async", "sync"])
def test_an_answer_is_asked_for_again(tmp_path, kind):
    async def main():
        async with cutting(tmp_path, [0, 0]) as (address, cutter):
            if kind == "async":
                async with AsyncClient(address, resume=QUICK) as client:
                    whole = await client.complete(PROMPT, max_tokens=5)
            else:
                with Client(address, resume=QUICK) as client:
                    whole = await asyncio.to_thread(client.complete, PROMPT, max_tokens=5)
        assert len(whole.token_ids) == 5
        assert len(cutter.specs) == 3

    run(main)


@pytest.mark.parametrize("kind", ["async", "sync"])
def test_cancel_asks_every_server(tmp_path, kind):
    async def main():
        addresses = [f"unix:{tmp_path}/{name}" for name in ("a", "nobody", "b")]
        async with (
            serving(server={"listen": addresses[0]}, null_step_ms=5),
            serving(server={"listen": addresses[2]}, null_step_ms=5),
            AsyncClient(addresses[2]) as there,
            there.generate(PROMPT, max_tokens=10_000) as stream,
        ):
            await anext(stream)
            if kind == "async":
                async with AsyncClient(*addresses) as client:
                    assert await client.cancel(stream.request_id, "x") == [stream.request_id]
            else:
                with Client(*addresses) as client:
                    assert await asyncio.to_thread(client.cancel, stream.request_id, "x") == [stream.request_id]
            await stream.text()
            async with AsyncClient(addresses[1]) as client:
                assert type(await failure(client.cancel("x"))) is UnavailableError
        assert stream.finish.reason.name == "ABORTED"

    run(main)


# The route -------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    """Sets the time that routes see."""

    class Clock:
        now = 100.0

    monkeypatch.setattr("tailrace_client.resume.time.monotonic", lambda: Clock.now)
    monkeypatch.setattr("tailrace_client.resume.random.uniform", lambda low, high: high)
    return Clock


def error(code="UNAVAILABLE", **details):
    made = make_error(grpc.StatusCode[code], "lost", ())
    for name, value in details.items():
        setattr(made, name, value)
    return made


def test_waits_grow_to_a_maximum_and_begin_anew_after_progress(clock):
    route = Route(ResumePolicy(attempts=10, initial=1, multiplier=2, maximum=5))
    waits = []
    for _ in range(5):
        route.failed(error())
        waits.append(route.wait())
    assert waits == [1, 2, 4, 5, 5]
    route.progressed()
    route.failed(error())
    assert route.wait() == 1


def test_another_server_is_tried_at_once_and_each_no_sooner_than_it_said(clock):
    route = Route(ResumePolicy(initial=1), num_servers=3, server=1)
    route.failed(error(retry_after=7.0))
    assert (route.server, route.wait()) == (2, 0)
    route.failed(error())
    assert (route.server, route.wait()) == (0, 0)
    route.failed(error())
    assert (route.server, route.wait()) == (2, 1), "not server 1, which wants 7 s"


def test_it_gives_up_after_so_many_attempts_and_so_long(clock):
    route = Route(ResumePolicy(attempts=2), num_servers=2)
    for _ in range(3):
        route.failed(error())
    with pytest.raises(UnavailableError):
        route.failed(error())
    route = Route(ResumePolicy(initial=1, maximum=1, total=10))
    route.failed(error())
    clock.now += 9.5
    with pytest.raises(UnavailableError):
        route.failed(error())
    route = Route(ResumePolicy(initial=1, maximum=1), timeout=1.5)
    route.failed(error())
    clock.now += 1
    assert route.time_left() == 0.5
    with pytest.raises(UnavailableError):
        route.failed(error())


def test_a_server_that_is_full_is_tried_again_when_it_says_so(clock):
    route = Route(ResumePolicy())
    route.failed(error("RESOURCE_EXHAUSTED", retry_after=3.0, reason="OVERLOADED"))
    assert route.wait() == 3
    for final in ({}, {"retry_after": 1.0, "reason": "QUEUE_TIMEOUT"}):
        with pytest.raises(OverloadedError):
            route.failed(error("RESOURCE_EXHAUSTED", **final))


def test_a_policy_that_makes_no_sense_is_refused():
    for wrong in ({"attempts": 0}, {"initial": 6}, {"multiplier": 0.5}, {"total": -1}):
        with pytest.raises(ValueError, match="must"):
            ResumePolicy(**wrong)
    assert ResumePolicy(multiplier=1e9).wait(1000) <= 5
