"""ai-dynamo's sidecar and front end over a worker with `vllm.Inference` and `vllm.Control`: an optional check.

TAILRACE_DYNAMO_PYTHON names the interpreter of an environment that has them; tests/README.md tells how to make one.
They are no part of ours: their requirements are many, and one of them cannot be had.
"""

import json
import os
import urllib.request

import pytest

from async_engine.tokenizer import byte_tokenizer
from tests.e2e.gateways import MODEL, Gateway, Worker, chat, free_port

VARIABLE = "TAILRACE_DYNAMO_PYTHON"
CHAT = "/v1/chat/completions"
ENDLESS = 30_000
CONTEXT = 32768
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def dynamo():
    """The interpreter."""
    found = os.environ.get(VARIABLE)
    if not found:
        pytest.skip(f"{VARIABLE} is not set")
    return found


@pytest.fixture(scope="module")
def worker(dynamo, tmp_path_factory):
    """Of random weights: the sidecar wants a directory that it can read."""
    directory = tmp_path_factory.mktemp("model")
    tokenizer = byte_tokenizer()
    for name, data in tokenizer.files().items():
        (directory / name).write_bytes(data)
    config = CONFIG | {"vocab_size": tokenizer.vocab_size, "eos_token_id": tokenizer.vocab_size - 1}
    (directory / "config.json").write_text(json.dumps(config))
    tokenizer.close()
    model = (str(directory), "--load-format", "dummy", "--num-kv-blocks", str(CONTEXT // 16 + 1))
    with Worker("--services", "vllm-inference", model=model) as worker:
        yield worker


@pytest.fixture(scope="module")
def gateway(dynamo, worker, tmp_path_factory):
    """Both, which find one another by files."""
    env = {
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(tmp_path_factory.mktemp("discovery")),
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_EVENT_PLANE": "zmq",
        "DYN_TCP_RPC_HOST": "127.0.0.1",
        "HF_HUB_OFFLINE": "1",
    }
    port = free_port()
    sidecar = [dynamo, "-m", "dynamo.vllm.sidecar", "--grpc-endpoint", worker.address, "--grpc-connections", "2"]
    front_end = [dynamo, "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port)]
    with Gateway(front_end, port, ".", env) as gateway, Gateway(sidecar, port, ".", env) as other:
        while MODEL not in models(port):
            assert gateway.process.poll() is other.process.poll() is None, "".join(gateway.lines + other.lines)
        yield gateway


def models(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=30) as answer:
        return [each["id"] for each in json.load(answer)["data"]]


@pytest.mark.parametrize(
    ("path", "prompt"), [(CHAT, {"messages": chat()}), ("/v1/completions", {"prompt": "Once upon a time"})]
)
def test_streamed_and_not_are_one_text(gateway, path, prompt):
    options = {**prompt, "max_tokens": 20, "temperature": 0}
    status, whole = gateway.post(path, **options)
    assert status == 200, whole
    (choice,) = whole["choices"]
    text = choice["message"]["content"] if path == CHAT else choice["text"]
    events = [event for event in gateway.stream(path, **options) if event["choices"]]
    pieces = [
        (event["choices"][0]["delta"].get("content") if path == CHAT else event["choices"][0]["text"]) or ""
        for event in events
    ]
    assert "".join(pieces) == text != ""
    assert (choice["finish_reason"], events[-1]["choices"][0]["finish_reason"]) == ("length", "length")
    assert whole["usage"]["completion_tokens"] == 20


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_request(gateway, worker, stream):
    options = {"messages": chat(), "max_tokens": ENDLESS, "temperature": 0, "ignore_eos": True}
    before = worker.output_tokens
    if stream:
        events = gateway.stream(CHAT, **options)
        next(events)
        events.close()
    else:
        connection = gateway.request(CHAT, **options)
        worker.wait_live(1)
        connection.close()
    worker.wait_live(0)
    assert worker.output_tokens - before < ENDLESS


def test_bad_input_is_the_clients_fault(gateway):
    status, answer = gateway.post(CHAT, messages=chat(), max_tokens=4, temperature=9.0)
    assert status == 400, answer
