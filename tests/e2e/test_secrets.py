"""What a caller sends stays between him and the engine: no log line and no status text has any of it."""

import asyncio
import logging
import os
import signal

import grpc
import pytest

import async_engine  # noqa: F401
from async_engine import input_processor
from protos.tailrace.v1 import generation_pb2 as pb
from protos.tailrace.v1 import generation_pb2_grpc
from tests.e2e.serving import ServerProcess, run, serving

SECRET = "wombat7741"
"""In every prompt here; short enough that no limit cuts it off."""
ENDLESS = 30_000


def spec(**fields):
    fields.setdefault("text", f"my password is {SECRET}")
    fields.setdefault("stop", pb.StopOptions(max_tokens=4))
    return pb.GenerationSpec(**fields)


def chat_spec(**fields):
    message = pb.ChatMessage(role="user", content=SECRET)
    return pb.GenerationSpec(chat=pb.ChatPrompt(messages=[message]), stop=pb.StopOptions(max_tokens=4), **fields)


REFUSED = {
    "bad temperature": spec(sampling=pb.SamplingOptions(temperature=-1.0)),
    "bad model": spec(model="other"),
    "too long": spec(text=SECRET * 9000),
    "no unicode ids": pb.GenerationSpec(token_ids=pb.TokenIds(ids=[1 << 30])),
    "bad constraint": spec(constraint=pb.Constraint(regex="(")),
    "unsatisfiable": spec(constraint=pb.Constraint(json_schema='{"type": "nothing"}')),
    "bad format": spec(output=pb.OutputOptions(tool_format="nope")),
    "bad resume": spec(resume_from=pb.TokenIds(ids=[1 << 30])),
    "bad kwargs": pb.GenerationSpec(chat=pb.ChatPrompt(messages=[], template_kwargs_json="{")),
    "bad stop": spec(stop=pb.StopOptions(max_tokens=4, min_tokens=5)),
}


async def status_of(call) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


def texts(error: grpc.aio.AioRpcError) -> str:
    return f"{error.details()} {list(error.trailing_metadata() or ())}"


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_does_not_repeat_the_prompt(name, caplog):
    caplog.set_level(logging.DEBUG)

    async def main():
        async with serving() as (_, stub, _):
            return await status_of(stub.Generate(pb.GenerateRequest(spec=REFUSED[name])))

    error = run(main)
    assert error.details()
    assert SECRET not in texts(error)
    assert SECRET not in caplog.text


@pytest.mark.parametrize("way", ["bug", "template", "core death", "cancel", "deadline", "done"])
def test_no_failure_tells_the_prompt(way, caplog, monkeypatch):
    caplog.set_level(logging.DEBUG)

    def bug(*args, **kwargs):
        raise RuntimeError("a bug")

    async def main():
        async with serving(server={"max_core_restarts": 0}, null_step_ms=5) as (llm, stub, _):
            if way == "bug":
                monkeypatch.setattr(input_processor.Renderer, "rendering", bug)
                return texts(await status_of(stub.Generate(pb.GenerateRequest(spec=spec()))))
            if way == "template":
                llm.model.tokenizer.chat_template = "{{ messages[0].content.nothing.at_all }}"
                return texts(await status_of(stub.Generate(pb.GenerateRequest(spec=chat_spec()))))
            request = spec(stop=pb.StopOptions(max_tokens=4 if way == "done" else ENDLESS))
            call = stub.GenerateStream(pb.GenerateStreamRequest(spec=request), timeout=1 if way == "deadline" else None)
            messages = aiter(call)
            await anext(messages)
            if way == "done":
                async for _ in messages:
                    pass
                return await call.details()
            if way == "core death":
                os.kill(llm.core.pid, signal.SIGKILL)
            elif way == "cancel":
                call.cancel()
            try:
                async for _ in messages:
                    pass
            except grpc.aio.AioRpcError as error:
                return texts(error)
            except asyncio.CancelledError:
                return ""

    assert SECRET not in run(main)
    assert SECRET not in caplog.text


def test_a_server_logs_no_prompt_at_its_most_talkative():
    arguments = ("null", "--listen", "127.0.0.1:0", "--log-level", "debug")
    with ServerProcess(*arguments) as server:
        server.wait_ready()
        with grpc.insecure_channel(server.address) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            assert stub.Generate(pb.GenerateRequest(spec=spec())).summary.output_tokens == 4
            assert stub.Generate(pb.GenerateRequest(spec=chat_spec())).summary.output_tokens == 4
            for bad in REFUSED.values():
                with pytest.raises(grpc.RpcError):
                    stub.Generate(pb.GenerateRequest(spec=bad))
        server.process.send_signal(signal.SIGTERM)
        out, errors = server.process.communicate(timeout=30)
    assert "output_tokens=4" in errors
    assert SECRET not in out + errors + "".join(server.lines)


def test_what_quotes_a_value_quotes_the_callers_own():
    """A template may tell what is wrong with a conversation: that goes to whom it belongs, and not to the log."""

    async def main():
        async with serving() as (llm, stub, _):
            llm.model.tokenizer.chat_template = "{{ raise_exception('cannot take ' + messages[0].content) }}"
            return await status_of(stub.Generate(pb.GenerateRequest(spec=chat_spec())))

    assert f"cannot take {SECRET}" in run(main).details()
