"""Whatever a client of another engine's service sends is a request, or is refused with a reason."""

import contextlib

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


@pytest.mark.parametrize("name", CONVERTERS)
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_message_is_a_request_or_refused(name, data):
    kind, convert = CONVERTERS[name]
    message = data.draw(messages_of(kind.DESCRIPTOR))
    with contextlib.suppress(TailraceError):
        convert(message).params.verify(VOCAB_SIZE)


@pytest.mark.parametrize("name", ["vllm-engine", "vllm-inference"])
def test_prompts_that_cannot_fit_are_refused_before_they_are_copied(name):
    messages = {
        "vllm-engine": vllm_engine_pb2.GenerateRequest(tokenized={"input_ids": [1] * LIMIT}),
        "vllm-inference": vllm_inference_pb2.GenerateRequest(token_ids={"ids": [1] * LIMIT}),
    }
    with pytest.raises(TailraceError, match="leave no room"):
        CONVERTERS[name][1](messages[name])
