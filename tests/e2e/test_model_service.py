"""Discovery: models, tokenizing both ways, chats, and the tokenizer's own files."""

import hashlib
import json

import grpc
import pytest
from tokenizers import Tokenizer

from protos.tailrace.v1 import generation_pb2, model_pb2_grpc
from protos.tailrace.v1 import model_pb2 as pb
from tests.e2e.serving import run, serving
from tests.e2e.test_generation import details_of, failure

CHAT = generation_pb2.ChatPrompt(messages=[generation_pb2.ChatMessage(role="user", content="Grüße 🌊")])


def ask(method, request, **options):
    """The answer of one call to a server with scripted tokens."""

    async def main():
        async with serving(**options) as (_, _, channel):
            return await getattr(model_pb2_grpc.ModelServiceStub(channel), method)(request)

    return run(main)


def refused(method, request, **options):
    async def main():
        async with serving(**options) as (_, _, channel):
            return await failure(getattr(model_pb2_grpc.ModelServiceStub(channel), method)(request))

    return run(main)


def test_the_model_tells_its_limits_and_defaults():
    (model,) = ask("ListModels", pb.ListModelsRequest(), max_model_len=500, max_num_seqs=7).models
    assert (model.name, list(model.aliases)) == ("null", [])
    assert (model.max_context_tokens, model.max_sequences) == (500, 7)
    assert model.vocabulary_size == 258
    assert model.bos_token_id == 256
    assert "messages" in model.chat_template
    assert model.default_sampling == pb.DefaultSampling(temperature=1.0, top_p=1.0)
    assert model.kv_capacity_tokens > 500
    assert (model.tool_format, model.reasoning_format) == ("", "")


@pytest.mark.embedded
def test_the_embedded_model_tells_its_files_and_the_tokenizer_works_by_itself(tmp_path):
    async def main():
        async with serving(model="", num_kv_blocks=64, max_num_seqs=2) as (_, _, channel):
            stub = model_pb2_grpc.ModelServiceStub(channel)
            (model,) = (await stub.ListModels(pb.ListModelsRequest())).models
            pieces = [piece async for piece in stub.GetTokenizer(pb.GetTokenizerRequest())]
            texts = ["Hello", "  two  spaces", "Grüße 🌊 12345", "<|im_start|>user"]
            ids = [(await stub.Tokenize(pb.TokenizeRequest(text=text))).token_ids for text in texts]
            chat = await stub.RenderChat(pb.RenderChatRequest(chat=CHAT))
            return model, pieces, texts, [list(each) for each in ids], chat

    model, pieces, texts, ids, chat = run(main)
    assert list(model.eos_token_ids) == [2]
    assert (model.dtype, model.device, model.tool_format) == ("float32", "cpu", "")
    assert 90e6 < model.weight_bytes < 100e6, "as in the file"
    assert max(len(piece.data) for piece in pieces) == 64 << 10
    files = {}
    for piece in pieces:
        files[piece.file_name] = files.get(piece.file_name, b"") + piece.data
        assert piece.sha256 in (b"", hashlib.sha256(files[piece.file_name]).digest())
    assert [piece.file_name for piece in pieces if piece.sha256] == list(files)
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    own = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert [own.encode(text).ids for text in texts] == ids
    assert own.encode(chat.text, add_special_tokens=False).ids == list(chat.token_ids)
    assert json.loads(files["tokenizer_config.json"])["chat_template"] == model.chat_template


def test_tokenize_and_detokenize_are_inverse():
    async def main():
        async with serving() as (_, _, channel):
            stub = model_pb2_grpc.ModelServiceStub(channel)
            framed = (await stub.Tokenize(pb.TokenizeRequest(text="Grüße 🌊"))).token_ids
            bare = (await stub.Tokenize(pb.TokenizeRequest(text="Grüße 🌊", add_special_tokens=False))).token_ids
            texts = [
                (await stub.Detokenize(pb.DetokenizeRequest(token_ids=framed, **skip))).text
                for skip in ({}, {"skip_special_tokens": False})
            ]
            long = (await stub.Detokenize(pb.DetokenizeRequest(token_ids=[97] * 5000))).text
            return framed, bare, texts, long

    framed, bare, texts, long = run(main)
    assert list(framed) == [256, *bare]
    assert texts == ["Grüße 🌊", "<|bos|>Grüße 🌊"]
    assert long == "a" * 5000


def test_a_chat_is_rendered_as_a_request_would():
    answer = ask("RenderChat", pb.RenderChatRequest(chat=CHAT))
    assert answer.text == "user: Grüße 🌊\nassistant: "
    assert bytes(answer.token_ids).decode() == answer.text


@pytest.mark.parametrize(
    ("method", "request_message", "field"),
    [
        ("Tokenize", pb.TokenizeRequest(text="x" * 100_000), "text"),
        ("Detokenize", pb.DetokenizeRequest(token_ids=[1] * 600), "token_ids"),
        ("Detokenize", pb.DetokenizeRequest(token_ids=[5000]), "token_ids"),
        ("RenderChat", pb.RenderChatRequest(), "chat.messages"),
    ],
)
def test_bad_input_names_its_field(method, request_message, field):
    error = refused(method, request_message, max_model_len=500)
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert details_of(error)["BadRequest"].field_violations[0].field == field


@pytest.mark.parametrize("method", ["Tokenize", "Detokenize", "RenderChat", "GetTokenizer"])
def test_another_model_is_not_found(method):
    request = getattr(pb, f"{method}Request")(model="other")
    assert refused(method, request).code() == grpc.StatusCode.NOT_FOUND
