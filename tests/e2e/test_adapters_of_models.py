"""Adapters of a real model, through the whole engine: the tokens are those of transformers' model with one merged."""

import asyncio
import json
import os
import shutil
import signal

import grpc
import pytest
import torch

from protos.tailrace.v1 import admin_pb2 as pb
from tests.e2e.serving import run, stream_request, until
from tests.e2e.test_admin_service import operated
from tests.e2e.test_generation import assert_works, details_of, failure
from tests.model_runner.adapted import save_adapted
from tests.model_runner.hostile import OTHERS, TOKENIZER, VOCAB
from tests.model_runner.tiny import save_tiny

PROMPT = "The tail race of a mill, and what comes behind it"
NUM_TOKENS = 120
OPTIONS = {"device": "cpu", "num_kv_blocks": 64, "num_threads": 1, "max_adapters": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """(directory, of adapters too; tokens without one, with `one`, with `two`)."""
    path = tmp_path_factory.mktemp("model")
    (path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    config = OTHERS["tokenizer_config.json"] | {"add_bos_token": False}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    ends = {"bos_token_id": VOCAB - 3, "eos_token_id": VOCAB - 2, "pad_token_id": VOCAB - 1}
    base = save_tiny(path, "LlamaForCausalLM", vocab_size=VOCAB, **ends)
    prompt = [TOKENIZER["model"]["vocab"][character] for character in PROMPT.replace(" ", "Ġ")]
    expected = []
    for each in (base, *save_adapted(path, base, 2)):
        with torch.inference_mode():
            drawn = each.generate(torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False)
        expected.append(drawn[0, len(prompt) :].tolist())
    return path, expected


def spec(adapter):
    request = stream_request(PROMPT, NUM_TOKENS, adapter=adapter)
    request.spec.sampling.temperature = 0
    return request


async def tokens(stub, adapter):
    messages = [message async for message in stub.GenerateStream(spec(adapter))]
    return [token for message in messages[1:-1] for token in message.delta.sequences[0].token_ids]


def test_tokens_are_the_merged_models_beside_others_and_in_the_next_core(model):
    path, expected = model

    async def main():
        async with operated(model=str(path), adapters=f"one={path / 'one'}", **OPTIONS) as (llm, stub, admin, _):
            await admin.LoadAdapter(pb.LoadAdapterRequest(name="two", path=str(path / "two")))
            streams = [asyncio.create_task(tokens(stub, name)) for name in ("", "one", "two") * 2]
            await until(lambda: sum(state.has_progressed for state in llm._live.values()) == 6)
            os.kill(llm.core.pid, signal.SIGKILL)
            found = [await stream for stream in streams]
            assert llm.cores.num_restarts == 1
            await admin.UnloadAdapter(pb.UnloadAdapterRequest(name="one"))
            await admin.LoadAdapter(pb.LoadAdapterRequest(name="three", path=str(path / "one")))
            return [*found, await tokens(stub, "three")]

    assert run(main) == [*expected, *expected, expected[1]]


def test_files_that_are_gone_when_the_core_is_replaced_fail_their_requests_and_no_others(model, tmp_path):
    path, expected = model
    shutil.copytree(path / "one", tmp_path / "one")

    async def main():
        adapters = f"one={tmp_path / 'one'},two={path / 'two'}"
        async with operated(model=str(path), adapters=adapters, **OPTIONS) as (llm, stub, admin, _):
            lost, kept = stub.GenerateStream(spec("one")), asyncio.create_task(tokens(stub, "two"))
            await until(lambda: sum(state.has_progressed for state in llm._live.values()) == 2)
            shutil.rmtree(tmp_path / "one")
            os.kill(llm.core.pid, signal.SIGKILL)
            error = await failure(lost)
            found = await kept
            await assert_works(llm, stub)
            listed = await admin.ListAdapters(pb.ListAdaptersRequest())
            return error, found, [adapter.name for adapter in listed.adapters]

    error, found, left = run(main)
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert details_of(error)["BadRequest"].field_violations[0].field == "adapter"
    assert (found, left) == (expected[2], ["two"])


def test_an_adapter_of_another_model_is_refused_and_what_is_there_goes_on(model, tmp_path):
    path, expected = model
    other = save_tiny(tmp_path, "LlamaForCausalLM", hidden_size=32)
    save_adapted(tmp_path, other, 1)

    async def main():
        async with operated(model=str(path), adapters=f"one={path / 'one'}", **OPTIONS) as (_, stub, admin, _):
            error = await failure(admin.LoadAdapter(pb.LoadAdapterRequest(name="x", path=str(tmp_path / "one"))))
            return error, await tokens(stub, "one")

    error, found = run(main)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "has shape" in error.details()
    assert found == expected[1]
