"""What test_kserve.py lets tritonclient do, in that library's own environment: prints what came of it as JSON.

python triton_calls.py SCENARIO ADDRESS
"""

import asyncio
import json
import queue
import sys

import numpy as np
import tritonclient.grpc as triton
from tritonclient.grpc import aio
from tritonclient.utils import InferenceServerException

MODEL = "scripted"


def inputs(text, **options):
    """Tensors of a request; `sampling` as JSON, flags as they are."""
    tensors = [_tensor("text_input", "BYTES", text.encode())]
    for name, value in options.items():
        if name == "sampling":
            tensors.append(_tensor("sampling_parameters", "BYTES", json.dumps(value).encode()))
        else:
            tensors.append(_tensor(name, "BOOL", value))
    return tensors


def _tensor(name, datatype, value):
    tensor = triton.InferInput(name, [1], datatype)
    tensor.set_data_from_numpy(np.array([value], dtype=np.object_ if datatype == "BYTES" else bool))
    return tensor


def texts(result):
    return [text.decode() for text in result.as_numpy("text_output")]


def is_last(result):
    return result.get_response().parameters["triton_final_response"].bool_param


def discovery(client):
    config = client.get_model_config(MODEL).config
    metadata = client.get_model_metadata(MODEL)
    return {
        "live": client.is_server_live(),
        "ready": client.is_server_ready(),
        "models": [client.is_model_ready(name) for name in (MODEL, "nope")],
        "decoupled": config.model_transaction_policy.decoupled,
        "inputs": [[tensor.name, tensor.datatype] for tensor in metadata.inputs],
        "optional": [tensor.name for tensor in config.input if tensor.optional],
    }


def unary(client):
    sampling = {"max_tokens": "8", "temperature": "0.5", "seed": 3}
    whole = client.infer(MODEL, inputs("abc", sampling=sampling), request_id="one")
    bare = client.infer(MODEL, inputs("abc", sampling=sampling, exclude_input_in_output=True))
    default = client.infer(MODEL, inputs("abc", exclude_input_in_output=True))
    several = client.infer(MODEL, inputs("abc", sampling={**sampling, "n": 3}, exclude_input_in_output=True))
    errors = []
    for options in ({"stream": True}, {"sampling": {"max_tokens": 0}}, {"sampling": {"colour": 1}}):
        try:
            client.infer(MODEL, inputs("abc", **options))
        except InferenceServerException as error:
            errors.append([error.status(), error.message()])
    return {
        "id": whole.get_response().id,
        "texts": [*texts(whole), *texts(bare), *texts(default)],
        "several": texts(several),
        "errors": errors,
    }


def stream(client):
    """Several requests on one stream, two of them no good."""
    answers = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    sampling = {"max_tokens": 20, "seed": 3}
    for name in ("a", "b"):
        client.async_stream_infer(MODEL, inputs(name, stream=True, sampling=sampling), request_id=name)
    client.async_stream_infer(MODEL, inputs("c", sampling=sampling), request_id="c")
    client.async_stream_infer(MODEL, inputs("d", sampling={"n": 9999}), request_id="d")
    client.async_stream_infer("nope", inputs("e"), request_id="e")
    found = {name: {"text": "", "finals": [], "error": None} for name in "abcde"}
    left = set(found)
    while left:
        result, error = answers.get(timeout=30)
        response = result.get_response() if result else None
        if error is not None:
            name = "d" if "num_sequences" in error.message() else "e"
            found[name]["error"] = error.message()
            left.discard(name)
            continue
        answer = found[response.id]
        answer["text"] += "".join(texts(result))
        answer["finals"].append(is_last(result))
        if is_last(result):
            left.discard(response.id)
    client.stop_stream()
    whole = {name: texts(client.infer(MODEL, inputs(name, sampling=sampling)))[0] for name in "abc"}
    return {"found": found, "whole": whole}


def several(client):
    """Two sequences, streamed and not."""
    answers = queue.Queue()
    sampling = {"max_tokens": 20, "seed": 3, "n": 2}
    client.start_stream(lambda result, error: answers.put((result, error)))
    client.async_stream_infer(MODEL, inputs("a", stream=True, sampling=sampling))
    found, finals = ["", ""], []
    while not (finals and finals[-1]):
        result, error = answers.get(timeout=30)
        assert error is None, error
        found = [before + text for before, text in zip(found, texts(result), strict=True)]
        finals.append(is_last(result))
    client.stop_stream()
    whole = client.infer(MODEL, inputs("a", sampling=sampling, exclude_input_in_output=True))
    return {"streamed": found, "whole": texts(whole)}


def cancel(client):
    """Leaves in the middle of two requests."""
    answers = queue.Queue()
    client.start_stream(lambda result, error: answers.put(error))
    for name in ("a", "b"):
        request = inputs("x", stream=True, sampling={"max_tokens": 30_000})
        client.async_stream_infer(MODEL, request, request_id=name)
    first = answers.get(timeout=30)
    client.stop_stream(cancel_requests=True)
    return {"first": first}


def deadline(client):
    answers = queue.Queue()
    client.start_stream(lambda result, error: answers.put(error), stream_timeout=0.5)
    client.async_stream_infer(MODEL, inputs("x", stream=True, sampling={"max_tokens": 30_000}))
    while (error := answers.get(timeout=30)) is None:
        pass
    client.stop_stream()
    return {"error": error.message()}


def asynchronous(address):
    async def main():
        async with aio.InferenceServerClient(address) as client:

            async def requests():
                for name in "ab":
                    yield {
                        "model_name": MODEL,
                        "inputs": inputs(name, stream=True, sampling={"max_tokens": 5}),
                        "request_id": name,
                    }

            found = {"a": "", "b": ""}
            async for result, error in client.stream_infer(requests()):
                assert error is None
                found[result.get_response().id] += texts(result)[0]
            return found

    return asyncio.run(main())


if __name__ == "__main__":
    scenario, address = sys.argv[1:]
    if scenario == "asynchronous":
        outcome = asynchronous(address)
    else:
        outcome = globals()[scenario](triton.InferenceServerClient(address))
    sys.stdout.write(json.dumps(outcome))
