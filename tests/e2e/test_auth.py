"""Bearer tokens: who may call, whose requests are whose, and files that change."""

import asyncio
import logging

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from grpc_status import rpc_status

from async_engine.auth import Tokens
from protos.errors import StartupError
from protos.tailrace.v1 import generation_pb2 as pb
from tailrace_client import AsyncClient, AuthenticationError, Client
from tests.e2e.serving import run, serving, stream_request, until

ANN, BOB = "ann-0123456789abcdef", "bob-0123456789abcdef"
ENDLESS = 30_000


def bearer(token, scheme="Bearer"):
    return (("authorization", f"{scheme} {token}"),)


@pytest.fixture
def tokens(tmp_path):
    path = tmp_path / "tokens"
    path.write_text(f"# who may call\n\nann:{ANN}\nbob:{BOB}\n")
    return path


def guarded(tokens, **engine):
    return serving(server={"auth_tokens": str(tokens)}, **engine)


async def refusal(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    status = rpc_status.from_call(caught.value)
    details = [] if status is None else [detail for detail in status.details if detail.Is(INFO.DESCRIPTOR)]
    info = error_details_pb2.ErrorInfo()
    for detail in details:
        detail.Unpack(info)
    return caught.value.code(), info.reason


INFO = error_details_pb2.ErrorInfo
REFUSED = (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED")


@pytest.mark.parametrize(
    "metadata", [(), bearer(""), bearer(ANN[:-1]), bearer(ANN + "x"), bearer(ANN, "Basic"), (("authorization", ANN),)]
)
def test_who_has_no_token_or_a_wrong_one_is_refused_by_every_method(tokens, metadata):
    async def main():
        async with guarded(tokens) as (llm, stub, channel):
            attach = stub.Attach(metadata=metadata)  # and sends nothing
            reflection = channel.stream_stream(
                "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
                request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            )(metadata=metadata)
            refused = [
                await refusal(stub.Generate(pb.GenerateRequest(spec=stream_request().spec), metadata=metadata)),
                await refusal(stub.GenerateStream(stream_request(), metadata=metadata).read()),
                await refusal(stub.Cancel(pb.CancelRequest(request_ids=["a"]), metadata=metadata)),
                await refusal(attach.read()),
                await refusal(reflection.read()),
                await refusal(channel.unary_unary("/no.Such/Method")(b"", metadata=metadata)),
            ]
            health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert llm.num_live == 0
            return refused, health.status

    refused, health = run(main)
    assert refused == [REFUSED] * 6
    assert health == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
def test_a_token_of_the_file_is_let_in(tokens, scheme):
    async def main():
        async with guarded(tokens) as (_, stub, _):
            request = pb.GenerateRequest(spec=stream_request().spec)
            return (await stub.Generate(request, metadata=bearer(ANN, scheme))).summary.output_tokens

    assert run(main) == 4


def test_cancel_reaches_only_requests_of_the_same_principal(tokens):
    async def main():
        async with guarded(tokens, null_step_ms=5) as (llm, stub, _):
            call = stub.GenerateStream(stream_request("x", ENDLESS, request_id="mine"), metadata=bearer(ANN))
            await call.read()
            attach = stub.Attach(metadata=bearer(BOB))
            await attach.write(pb.AttachRequest(cancel="mine"))
            await attach.write(pb.AttachRequest(submit=stream_request("y", 1, request_id="other").spec))
            while not any(event.HasField("summary") for event in (await attach.read()).events):
                pass
            cancel = pb.CancelRequest(request_ids=["mine"])
            cancelled = [list((await stub.Cancel(cancel, metadata=bearer(BOB))).cancelled_request_ids)]
            assert llm.num_live == 1
            cancelled.append(list((await stub.Cancel(cancel, metadata=bearer(ANN))).cancelled_request_ids))
            while (await call.read()).WhichOneof("event") != "summary":
                pass
            return cancelled

    assert run(main) == [[], ["mine"]]


def test_a_principal_takes_turns_as_one_whatever_sessions_and_connections_it_makes_up(tokens):
    async def main():
        callers = []
        async with guarded(tokens) as (llm, stub, _):
            llm.on_end.append(lambda state, _: callers.append(state.caller))
            for token, session in ((ANN, ""), (ANN, "one"), (BOB, "one")):
                spec = stream_request(scheduling=pb.SchedulingOptions(session_id=session)).spec
                await stub.Generate(pb.GenerateRequest(spec=spec), metadata=bearer(token))
                attach = stub.Attach(metadata=bearer(token))
                await attach.write(pb.AttachRequest(submit=pb.GenerationSpec(request_id="a", text="x", stop=spec.stop)))
                await attach.done_writing()
                async for _ in attach:
                    pass
            await until(lambda: len(callers) == 6)
        return callers

    assert run(main) == ["principal ann"] * 4 + ["principal bob"] * 2


def test_the_file_is_read_again_when_it_changes_unless_it_is_broken(tokens, caplog):
    async def main():
        async with guarded(tokens) as (_, stub, _):

            async def may_call(token):
                call = stub.Cancel(pb.CancelRequest(), metadata=bearer(token))
                return await call.code() == grpc.StatusCode.OK

            seen = [(await may_call(ANN), await may_call(BOB))]
            tokens.write_text(f"bob:{BOB}\n")
            seen.append((await may_call(ANN), await may_call(BOB)))
            tokens.write_text(f"ann {ANN}\n")
            seen.append((await may_call(ANN), await may_call(BOB)))
            tokens.unlink()
            seen.append((await may_call(ANN), await may_call(BOB)))
            return seen

    with caplog.at_level(logging.DEBUG):
        assert run(main) == [(True, True), (False, True), (False, True), (False, True)]
    said = [record.getMessage() for record in caplog.records if record.name == "async_engine.reloaded"]
    taken, malformed, missing = said
    assert taken.startswith("read ")
    assert "line 1 is not" in malformed
    assert "No such file" in missing
    assert ANN not in caplog.text
    assert BOB not in caplog.text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no tokens"),
        ("# none\n", "no tokens"),
        (ANN, "line 1 is not principal:token"),
        (f"ann:{ANN}\nann b:{BOB}", "line 2 is not principal:token"),
        (f":{ANN}", "line 1 is not principal:token"),
        ("ann:short", "must have 16 to 4096"),
        (f"ann:{ANN}\nann:{'x' * 15}", "the token in line 2"),
        (f"ann:{ANN} {ANN}", "must have 16"),
        (f"ann:{ANN}\nbob:{ANN}", "another principal's"),
        (f"ann:{ANN}é", "ASCII"),
        (None, "No such file"),
    ],
)
def test_a_file_of_no_use_is_told_in_one_line_that_tells_no_token(tmp_path, text, words):
    path = tmp_path / "tokens"
    if text is not None:
        path.write_text(text)
    with pytest.raises(StartupError) as caught:
        Tokens(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)
    assert ANN not in str(caught.value)


def test_a_principal_may_have_several_tokens(tokens):
    tokens.write_text(f"ann:{ANN}\nann:{BOB}\n")
    assert [Tokens(tokens).principal(token) for token in (ANN, BOB, "x" * 20)] == ["ann", "ann", None]


@pytest.mark.parametrize("kind", ["async", "sync"])
def test_the_clients_send_their_token_with_every_call(tokens, kind):
    given = []

    def token():
        given.append(ANN)
        return ANN

    def use_sync(address):
        with Client(address, token=token) as client:
            with client.generate("hi", max_tokens=4) as stream:
                text = stream.text()
            assert len(client.complete("hi", max_tokens=4).token_ids) == 4
            assert client.cancel("nothing") == []
        with Client(address, token=BOB[:-1]) as client, pytest.raises(AuthenticationError) as caught:
            client.complete("hi")
        return text, caught.value.reason

    async def use_async(address):
        async with AsyncClient(address, token=token) as client:
            async with client.generate("hi", max_tokens=4) as stream:
                text = await stream.text()
            assert len((await client.complete("hi", max_tokens=4)).token_ids) == 4
            assert await client.cancel("nothing") == []
        async with AsyncClient(address, token=BOB[:-1]) as client:
            with pytest.raises(AuthenticationError) as caught:
                await client.complete("hi")
        return text, caught.value.reason

    async def main():
        async with guarded(tokens) as (_, _, channel):
            if kind == "sync":
                return await asyncio.to_thread(use_sync, channel.address)
            return await use_async(channel.address)

    text, reason = run(main)
    assert text
    assert reason == "UNAUTHENTICATED"
    assert len(given) == 3
