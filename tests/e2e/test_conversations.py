"""Conversations: turns that share a prefix, and output that is taken apart into reasoning, calls and text."""

import pytest

from protos.tailrace.v1 import generation_pb2 as pb
from tests.e2e.serving import run, serving
from tests.e2e.test_features import sequences_of

ANSWER = '<think>two\nlines</think>Let me see.<tool_call>{"name": "add", "arguments": {"a": 1, "b": [2]}}</tool_call>'


def chat_spec(messages, max_tokens=300, **fields):
    prompt = pb.ChatPrompt(messages=[pb.ChatMessage(**message) for message in messages])
    return pb.GenerationSpec(chat=prompt, stop=pb.StopOptions(max_tokens=max_tokens), **fields)


def test_next_turn_finds_the_turns_before_it_in_the_cache():
    async def main():
        async with serving() as (_, stub, _):
            messages = [{"role": "user", "content": "a question of some length, so that it fills blocks"}]
            cached = []
            for _ in range(3):
                answer = await stub.Generate(pb.GenerateRequest(spec=chat_spec(messages, 40)))
                cached.append((answer.started.cached_tokens, answer.summary.prompt_tokens))
                messages.append({"role": "assistant", "content": answer.output.sequences[0].text})
                messages.append({"role": "user", "content": "and then?"})
            return cached

    first, second, third = run(main)
    assert first[0] == 0
    # All of the turn before but its last, partly filled block, and the words that led to its answer.
    for before, after in ((first, second), (second, third)):
        assert before[1] - 16 < after[0] < after[1]


@pytest.mark.parametrize("cut", [0, 5, 30, 60])
def test_reasoning_and_tool_calls_arrive_as_deltas_of_their_own(cut):
    async def main():
        async with serving(null_step_ms=1) as (_, stub, _):
            spec = chat_spec(
                [{"role": "user", "content": "add"}],
                constraint=pb.Constraint(choices=pb.StringList(values=[ANSWER])),
                output=pb.OutputOptions(tool_format="hermes", reasoning_format="think"),
                resume_from=pb.TokenIds(ids=ANSWER.encode()[:cut]),
            )
            messages = [m async for m in stub.GenerateStream(pb.GenerateStreamRequest(spec=spec))]
            return messages, await stub.Generate(pb.GenerateRequest(spec=spec))

    messages, answer = run(main)
    parts = [part for message in messages for part in message.delta.sequences]
    assert bytes(i for part in parts for i in part.token_ids) == ANSWER.encode()[cut:]
    (whole,) = answer.output.sequences
    assert "".join(part.text for part in parts) == whole.text == "Let me see."[max(0, cut - 24) :]
    assert "".join(part.reasoning for part in parts) == whole.reasoning == "two\nlines"[max(0, cut - 7) :]
    for calls in ([call for part in parts for call in part.tool_calls], whole.tool_calls):
        assert [call.name for call in calls if call.name] == ["add"]
        assert {call.index for call in calls} == {0}
        assert "".join(call.arguments for call in calls) == '{"a": 1, "b": [2]}'
        assert len([call.id for call in calls if call.id]) == 1


def test_text_is_left_alone_unless_a_format_is_asked_for():
    async def main():
        async with serving() as (_, stub, _):
            spec = chat_spec(
                [{"role": "user", "content": "add"}],
                constraint=pb.Constraint(choices=pb.StringList(values=[ANSWER])),
                output=pb.OutputOptions(tool_format="auto", reasoning_format="auto"),  # the template knows none
            )
            return [m async for m in stub.GenerateStream(pb.GenerateStreamRequest(spec=spec))]

    ((_, texts, _, _),) = sequences_of(run(main)).values()
    assert "".join(texts) == ANSWER
