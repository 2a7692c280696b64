"""Whatever a client of another engine's service sends is a request, or is refused with a reason."""

import contextlib

import pytest
from google.protobuf.descriptor import FieldDescriptor as Field
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from async_engine.compat import kserve, vllm_engine, vllm_inference
from protos.compat import kserve_pb2, vllm_engine_pb2, vllm_inference_pb2
from protos.errors import TailraceError

VOCAB_SIZE = 258
LIMIT = 64
INTEGERS = {
    Field.TYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    Field.TYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    Field.TYPE_UINT32: (0, (1 << 32) - 1),
    Field.TYPE_UINT64: (0, (1 << 64) - 1),
    Field.TYPE_ENUM: (0, 3),
}
WORDS = st.sampled_from(
    ["", "text_input", "stream", "sampling_parameters", "BYTES", "BOOL", '{"n": 2}', "{", "é", "x" * 99]
)
VALUES = {
    **{kind: st.one_of(st.integers(-1, 3), st.integers(*ends)) for kind, ends in INTEGERS.items()},
    Field.TYPE_BOOL: st.booleans(),
    Field.TYPE_FLOAT: st.floats(width=32),
    Field.TYPE_DOUBLE: st.floats(),
    Field.TYPE_STRING: WORDS,
    Field.TYPE_BYTES: st.one_of(WORDS.map(str.encode), st.binary(max_size=9), st.just(b"\2\0\0\0hi")),
}


def fill(draw, message):
    """Sets some fields, and some of those of messages below."""
    for field in message.DESCRIPTOR.fields:
        if not draw(st.booleans()):
            continue
        count = draw(st.integers(0, 3)) if field.is_repeated else 1
        for _ in range(count):
            if field.type == Field.TYPE_MESSAGE and field.message_type.GetOptions().map_entry:
                _put(draw, getattr(message, field.name), field.message_type)
            elif field.type == Field.TYPE_MESSAGE:
                target = getattr(message, field.name)
                if field.is_repeated:
                    target = target.add()
                else:
                    target.SetInParent()
                fill(draw, target)
            else:
                value = _value(draw, field)
                if field.is_repeated:
                    getattr(message, field.name).append(value)
                else:
                    setattr(message, field.name, value)


def _put(draw, mapping, entry):
    key, value = entry.fields_by_name["key"], entry.fields_by_name["value"]
    if value.type == Field.TYPE_MESSAGE:
        fill(draw, mapping[_value(draw, key)])
    else:
        mapping[_value(draw, key)] = _value(draw, value)


def _value(draw, field):
    value = draw(VALUES[field.type])
    low, high = INTEGERS.get(field.type, (None, None))
    return value if low is None else min(max(value, low), high)


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
@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_message_is_a_request_or_refused(name, data):
    kind, convert = CONVERTERS[name]
    message = kind()
    fill(data.draw, message)
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
