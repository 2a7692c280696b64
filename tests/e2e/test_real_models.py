"""The two real models behind `tailrace serve`, with the chat templates of their GGUF files."""

import shutil
import struct

import grpc
import pytest

import async_engine  # noqa: F401  first, so that grpc is imported as the server imports it
from protos.model_files import resolve_model
from protos.tailrace.v1 import generation_pb2 as pb
from protos.tailrace.v1 import generation_pb2_grpc
from tests.e2e.serving import ServerProcess
from tests.gemma import gemma_gguf
from tests.model_runner.hostile import STRING, text

QUESTION = "What is the capital of France?"
SMOLLM = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\n" + QUESTION + "<|im_end|>\n<|im_start|>assistant\n"
)
GEMMA = f"<start_of_turn>user\n{QUESTION}<end_of_turn>\n<start_of_turn>model\n"
GEMMA_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<start_of_turn>{{ message.role }}\n{{ message.content }}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


def gemma_with_a_template(directory):
    """The file is of the base model and has none: a copy with one more value before the others."""
    entry = text("tokenizer.chat_template") + struct.pack("<I", STRING)
    comment = "{#" + "." * (-(len(entry) + 8 + len(GEMMA_TEMPLATE) + 4) % 32) + "#}"  # what follows stays aligned
    path = directory / "gemma.gguf"
    with gemma_gguf().open("rb") as file, path.open("wb") as copy:
        copy.write(file.read(16))
        copy.write(struct.pack("<Q", struct.unpack("<Q", file.read(8))[0] + 1))
        copy.write(entry + text(comment + GEMMA_TEMPLATE))
        shutil.copyfileobj(file, copy, 1 << 24)
    return path


def answers(path, prompt):
    """Token ids and text of the chat, streamed, and of its prompt spelt out, at once."""
    stop = pb.StopOptions(max_tokens=24)
    sampling = pb.SamplingOptions(temperature=0)
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content=QUESTION)])
    arguments = (str(path), "--listen", "127.0.0.1:0", "--max-num-seqs", "4", "--kv-cache-memory", "64")
    with ServerProcess(*arguments) as server:
        server.wait_ready()
        with grpc.insecure_channel(server.address) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            spec = pb.GenerationSpec(chat=chat, stop=stop, sampling=sampling)
            messages = list(stub.GenerateStream(pb.GenerateStreamRequest(spec=spec)))
            spec = pb.GenerationSpec(text=prompt, stop=stop, sampling=sampling)
            (whole,) = stub.Generate(pb.GenerateRequest(spec=spec)).output.sequences
        assert server.stop() == 0
    parts = [part for message in messages for part in message.delta.sequences]
    streamed = [token_id for part in parts for token_id in part.token_ids], "".join(part.text for part in parts)
    return streamed, (list(whole.token_ids), whole.text)


@pytest.mark.embedded
def test_smollm_answers_a_chat():
    streamed, whole = answers(resolve_model(""), SMOLLM)
    assert streamed == whole
    assert "Paris" in streamed[1]


@pytest.mark.gemma
@pytest.mark.timeout(300)
def test_gemma_answers_a_chat(tmp_path):
    streamed, whole = answers(gemma_with_a_template(tmp_path), GEMMA)
    assert streamed == whole
    assert QUESTION in streamed[1]  # never trained on chats, it goes on asking
