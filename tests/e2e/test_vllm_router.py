"""vllm-router, the gateway, in front of a worker that offers `vllm.Inference` and `vllm.Control`."""

import http.client
import json

import pytest

from async_engine.tokenizer import byte_tokenizer
from tests.e2e.gateways import MODEL, Gateway, Worker, chat, free_port, installed

ENDLESS = 30_000
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory):
    """The byte tokenizer's files; this gateway reads them itself, and asks for the size of the vocabulary too."""
    directory = tmp_path_factory.mktemp("tokenizer")
    tokenizer = byte_tokenizer()
    for name, data in tokenizer.files().items():
        (directory / name).write_bytes(data)
    config = {"model_type": "llama", "vocab_size": tokenizer.vocab_size}
    (directory / "config.json").write_text(json.dumps(config))
    tokenizer.close()
    return directory


def router(worker_address, tokenizer_path, *arguments):
    port, metrics = free_port(), free_port()
    command = [installed("vllm-router"), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--worker-urls", f"grpc://{worker_address}", "--disable-circuit-breaker", *arguments]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics)]
    env = {"VLLM_ROUTER_TOKENIZER": str(tokenizer_path), "HF_HUB_OFFLINE": "1"}
    return Gateway(command, port, "Starting server on", env)


@pytest.fixture(scope="module")
def worker():
    installed("vllm-router")
    with Worker("--services", "vllm-inference") as worker:
        yield worker


@pytest.fixture(scope="module")
def gateway(worker, tokenizer_path):
    with router(worker.address, tokenizer_path) as gateway:
        yield gateway


def test_models_are_the_workers(gateway):
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port)
    connection.request("GET", "/v1/models")
    names = [each["id"] for each in json.loads(connection.getresponse().read())["data"]]
    connection.close()
    assert names == [MODEL, "null"]


def test_chat_streamed_and_not_are_one_text(gateway):
    options = {"messages": chat(), "max_tokens": 40, "seed": 7}
    status, whole = gateway.post(CHAT, **options)
    events = list(gateway.stream(CHAT, stream_options={"include_usage": True}, **options))
    text = whole["choices"][0]["message"]["content"]
    choices = [event["choices"][0] for event in events if event["choices"]]
    assert (status, len(text), whole["choices"][0]["finish_reason"]) == (200, 40, "length")
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == text
    assert choices[-1]["finish_reason"] == "length"
    for usage in (whole["usage"], events[-1]["usage"]):
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len("user: hi\nassistant: "), 40)


def test_completions_of_ids_streamed_and_not_are_one_text(gateway):
    options = {"prompt": [72, 73], "max_tokens": 30, "seed": 7}
    _, whole = gateway.post("/v1/completions", **options)
    events = gateway.stream("/v1/completions", **options)
    assert len(whole["choices"][0]["text"]) == 30
    assert "".join(event["choices"][0]["text"] for event in events) == whole["choices"][0]["text"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_is_matched_by_the_worker(gateway, worker, stream):
    options = {"messages": chat(), "seed": 7}
    text = gateway.post(CHAT, max_tokens=60, **options)[1]["choices"][0]["message"]["content"]
    stop, before = text[20:23], worker.output_tokens
    options |= {"stop": [stop], "max_tokens": ENDLESS}
    if stream:
        choices = [event["choices"][0] for event in gateway.stream(CHAT, **options)]
        got, reason = "".join(each["delta"].get("content") or "" for each in choices), choices[-1]["finish_reason"]
    else:
        (choice,) = gateway.post(CHAT, **options)[1]["choices"]
        got, reason = choice["message"]["content"], choice["finish_reason"]
    worker.wait_live(0)
    assert (got, reason) == (text[: text.index(stop)], "stop")
    assert worker.output_tokens - before < 100


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_request(gateway, worker, stream):
    before = worker.output_tokens
    options = {"messages": chat(), "max_tokens": ENDLESS}
    if stream:
        events = gateway.stream(CHAT, **options)
        while not next(events)["choices"][0]["delta"].get("content"):
            pass
        events.close()
    else:
        connection = gateway.request(CHAT, **options)
        worker.wait_live(1)
        connection.close()
    worker.wait_live(0)
    assert worker.output_tokens - before < 2000


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", {"prompt": [99_999], "max_tokens": 4}, 400),
        (CHAT, {"messages": chat(), "model": "nope", "max_tokens": 4}, 404),
    ],
)
def test_what_the_worker_refuses_is_told(gateway, path, body, status):
    assert gateway.post(path, **body)[0] == status


def test_its_deadline_ends_the_request(worker, tokenizer_path):
    with router(worker.address, tokenizer_path, "--request-timeout-secs", "1", "--disable-retries") as gateway:
        before = worker.output_tokens
        status, text = gateway.post(CHAT, messages=chat(), max_tokens=ENDLESS)
        assert status in (502, 504), text  # whose clock was first, its own or ours
        worker.wait_live(0)
        assert worker.output_tokens - before < 2000


def test_a_worker_that_is_killed_and_started_again_serves_again(tokenizer_path):
    installed("vllm-router")
    options = {"messages": chat(), "max_tokens": 4}
    with (
        Worker("--services", "vllm-inference") as first,
        router(first.address, tokenizer_path, "--disable-retries") as gateway,
    ):
        assert gateway.post(CHAT, **options)[0] == 200
        first.kill()
        assert gateway.post(CHAT, **options)[0] == 503
        with Worker("--services", "vllm-inference", address=first.address):
            while gateway.post(CHAT, **options)[0] != 200:
                pass
