"""Conversions between protobuf and our structs."""

import contextlib

import pytest
from google.protobuf import duration_pb2
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from async_engine import convert
from async_engine.outputs import Delta, SequenceFinish
from async_engine.request import ChatPrompt
from protos.errors import InvalidRequestError, TailraceError, UnsupportedFeatureError
from protos.messages import FinishReason
from protos.params import SamplingParams
from protos.tailrace.v1 import generation_pb2 as pb


def spec(**fields):
    return pb.GenerationSpec(**({} if "chat" in fields else {"text": "hi"}) | fields)


def test_unset_options_are_left_to_the_server():
    request = convert.to_request(spec(), None)
    assert request.prompt == "hi"
    assert request.params == SamplingParams()
    assert request.wants_text
    assert request.deadline is None


def test_zero_is_not_unset():
    sampling = pb.SamplingOptions(temperature=0, top_k=0, min_p=0, seed=0)
    params = convert.to_request(spec(sampling=sampling), None).params
    assert (params.temperature, params.top_k, params.min_p, params.seed) == (0, 0, 0, 0)
    assert params.top_p is None


def test_every_option_arrives():
    request = convert.to_request(
        spec(
            model="m",
            resume_from=pb.TokenIds(ids=[1, 2]),
            resume_text_bytes=3,
            sampling=pb.SamplingOptions(temperature=0.5, top_p=0.25, top_k=3, min_p=0.125, seed=4),
            stop=pb.StopOptions(
                max_tokens=5,
                min_tokens=1,
                strings=["a"],
                token_ids=[6],
                include_match=True,
                ignore_eos=True,
                time_limit=duration_pb2.Duration(seconds=1, nanos=500_000_000),
            ),
            output=pb.OutputOptions(text=False, skip_special_tokens=False),
            scheduling=pb.SchedulingOptions(
                priority=-2, cache_salt="s", bypass_cache=True, queue_timeout=duration_pb2.Duration(seconds=7)
            ),
        ),
        9.0,
    )
    assert request.params == SamplingParams(
        temperature=0.5,
        top_p=0.25,
        top_k=3,
        min_p=0.125,
        seed=4,
        max_tokens=5,
        min_tokens=1,
        stop=("a",),
        stop_token_ids=(6,),
        include_match=True,
        ignore_eos=True,
        skip_special_tokens=False,
        time_limit=1.5,
    )
    assert (request.model, request.resume_token_ids, request.resume_text_bytes) == ("m", [1, 2], 3)
    assert (request.priority, request.cache_salt, request.bypass_cache) == (-2, "s", True)
    assert (request.deadline, request.queue_timeout, request.wants_text) == (9.0, 7.0, False)


def test_chat_keeps_roles_names_and_template_variables():
    chat = pb.ChatPrompt(
        messages=[pb.ChatMessage(role="user", content="x", name="ann"), pb.ChatMessage(role="assistant", content="y")],
        template_kwargs_json='{"tools": [1]}',
        add_generation_prompt=False,
    )
    assert convert.to_request(spec(chat=chat), None).prompt == ChatPrompt(
        messages=[{"role": "user", "content": "x", "name": "ann"}, {"role": "assistant", "content": "y"}],
        template_kwargs={"tools": [1]},
        add_generation_prompt=False,
    )


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("prompt", {"text": None}),
        ("chat.messages", {"chat": pb.ChatPrompt()}),
        ("chat.messages[0].role", {"chat": pb.ChatPrompt(messages=[pb.ChatMessage(content="x")])}),
        (
            "chat.template_kwargs_json",
            {"chat": pb.ChatPrompt(messages=[pb.ChatMessage(role="u")], template_kwargs_json="[1]")},
        ),
        (
            "chat.template_kwargs_json",
            {"chat": pb.ChatPrompt(messages=[pb.ChatMessage(role="u")], template_kwargs_json="[" * 100_000)},
        ),
        ("request_id", {"request_id": "a b"}),
        ("request_id", {"request_id": "a\n"}),
        ("request_id", {"request_id": "x" * 257}),
        ("stop.time_limit", {"stop": pb.StopOptions(time_limit=duration_pb2.Duration(seconds=-1))}),
        (
            "scheduling.queue_timeout",
            {"scheduling": pb.SchedulingOptions(queue_timeout=duration_pb2.Duration(nanos=-1))},
        ),
    ],
)
def test_bad_input_names_the_field(field, fields):
    with pytest.raises(InvalidRequestError) as caught:
        convert.to_request(spec(**fields), None)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("num_sequences", {"num_sequences": 2}),
        ("constraint", {"constraint": pb.Constraint(json_object=True)}),
        ("sampling.logit_bias", {"sampling": pb.SamplingOptions(logit_bias={1: 1.0})}),
        ("sampling.allowed_token_ids", {"sampling": pb.SamplingOptions(allowed_token_ids=pb.TokenIds())}),
        ("sampling.presence_penalty", {"sampling": pb.SamplingOptions(presence_penalty=0.5)}),
        ("sampling.repetition_penalty", {"sampling": pb.SamplingOptions(repetition_penalty=0.0)}),
        ("output.logprobs", {"output": pb.OutputOptions(logprobs=0)}),
        ("output.prompt_logprobs", {"output": pb.OutputOptions(prompt_logprobs=1)}),
        ("scheduling.data_parallel_rank", {"scheduling": pb.SchedulingOptions(data_parallel_rank=1)}),
    ],
)
def test_what_is_not_offered_is_refused_and_never_ignored(field, fields):
    with pytest.raises(UnsupportedFeatureError) as caught:
        convert.to_request(spec(**fields), None)
    assert caught.value.field == field
    assert caught.value.status == "UNIMPLEMENTED"


def test_neutral_values_of_what_is_not_offered_are_accepted():
    sampling = pb.SamplingOptions(presence_penalty=0, frequency_penalty=0, repetition_penalty=1)
    scheduling = pb.SchedulingOptions(data_parallel_rank=0)
    convert.to_request(spec(num_sequences=1, sampling=sampling, scheduling=scheduling), None)


def test_finish_reasons_have_their_public_numbers():
    for reason in FinishReason:
        if not reason.is_failure:
            assert pb.FinishReason.Value(f"FINISH_REASON_{reason.name}") == reason
    assert len([reason for reason in FinishReason if not reason.is_failure]) == 7


def test_delta_carries_offset_and_finish():
    answer = convert.Answer("r", spec(), None)
    finish = SequenceFinish(FinishReason.STOP_STRING, matched_string="x", output_tokens=9)
    (sequence,) = convert.from_delta(Delta(5, [1, 2], "ab", finish), answer).sequences
    assert (sequence.offset, list(sequence.token_ids), sequence.text) == (5, [1, 2], "ab")
    assert sequence.finish.WhichOneof("matched") == "matched_string"
    assert sequence.finish.output_tokens == 9


def test_token_ids_are_left_out_when_not_wanted():
    answer = convert.Answer("r", spec(output=pb.OutputOptions(token_ids=False)), None)
    (sequence,) = convert.from_delta(Delta(0, [1], "a"), answer).sequences
    assert not sequence.token_ids


@given(st.binary(max_size=200))
def test_any_bytes_that_parse_convert_or_fail_as_invalid(data):
    message = pb.GenerationSpec()
    try:
        message.ParseFromString(data)
    except DecodeError:
        return
    with contextlib.suppress(TailraceError):
        convert.to_request(message, None)
