"""Conversions between protobuf and our structs."""

import msgspec
import pytest
from google.protobuf import duration_pb2
from hypothesis import HealthCheck, given, settings

from async_engine import from_proto, to_proto
from async_engine.input_processor import Accepted
from async_engine.outputs import Delta, SequenceFinish, Started
from async_engine.request import ChatPrompt
from protos.errors import InvalidRequestError, UnsupportedFeatureError
from protos.messages import FinishReason, GrammarSpec, Repetition
from protos.params import SamplingParams
from protos.tailrace.v1 import generation_pb2 as pb
from tests.async_engine.any_message import messages_of

MAX_MODEL_LEN = 100


def to_request(message, deadline=None):
    return from_proto.to_request(message, "somebody", deadline, MAX_MODEL_LEN)


def from_delta(delta, answer):
    message = pb.OutputDelta()
    to_proto.fill_delta(message, delta, answer)
    return message


def spec(**fields):
    return pb.GenerationSpec(**({} if "chat" in fields else {"text": "hi"}) | fields)


def test_unset_options_are_left_to_the_server():
    request = to_request(spec())
    assert request.prompt == "hi"
    assert request.params == SamplingParams()
    assert request.wants_text
    assert request.deadline is None


def test_zero_is_not_unset():
    sampling = pb.SamplingOptions(temperature=0, top_k=0, min_p=0, seed=0)
    params = to_request(spec(sampling=sampling)).params
    assert (params.temperature, params.top_k, params.min_p, params.seed) == (0, 0, 0, 0)
    assert params.top_p is None


def test_empty_list_of_allowed_tokens_is_not_unset():
    assert to_request(spec(sampling=pb.SamplingOptions(allowed_token_ids=pb.TokenIds()))).params.allowed_token_ids == ()


def test_every_option_arrives():
    request = to_request(
        spec(
            model="m",
            resume_from=pb.TokenIds(ids=[1, 2]),
            resume_text_bytes=3,
            sampling=pb.SamplingOptions(
                temperature=0.5,
                top_p=0.25,
                top_k=3,
                min_p=0.125,
                presence_penalty=0.5,
                frequency_penalty=-0.5,
                repetition_penalty=1.5,
                seed=4,
                logit_bias={3: -2.0},
                allowed_token_ids=pb.TokenIds(ids=[3, 4]),
                bad_words=["b"],
                bad_token_sequences=[pb.TokenIds(ids=[5, 6])],
            ),
            constraint=pb.Constraint(choices=pb.StringList(values=["x", "y"])),
            num_sequences=1,
            truncate_prompt_tokens=8,
            stop=pb.StopOptions(
                max_tokens=5,
                min_tokens=1,
                strings=["a"],
                token_ids=[6],
                include_match=True,
                ignore_eos=True,
                time_limit=duration_pb2.Duration(seconds=1, nanos=500_000_000),
                repetition=pb.RepetitionStop(max_pattern_tokens=4, count=3),
            ),
            output=pb.OutputOptions(
                text=False,
                skip_special_tokens=False,
                logprobs=0,
                prompt_logprobs=2,
                logprob_token_ids=pb.TokenIds(ids=[7]),
                processed_logprobs=True,
                tool_format="hermes",
                reasoning_format="auto",
            ),
            adapter="a",
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
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.5,
        logit_bias={3: -2.0},
        allowed_token_ids=(3, 4),
        bad_words=("b",),
        bad_token_sequences=((5, 6),),
        seed=4,
        max_tokens=5,
        min_tokens=1,
        stop=("a",),
        stop_token_ids=(6,),
        include_match=True,
        ignore_eos=True,
        skip_special_tokens=False,
        time_limit=1.5,
        truncate_prompt_tokens=8,
        n=1,
        repetition=Repetition(1, 4, 3),
        grammar=GrammarSpec("choices", '["x", "y"]'),
        logprobs=0,
        prompt_logprobs=2,
        logprob_token_ids=(7,),
        processed_logprobs=True,
    )
    assert (request.tool_format, request.reasoning_format) == ("hermes", "auto")
    assert (request.model, request.resume_token_ids, request.resume_text_bytes) == ("m", [1, 2], 3)
    assert request.adapter == "a"
    assert (request.priority, request.cache_salt, request.bypass_cache) == (-2, "s", True)
    assert (request.deadline, request.queue_timeout, request.wants_text) == (9.0, 7.0, False)


@pytest.mark.parametrize(
    ("constraint", "grammar"),
    [
        (pb.Constraint(json_schema="{}"), GrammarSpec("json_schema", "{}")),
        (pb.Constraint(json_object=True), GrammarSpec("json_object")),
        (pb.Constraint(json_object=False), None),
        (pb.Constraint(regex="a+"), GrammarSpec("regex", "a+")),
        (pb.Constraint(grammar='root ::= "a"'), GrammarSpec("grammar", 'root ::= "a"')),
        (pb.Constraint(structural_tag="{}"), GrammarSpec("structural_tag", "{}")),
        (pb.Constraint(), None),
    ],
)
def test_constraint_becomes_a_grammar_of_its_kind(constraint, grammar):
    assert to_request(spec(constraint=constraint)).params.grammar == grammar


@pytest.mark.parametrize(
    ("output", "tokens"),
    [
        (pb.OutputOptions(), 1),
        (pb.OutputOptions(coalesce_tokens=5), 5),
        (pb.OutputOptions(text=False, token_ids=False), 0),
        (pb.OutputOptions(text=False, token_ids=False, coalesce_tokens=5), 0),
        (pb.OutputOptions(text=False, token_ids=False, logprobs=0), 1),
        (pb.OutputOptions(text=False, token_ids=False, logprob_token_ids=pb.TokenIds(ids=[5])), 1),
    ],
)
def test_all_tokens_are_gathered_into_one_delta_only_where_nothing_of_them_is_wanted(output, tokens):
    assert from_proto.coalesce(spec(output=output)) == tokens


def test_least_size_of_a_repeated_pattern_is_one_unless_told():
    stops = [pb.RepetitionStop(max_pattern_tokens=4, count=3, min_pattern_tokens=low) for low in (None, 0, 2)]
    found = [to_request(spec(stop=pb.StopOptions(repetition=stop))).params.repetition for stop in stops]
    assert found == [Repetition(1, 4, 3), Repetition(0, 4, 3), Repetition(2, 4, 3)]


def test_turns_with_tool_calls_have_the_form_that_templates_know():
    messages = [
        pb.ChatMessage(
            role="assistant",
            reasoning="hm",
            tool_calls=[pb.ToolCall(id="c1", name="f", arguments_json='{"a": 1}'), pb.ToolCall(name="g")],
        ),
        pb.ChatMessage(role="tool", content="3", tool_call_id="c1"),
    ]
    called, answered = to_request(spec(chat=pb.ChatPrompt(messages=messages))).prompt.messages
    assert called == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}},
            {"id": "", "type": "function", "function": {"name": "g", "arguments": {}}},
        ],
    }
    assert answered == {"role": "tool", "content": "3", "tool_call_id": "c1"}


def test_of_a_prompt_that_is_truncated_only_the_last_tokens_are_copied():
    ids = list(range(MAX_MODEL_LEN * 10))
    request = to_request(spec(text=None, token_ids=pb.TokenIds(ids=ids), truncate_prompt_tokens=3))
    assert request.prompt == ids[-3:]


def test_chat_keeps_roles_names_and_template_variables():
    chat = pb.ChatPrompt(
        messages=[pb.ChatMessage(role="user", content="x", name="ann"), pb.ChatMessage(role="assistant", content="y")],
        template_kwargs_json='{"tools": [1]}',
        add_generation_prompt=False,
    )
    assert to_request(spec(chat=chat)).prompt == ChatPrompt(
        messages=[{"role": "user", "content": "x", "name": "ann"}, {"role": "assistant", "content": "y"}],
        template_kwargs={"tools": [1]},
        add_generation_prompt=False,
    )


def test_chat_asks_for_the_next_turn_unless_told_otherwise():
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="x")])
    assert to_request(spec(chat=chat)).prompt.add_generation_prompt


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
        (
            "chat.messages[0].tool_calls[1].arguments_json",
            {
                "chat": pb.ChatPrompt(
                    messages=[pb.ChatMessage(role="u", tool_calls=[pb.ToolCall(), pb.ToolCall(arguments_json="{")])]
                )
            },
        ),
        (
            "chat.template_kwargs_json",
            {
                "chat": pb.ChatPrompt(
                    messages=[pb.ChatMessage(role="u")],
                    template_kwargs_json='{"a": "' + "x" * from_proto.MAX_TEMPLATE_KWARGS + '"}',
                )
            },
        ),
        ("token_ids", {"text": None, "token_ids": pb.TokenIds(ids=[1] * MAX_MODEL_LEN)}),
        ("resume_from", {"resume_from": pb.TokenIds(ids=[1] * MAX_MODEL_LEN)}),
        ("num_sequences", {"num_sequences": 0}),
        ("num_sequences", {"num_sequences": 1 << 31}),
        ("output.progress_interval", {"output": pb.OutputOptions(progress_interval=duration_pb2.Duration(nanos=1))}),
        (
            "output.progress_interval",
            {"output": pb.OutputOptions(progress_interval=duration_pb2.Duration(nanos=49_000_000))},
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
        to_request(spec(**fields))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("scheduling.data_parallel_rank", {"scheduling": pb.SchedulingOptions(data_parallel_rank=1)}),
    ],
)
def test_what_is_not_offered_is_refused_and_never_ignored(field, fields):
    with pytest.raises(UnsupportedFeatureError) as caught:
        to_request(spec(**fields))
    assert caught.value.field == field
    assert caught.value.status == "UNIMPLEMENTED"


def test_neutral_values_of_what_is_not_offered_are_accepted():
    to_request(spec(scheduling=pb.SchedulingOptions(data_parallel_rank=0)))


def test_finish_reasons_have_their_public_numbers():
    for reason in FinishReason:
        if not reason.is_failure:
            assert pb.FinishReason.Value(f"FINISH_REASON_{reason.name}") == reason
    assert len([reason for reason in FinishReason if not reason.is_failure]) == 9


def test_delta_carries_offset_and_finish():
    answer = to_proto.Answer("r", spec(), None)
    finish = SequenceFinish(FinishReason.STOP_STRING, matched_string="x", output_tokens=9)
    (sequence,) = from_delta(Delta(5, [1, 2], "ab", finish), answer).sequences
    assert (sequence.offset, list(sequence.token_ids), sequence.text) == (5, [1, 2], "ab")
    assert sequence.finish.WhichOneof("matched") == "matched_string"
    assert sequence.finish.output_tokens == 9


def test_sum_of_log_probabilities_is_told_even_when_it_is_zero():
    answer = to_proto.Answer("r", spec(), None)
    for value in (None, 0.0):
        finish = SequenceFinish(FinishReason.EOS, cumulative_logprob=value)
        (sequence,) = from_delta(Delta(0, [], "", finish), answer).sequences
        assert sequence.finish.HasField("cumulative_logprob") is (value is not None)


def test_token_ids_are_left_out_when_not_wanted():
    answer = to_proto.Answer("r", spec(output=pb.OutputOptions(token_ids=False)), None)
    (sequence,) = from_delta(Delta(0, [1], "a"), answer).sequences
    assert not sequence.token_ids


def effective(message, on_attach=False):
    """The options in force, as a request is told them."""
    request = to_request(message)
    drawn = {"temperature": 0.5, "top_p": 0.25, "top_k": 3, "min_p": 0.125, "seed": 4}
    params = msgspec.structs.replace(request.params, **drawn)
    accepted = Accepted(request, params, "m", [1, 2], 7, [], None)
    return to_proto.from_started(Started(0), to_proto.Answer("r", message, accepted, on_attach)).effective


def test_options_in_force_are_told_with_every_default():
    told = effective(
        spec(
            sampling=pb.SamplingOptions(logit_bias={3: -2.0}, bad_words=["b"]),
            stop=pb.StopOptions(repetition=pb.RepetitionStop(max_pattern_tokens=4, count=3)),
            constraint=pb.Constraint(regex="a"),
            output=pb.OutputOptions(logprobs=0, coalesce_tokens=0),
            scheduling=pb.SchedulingOptions(priority=-2),
            num_sequences=3,
            truncate_prompt_tokens=8,
        )
    )
    assert (told.request_id, told.model, told.num_sequences, told.truncate_prompt_tokens) == ("r", "m", 3, 8)
    assert (told.sampling.temperature, told.sampling.seed, told.sampling.repetition_penalty) == (0.5, 4, 1)
    assert (dict(told.sampling.logit_bias), list(told.sampling.bad_words)) == ({3: -2.0}, ["b"])
    repetition = told.stop.repetition
    assert told.stop.max_tokens == 7
    assert (repetition.min_pattern_tokens, repetition.max_pattern_tokens, repetition.count) == (1, 4, 3)
    assert told.constraint.regex == "a"
    assert told.output.HasField("logprobs")
    assert (told.output.text, told.output.token_ids, told.output.coalesce_tokens) == (True, True, 1)
    assert told.scheduling.priority == -2
    assert told.WhichOneof("prompt") is None


def test_constraint_that_is_not_in_force_is_not_told():
    assert not effective(spec(constraint=pb.Constraint(json_object=False))).HasField("constraint")


def test_options_of_the_other_kind_of_call_are_not_in_force():
    output = pb.OutputOptions(initial_credit=3, progress_interval=duration_pb2.Duration(seconds=1))
    told = [effective(spec(output=output), on_attach).output for on_attach in (False, True)]
    assert [each.HasField("initial_credit") for each in told] == [False, True]
    assert [each.HasField("progress_interval") for each in told] == [True, False]


def test_requests_are_of_their_session_or_else_of_their_connection():
    peer = "ipv4:10.0.0.1:1234"
    callers = [from_proto.caller(session_id, peer, "") for session_id in ("", "a", peer)]
    assert callers == ["peer ipv4:10.0.0.1:1234", "session a", "session ipv4:10.0.0.1:1234"]
    assert from_proto.caller("a", peer, "principal ann") == "principal ann"
    with pytest.raises(InvalidRequestError, match=r"scheduling\.session_id"):
        from_proto.caller("x" * 257, peer, "principal ann")


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(messages_of(pb.GenerationSpec.DESCRIPTOR))
def test_any_message_is_a_request_or_an_error_with_its_field(message):
    parsed = pb.GenerationSpec.FromString(message.SerializeToString())
    problem = None
    try:
        to_request(parsed).params.verify(1000)
        assert from_proto.coalesce(parsed) >= 0
    except InvalidRequestError as error:
        problem = error
    assert problem is None or (problem.field and problem.description)
