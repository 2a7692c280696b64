"""smg, the gateway, in front of a worker that offers `vllm.grpc.engine.VllmEngine`."""

import json
import threading

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.compat.vllm_engine_pb2 import GenerateRequest, SamplingParams, TokenizedInput
from protos.compat.vllm_engine_pb2_grpc import VllmEngineStub
from tests.e2e.gateways import MODEL, Gateway, Worker, chat, free_port, installed

SERVICE = "vllm.grpc.engine.VllmEngine"
ENDLESS = 30_000


def smg(*worker_addresses):
    port, metrics = free_port(), free_port()
    command = [installed("smg"), "launch", "--host", "127.0.0.1", "--port", str(port), "--policy", "cache_aware"]
    command += ["--worker-urls", *(f"grpc://{address}" for address in worker_addresses)]
    command += ["--worker-startup-check-interval", "1"]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics)]
    return Gateway(command, port, "Successfully loaded tokenizer")


@pytest.fixture(scope="module")
def worker():
    installed("smg")
    with Worker("--services", "vllm-engine") as worker:
        yield worker


@pytest.fixture(scope="module")
def gateway(worker):
    with smg(worker.address) as gateway:
        yield gateway


def test_health_lists_the_service_while_it_is_served(worker):
    with grpc.insecure_channel(worker.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        assert stub.Check(health_pb2.HealthCheckRequest(service=SERVICE)).status == 1
        with pytest.raises(grpc.RpcError) as caught:
            stub.Check(health_pb2.HealthCheckRequest(service="vllm.Inference"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_chat_streamed_and_not_are_one_text(gateway):
    options = {"messages": chat(), "max_tokens": 40, "seed": 7}
    status, whole = gateway.post("/v1/chat/completions", **options)
    events = list(gateway.stream("/v1/chat/completions", stream_options={"include_usage": True}, **options))
    (choice,) = whole["choices"]
    pieces = [event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"]]
    reasons = [event["choices"][0]["finish_reason"] for event in events if event["choices"]]
    assert status == 200
    assert whole["model"] == MODEL
    assert len(choice["message"]["content"]) == 40
    assert "".join(pieces) == choice["message"]["content"]
    assert choice["finish_reason"] == "length"
    assert [reason for reason in reasons if reason] == ["length"]
    for usage in (whole["usage"], events[-1]["usage"]):
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len("user: hi\nassistant: "), 40)


def test_completions_streamed_and_not_are_one_text(gateway):
    options = {"prompt": "Once upon", "max_tokens": 30, "seed": 7}
    status, whole = gateway.post("/v1/completions", **options)
    events = gateway.stream("/v1/completions", **options)
    assert status == 200
    assert len(whole["choices"][0]["text"]) == 30
    assert "".join(event["choices"][0]["text"] for event in events) == whole["choices"][0]["text"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_is_matched_by_the_worker(gateway, worker, stream):
    options = {"prompt": "Once upon", "seed": 7}
    _, whole = gateway.post("/v1/completions", max_tokens=60, **options)
    text = whole["choices"][0]["text"]
    stop = text[20:23]
    before = worker.output_tokens
    if stream:
        events = list(gateway.stream("/v1/completions", stop=[stop], max_tokens=ENDLESS, **options))
        got = "".join(event["choices"][0]["text"] for event in events)
        choice = events[-1]["choices"][0]
    else:
        choice = gateway.post("/v1/completions", stop=[stop], max_tokens=ENDLESS, **options)[1]["choices"][0]
        got = choice["text"]
    worker.wait_live(0)
    assert (got, choice["finish_reason"]) == (text[: text.index(stop)], "stop")
    assert worker.output_tokens - before < 100


def test_logprobs_of_each_token_and_its_alternatives(gateway):
    options = {"messages": chat(), "max_tokens": 5, "logprobs": True, "top_logprobs": 3}
    _, whole = gateway.post("/v1/chat/completions", **options)
    tokens = whole["choices"][0]["logprobs"]["content"]
    assert "".join(each["token"] for each in tokens) == whole["choices"][0]["message"]["content"]
    for each in tokens:
        assert each["logprob"] < 0
        assert {"token": each["token"], "logprob": each["logprob"]}.items() <= each["top_logprobs"][0].items()
        assert len(each["top_logprobs"]) == 3
    streamed = [
        told
        for event in gateway.stream("/v1/chat/completions", **options)
        for told in ((event["choices"][0]["logprobs"] or {}).get("content") or [])
    ]
    assert len(streamed) == 5


@pytest.mark.parametrize("stream", [False, True])
def test_two_choices(gateway, stream):
    options = {"messages": chat(), "max_tokens": 8, "n": 2, "seed": 3}
    _, whole = gateway.post("/v1/chat/completions", **options)
    texts = {choice["index"]: choice["message"]["content"] for choice in whole["choices"]}
    if stream:
        found = {0: "", 1: ""}
        for event in gateway.stream("/v1/chat/completions", **options):
            for choice in event["choices"]:
                found[choice["index"]] += choice["delta"].get("content") or ""
        assert found == texts
    assert {len(text) for text in texts.values()} == {8}
    assert texts[0] != texts[1]


def test_a_schema_is_what_the_output_looks_like(gateway):
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
    response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    _, whole = gateway.post("/v1/chat/completions", messages=chat(), response_format=response_format, max_tokens=500)
    assert json.loads(whole["choices"][0]["message"]["content"]) == {"a": 1}


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_request(gateway, worker, stream):
    before = worker.output_tokens
    options = {"messages": chat(), "max_tokens": ENDLESS}
    if stream:
        events = gateway.stream("/v1/chat/completions", **options)
        while not next(events)["choices"][0]["delta"].get("content"):
            pass
        events.close()
    else:
        connection = gateway.request("/v1/chat/completions", **options)
        worker.wait_live(1)
        connection.close()
    worker.wait_live(0)
    assert worker.output_tokens - before < 2000


@pytest.mark.parametrize(
    ("options", "status"),
    [({"temperature": 1.5, "top_p": 0.5, "stop_token_ids": [99_999]}, 400), ({"max_tokens": 0}, 400)],
)
def test_bad_input_is_the_clients_fault(gateway, options, status):
    found, answer = gateway.post("/v1/chat/completions", **{"messages": chat(), "max_tokens": 4} | options)
    assert found == status, answer


def test_unset_max_tokens_is_the_rest_of_the_context():
    installed("smg")
    with Worker("--services", "vllm-engine", "--max-model-len", "64") as worker, smg(worker.address) as gateway:
        _, whole = gateway.post("/v1/completions", prompt="x" * 40)
        assert whole["usage"]["completion_tokens"] == 64 - 40
        assert whole["choices"][0]["finish_reason"] == "length"


def test_prompts_go_to_the_worker_that_says_it_holds_their_beginning():
    """What came there by another way the gateway knows from the worker's events alone."""
    installed("smg")
    options = ("--services", "vllm-engine", "--kv-events")
    two_cores = (*options, "--data-parallel-size", "2")
    with Worker(*options) as first, Worker(*two_cores) as second, smg(first.address, second.address) as gateway:
        in_a_row = 0
        for number in range(100):
            text = f"{number} upon a time, and it was long ago, there was a number. " * 6
            prompt = TokenizedInput(input_ids=f"user: {text}\nassistant: ".encode())
            with grpc.insecure_channel((first, second)[number % 2].address) as channel:
                request = GenerateRequest(tokenized=prompt, sampling_params=SamplingParams(max_tokens=1))
                list(VllmEngineStub(channel).Generate(request))
            _, answer = gateway.post("/v1/chat/completions", messages=chat(text), max_tokens=1)
            found = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            in_a_row = in_a_row + 1 if found > 300 else 0  # it may have asked before it heard
            if in_a_row == 8:
                break
        assert in_a_row == 8
        assert not [line for line in gateway.lines if "gap" in line]


def test_a_worker_that_is_killed_and_started_again_serves_again():
    installed("smg")
    with Worker("--services", "vllm-engine") as first, smg(first.address) as gateway:
        errors = []

        def read():
            try:
                errors.extend(event for event in gateway.stream("/v1/chat/completions", **endless) if "error" in event)
            except Exception as error:
                errors.append(error)

        endless = {"messages": chat(), "max_tokens": ENDLESS}
        reader = threading.Thread(target=read)
        reader.start()
        first.wait_live(1)
        first.kill()
        reader.join()
        assert len(errors) == 1
        assert gateway.post("/v1/chat/completions", messages=chat(), max_tokens=4)[0] == 503
        with Worker("--services", "vllm-engine", address=first.address):
            while gateway.post("/v1/chat/completions", messages=chat(), max_tokens=4)[0] != 200:
                pass
