"""LLM: the synchronous shell."""

import asyncio

import pytest

from async_engine.llm import LLM
from async_engine.request import ChatPrompt
from protos.errors import InvalidRequestError
from protos.messages import FinishReason
from protos.params import SamplingParams


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
    assert process.poll() is not None
