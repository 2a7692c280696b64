"""What a prompt and its options become."""

import json

import pytest

from protos.tailrace.v1 import generation_pb2 as pb
from tailrace_client.spec import PATHS, Options, make_spec

VALUES = {
    "request_id": "mine",
    "model": "m",
    "adapter": "a",
    "resume_from": [1, 2],
    "logit_bias": {5: -1.5},
    "allowed_token_ids": [1],
    "bad_words": ["a", "b"],
    "bad_token_sequences": [[1, 2], [3]],
    "repetition": {"max_pattern_tokens": 8, "count": 4},
    "tool_format": "hermes",
    "reasoning_format": "auto",
    "stop": ["a", "b"],
    "stop_token_ids": [3],
    "choices": ["yes", "no"],
    "logprob_token_ids": [4],
    "json_schema": "{}",
    "regex": "a*",
    "grammar": "g",
    "structural_tag": "t",
    "cache_salt": "s",
    "session_id": "c",
    "template_kwargs": {"tools": []},
    "priority": -2,
}


PARTS = {"sampling", "stop", "constraint", "output", "scheduling", "chat"}


def fields(message, prefix=()):
    """Paths of all fields of a spec, those of its parts included."""
    for field in message.DESCRIPTOR.fields:
        if not prefix and field.name in PARTS:
            yield from fields(getattr(message, field.name), (field.name,))
        else:
            yield (*prefix, field.name)


def test_every_field_of_a_spec_has_an_option():
    prompts = {("text",), ("token_ids",), ("chat", "messages")}
    attach_only = {("output", "initial_credit")}
    assert set(PATHS.values()) == set(fields(pb.GenerationSpec())) - prompts - attach_only
    assert set(PATHS) == set(Options.__annotations__)


@pytest.mark.parametrize("name", PATHS)
def test_an_option_sets_its_field(name):
    value = VALUES.get(name, 1)
    prompt = [{"role": "user", "content": "hi"}]
    with_it, without = make_spec(prompt, {"request_id": "x", name: value}), make_spec(prompt, {"request_id": "x"})
    assert with_it != without
    *parts, field = PATHS[name]
    target = getattr(with_it, parts[0]) if parts else with_it
    found = getattr(target, field)
    match found:
        case pb.TokenIds():
            found = list(found.ids)
        case pb.RepetitionStop():
            found = {"max_pattern_tokens": found.max_pattern_tokens, "count": found.count}
        case _ if name == "bad_token_sequences":
            found = [list(sequence.ids) for sequence in found]
        case pb.StringList():
            found = list(found.values)
        case bool() | int() | float() | str():
            found = json.loads(found) if name == "template_kwargs" else found
        case _ if hasattr(found, "ToNanoseconds"):
            found = found.ToNanoseconds() / 1e9
        case _ if hasattr(found, "items"):
            found = dict(found)
        case _:
            found = list(found)
    assert found == value


def test_none_leaves_the_default_to_the_server():
    spec = make_spec("hi", dict.fromkeys(set(PATHS) - {"request_id"}) | {"request_id": "x"})
    assert spec == pb.GenerationSpec(request_id="x", text="hi")


def test_zero_is_not_none():
    spec = make_spec("hi", {"temperature": 0, "want_text": False, "top_k": 0})
    assert spec.sampling.HasField("temperature")
    assert spec.output.HasField("text")
    assert not spec.output.text


def test_a_prompt_is_text_ids_or_messages():
    assert make_spec("hi", {}).text == "hi"
    assert list(make_spec((5, 6), {}).token_ids.ids) == [5, 6]
    assert make_spec([], {}).WhichOneof("prompt") == "token_ids"
    (message,) = make_spec([{"role": "user", "content": "hi", "name": "eve"}], {}).chat.messages
    assert (message.role, message.content, message.name) == ("user", "hi", "eve")


def test_a_turn_has_all_fields_of_a_message():
    call = {"id": "c1", "name": "f", "arguments_json": "{}"}
    (turn,) = make_spec([{"role": "assistant", "tool_calls": [call], "reasoning": "hm"}], {}).chat.messages
    assert (turn.tool_calls[0].id, turn.tool_calls[0].name, turn.reasoning) == ("c1", "f", "hm")


def test_one_stop_string_needs_no_list():
    assert list(make_spec("hi", {"stop": "END"}).stop.strings) == ["END"]


def test_a_request_gets_an_id_of_its_own():
    first, second = make_spec("hi", {}).request_id, make_spec("hi", {}).request_id
    assert first
    assert first != second


@pytest.mark.parametrize(
    ("prompt", "options", "error", "words"),
    [
        ("hi", {"max_tokns": 3}, TypeError, "max_tokns.*did you mean 'max_tokens'"),
        ("hi", {"zzz": 3}, TypeError, "'zzz'$"),
        ("hi", {"max_tokens": "three"}, TypeError, "^max_tokens: "),
        ("hi", {"top_k": -1}, ValueError, "^top_k: "),
        ("hi", {"stop_token_ids": 7}, TypeError, "^stop_token_ids: "),
        ("hi", {"time_limit": "soon"}, TypeError, "^time_limit: "),
        ("hi", {"logit_bias": [1]}, TypeError, "^logit_bias: "),
        ("hi", {"template_kwargs": {}}, TypeError, "^template_kwargs: only for a prompt of messages"),
        ([{"role": "user", "text": "hi"}], {}, TypeError, "^prompt: messages are"),
        ([{"role": "user", "content": 3}], {}, TypeError, "^prompt: messages are"),
        ([-1], {}, ValueError, "range"),
    ],
)
def test_what_cannot_be_sent_is_refused_here(prompt, options, error, words):
    with pytest.raises(error, match=words):
        make_spec(prompt, options)
