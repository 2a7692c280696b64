"""LLM: the synchronous shell."""

import asyncio
import json
import math

import pytest

from async_engine.chat_parser import ToolCallDelta
from async_engine.llm import LLM
from async_engine.outputs import Delta, Extra, PromptLogprobs, SequenceFinish, Summary
from async_engine.request import ChatPrompt
from async_engine.results import ToolCall, gather
from protos.errors import InvalidRequestError
from protos.messages import FinishReason, GrammarSpec
from protos.params import SamplingParams
from tests.async_engine.test_stream import make_logprobs


@pytest.fixture(scope="module")
def llm():
    with LLM("null", progress=False, max_num_seqs=4) as engine:
        yield engine


def test_outputs_come_in_the_order_of_the_prompts(llm):
    prompts = [f"prompt {i}" for i in range(30)]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=5, temperature=0))
    assert [output.prompt for output in outputs] == prompts
    for output in outputs:
        assert bytes(output.token_ids).decode() == output.text
        assert output.finish.reason is FinishReason.MAX_TOKENS
        assert output.summary.output_tokens == 5


def test_params_may_differ_by_prompt(llm):
    outputs = llm.generate(["a", [1, 2, 3]], [SamplingParams(max_tokens=2), SamplingParams(max_tokens=7)])
    assert [len(output.token_ids) for output in outputs] == [2, 7]
    with pytest.raises(ValueError, match="2 prompts, but 1 params"):
        llm.generate(["a", "b"], [SamplingParams()])


def test_one_prompt_may_be_given_by_itself(llm):
    params = SamplingParams(max_tokens=1)
    for prompt in ("text", [1, 2, 3], ChatPrompt(messages=[{"role": "user", "content": "x"}])):
        assert len(llm.generate(prompt, params)) == 1


def test_chat_renders_the_template(llm):
    conversation = [{"role": "user", "content": "x"}]
    (one,) = llm.chat(conversation, SamplingParams(max_tokens=1))
    assert one.summary.prompt_tokens == len("user: x\nassistant: ")
    assert len(llm.chat([conversation, conversation], SamplingParams(max_tokens=1))) == 2


def test_bad_prompt_raises_and_the_engine_goes_on(llm):
    with pytest.raises(InvalidRequestError, match="outside the vocabulary"):
        llm.generate(["fine", [999]], SamplingParams(max_tokens=1))
    assert llm.generate("x", SamplingParams(max_tokens=1))


def test_it_works_inside_a_running_loop(llm):
    async def main():
        return llm.generate("x", SamplingParams(max_tokens=3))

    assert len(asyncio.run(main())[0].token_ids) == 3


def test_close_ends_the_core_and_is_idempotent():
    engine = LLM("null", progress=False)
    process = engine._llm.core._process
    engine.close()
    engine.close()
    assert not process.is_running


def test_sequences_of_one_prompt_are_told_apart_and_replay(llm):
    params = SamplingParams(n=4, max_tokens=6, seed=5, temperature=1.0)
    first, again = (llm.generate("x", params)[0] for _ in range(2))
    texts = [sequence.text for sequence in first.sequences]
    assert len(set(texts)) == 4
    assert texts == [sequence.text for sequence in again.sequences]
    assert first.text == llm.generate("x", SamplingParams(max_tokens=6, seed=5, temperature=1.0))[0].text
    assert first.summary.output_tokens == 24


def test_more_sequences_than_rows_run_one_after_the_other(llm):
    outputs = llm.generate(["a", "b", "c"], SamplingParams(n=3, max_tokens=4))
    assert [[len(sequence.token_ids) for sequence in output.sequences] for output in outputs] == [[4, 4, 4]] * 3


def test_log_probabilities_are_parallel_to_the_tokens(llm):
    params = SamplingParams(max_tokens=5, logprobs=2, prompt_logprobs=1, logprob_token_ids=(7,))
    (output,) = llm.generate([1, 2, 3, 4], params)
    logprobs = output.sequences[0].logprobs
    assert len(logprobs) == len(logprobs.ranks) == len(output.token_ids) == 5
    assert logprobs.width == 3
    assert list(logprobs.candidates(4))[-1] == 7
    assert output.finish.cumulative_logprob == pytest.approx(sum(logprobs.logprobs))
    assert len(output.prompt_logprobs) == 3
    assert output.prompt_logprobs.width == 2


def test_score_has_a_log_probability_for_each_token_but_the_first(llm):
    score, alone = llm.score([[1, 2, 3, 4], [1]])
    assert score.token_ids == [1, 2, 3, 4]
    assert len(score.logprobs) == 3
    assert score.total == pytest.approx(sum(score.logprobs))
    assert score.perplexity == pytest.approx(math.exp(-score.total / 3))
    assert (alone.logprobs, alone.perplexity) == ([], 1.0)


def test_scored_text_has_the_special_tokens_that_a_prompt_has(llm):
    (score,) = llm.score(["ab"])
    (output,) = llm.generate("ab", SamplingParams(max_tokens=1))
    assert len(score.token_ids) == output.summary.prompt_tokens == 3


def test_alternatives_are_spelt_behind_the_text_before(llm):
    euro = list("€".encode())
    assert llm.alternatives(euro[:2], [euro[2], ord("x")]) == ["€", "\ufffdx"]
    assert llm.alternatives(list(b"ab"), [ord("c"), euro[0]]) == ["c", ""]
    assert llm.alternatives(list(b"ab"), [257]) == ["<|eos|>"]


def test_tool_calls_and_reasoning_are_whole_in_the_result():
    pieces = [
        Delta(0, [1], "a", None, 0, Extra(None, "th", [ToolCallDelta(0, "c0", "f", '{"a')])),
        Delta(
            1,
            [2],
            "b",
            None,
            0,
            Extra(None, "ink", [ToolCallDelta(0, "", "", '": 1}'), ToolCallDelta(1, "c1", "g", "")]),
        ),
        Delta(2, [], "", SequenceFinish(FinishReason.EOS), 0),
    ]

    async def events():
        for event in [*pieces, Summary(1, 0, 2, 0.0, 0.0, 0.0, 0)]:
            yield event

    (sequence,) = asyncio.run(gather("x", events())).sequences
    assert (sequence.text, sequence.reasoning) == ("ab", "think")
    assert sequence.tool_calls == [ToolCall("c0", "f", '{"a": 1}'), ToolCall("c1", "g", "")]


def test_parts_of_a_prompts_log_probabilities_are_joined_and_sequences_put_in_order():
    finish = SequenceFinish(FinishReason.EOS)

    async def events():
        yield PromptLogprobs(1, make_logprobs([1, 2]))
        yield PromptLogprobs(3, make_logprobs([3]))
        yield Delta(0, [8], "b", finish, 1)
        yield Delta(0, [7], "a", finish, 0)
        yield Summary(4, 0, 2, 0.0, 0.0, 0.0, 0)

    output = asyncio.run(gather("x", events()))
    assert output.prompt_logprobs == make_logprobs([1, 2, 3])
    assert [sequence.text for sequence in output.sequences] == ["a", "b"]


def test_chat_takes_calls_and_reasoning_out_of_the_text(llm):
    answer = '<think>hm</think>ok<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    params = SamplingParams(grammar=GrammarSpec("choices", json.dumps([answer])))
    conversation = [{"role": "user", "content": "x"}]
    (output,) = llm.chat(conversation, params, tool_format="hermes", reasoning_format="think")
    (sequence,) = output.sequences
    assert (sequence.text, sequence.reasoning) == ("ok", "hm")
    assert [(call.name, call.arguments) for call in sequence.tool_calls] == [("f", "{}")]
    (plain,) = llm.chat(conversation, params)
    assert plain.text == answer


def test_batch_of_many_sequences_waits_rather_than_being_refused(llm):
    outputs = llm.generate(["x"] * 12, SamplingParams(n=128, max_tokens=1))
    assert [len(output.sequences) for output in outputs] == [128] * 12


def test_parameter_of_a_wrong_type_raises_and_the_engine_goes_on(llm):
    with pytest.raises(InvalidRequestError, match=r"stop\.max_tokens"):
        llm.generate("x", SamplingParams(max_tokens=5.5))
    assert llm.generate("x", SamplingParams(max_tokens=1))


def test_one_text_may_be_scored_by_itself(llm):
    assert len(llm.score("hello")) == len(llm.score([1, 2, 3])) == 1


def test_neighbouring_pieces_of_a_call_become_one():
    whole = Extra(None, "", [ToolCallDelta(0, "c0", "f", "{")])
    for piece in ('"a"', ": 1}"):
        whole.extend(Extra(None, "", [ToolCallDelta(0, "", "", piece)]))
    whole.extend(Extra(None, "", [ToolCallDelta(1, "c1", "g", "{}")]))
    assert whole.tool_calls == [ToolCallDelta(0, "c0", "f", '{"a": 1}'), ToolCallDelta(1, "c1", "g", "{}")]


def test_calls_of_several_sequences_have_ids_of_their_own(llm):
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    params = SamplingParams(n=2, grammar=GrammarSpec("choices", json.dumps([call])))
    (output,) = llm.chat([{"role": "user", "content": "x"}], params, tool_format="hermes")
    ids = {call.id for sequence in output.sequences for call in sequence.tool_calls}
    assert len(ids) == 2


def test_tools_and_other_variables_reach_the_chat_template(llm, monkeypatch):
    monkeypatch.setattr(llm._llm.model.tokenizer, "chat_template", "{{ tools[0].name }}{{ other }}")
    conversation, params = [{"role": "user", "content": "x"}], SamplingParams(max_tokens=1)
    (output,) = llm.chat(conversation, params, tools=[{"name": "abc"}], template_kwargs={"other": "defgh"})
    assert output.summary.prompt_tokens == len("abcdefgh")
