"""Whatever a client of another engine's service sends is a request, or is refused with a reason."""

import contextlib
import struct

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from async_engine.compat import kserve, vllm_engine, vllm_inference
from protos.compat import kserve_pb2, vllm_engine_pb2, vllm_inference_pb2
from protos.errors import TailraceError
from tests.async_engine.any_message import messages_of

VOCAB_SIZE = 258
LIMIT = 64

CONVERTERS = {
    "vllm-engine": (
        vllm_engine_pb2.GenerateRequest,
        lambda message: vllm_engine.to_request(message, "", None, LIMIT),
    ),
    "vllm-inference": (
        vllm_inference_pb2.GenerateRequest,
        lambda message: vllm_inference.to_request(message, "", "", None, LIMIT),
    ),
    "kserve": (kserve_pb2.ModelInferRequest, lambda message: kserve.Asked(message).generation("", None)),
}
PARTS = {"vllm-engine": ["sampling_params"], "vllm-inference": ["sampling", "decoding", "stopping", "response"]}
"""Messages in a request that are looked at closely."""
ANYTHING = settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("name", CONVERTERS)
@ANYTHING
@given(st.data())
def test_any_message_is_a_request_or_refused(name, data):
    kind, convert = CONVERTERS[name]
    message = data.draw(messages_of(kind.DESCRIPTOR))
    with contextlib.suppress(TailraceError):
        convert(message).params.verify(VOCAB_SIZE)


@pytest.mark.parametrize("name", PARTS)
@ANYTHING
@given(st.data())
def test_any_options_are_a_request_or_refused(name, data):
    kind, convert = CONVERTERS[name]
    message = kind(text="x")
    for part in PARTS[name]:
        getattr(message, part).MergeFrom(data.draw(messages_of(kind.DESCRIPTOR.fields_by_name[part].message_type)))
    with contextlib.suppress(TailraceError):
        convert(message).params.verify(VOCAB_SIZE)


def framed(text):
    return struct.pack("<I", len(text)) + text


SAMPLING = ['{"n": 2}', '{"n": "x"}', '{"seed": -1}', '{"stop": [1]}', '{"stop": ""}', "[1]", "{", "null", "1e999"]
ELEMENTS = st.one_of(
    st.binary(max_size=8),
    st.binary(max_size=8).map(framed),
    st.sampled_from([framed(text.encode()) for text in SAMPLING]),
)
TENSORS = st.lists(
    st.tuples(st.sampled_from([*kserve.INPUTS, "image"]), st.sampled_from(["", "", "BYTES", "BOOL"]), ELEMENTS),
    max_size=2,
)


@ANYTHING
@given(TENSORS, st.booleans())
def test_any_tensors_are_a_request_or_refused(tensors, is_raw):
    message = kserve_pb2.ModelInferRequest()
    for name, datatype, element in [("text_input", "", framed(b"x")), *tensors]:
        tensor = message.inputs.add(name=name, datatype=datatype or kserve.INPUTS.get(name, ""))
        if is_raw:
            message.raw_input_contents.append(element)
        elif tensor.datatype == "BOOL":
            tensor.contents.bool_contents.append(bool(element))
        else:
            tensor.contents.bytes_contents.append(element[4:])
    with contextlib.suppress(TailraceError):
        kserve.Asked(message).generation("", None).params.verify(VOCAB_SIZE)


@pytest.mark.parametrize("name", ["vllm-engine", "vllm-inference"])
def test_prompts_that_cannot_fit_are_refused_before_they_are_copied(name):
    messages = {
        "vllm-engine": vllm_engine_pb2.GenerateRequest(tokenized={"input_ids": [1] * LIMIT}),
        "vllm-inference": vllm_inference_pb2.GenerateRequest(token_ids={"ids": [1] * LIMIT}),
    }
    with pytest.raises(TailraceError, match="leave no room"):
        CONVERTERS[name][1](messages[name])
