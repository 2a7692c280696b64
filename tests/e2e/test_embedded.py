"""The features of a generation with the real model, through the whole engine."""

import json
import math

import pytest
from jsonschema import Draft202012Validator

from async_engine.llm import LLM
from protos.messages import FinishReason, GrammarSpec, Repetition
from protos.params import SamplingParams

pytestmark = pytest.mark.embedded
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "pets": {"type": "array", "items": {"enum": ["cat", "dog"]}, "maxItems": 2},
    },
    "required": ["name", "age", "pets"],
    "additionalProperties": False,
}
QUESTION = [{"role": "user", "content": "Invent a person and describe them as JSON."}]


@pytest.fixture(scope="module")
def llm():
    with LLM(progress=False, max_num_seqs=16) as engine:
        yield engine


def test_answers_follow_a_schema_in_a_batch_with_free_ones(llm):
    schema = GrammarSpec("json_schema", json.dumps(SCHEMA))
    params = [
        SamplingParams(max_tokens=120, temperature=0, grammar=schema),
        SamplingParams(max_tokens=120, temperature=1.0, seed=3, grammar=schema),
        SamplingParams(max_tokens=40, temperature=0),
        SamplingParams(max_tokens=5, temperature=0, grammar=GrammarSpec("choices", '["yes", "no"]')),
    ]
    greedy, drawn, free, choice = llm.chat([QUESTION] * 4, params)
    for output in (greedy, drawn):
        Draft202012Validator(SCHEMA).validate(json.loads(output.text))
        assert output.finish.reason in (FinishReason.CONSTRAINT_DONE, FinishReason.EOS)
    assert choice.text in ("yes", "no")
    (alone,) = llm.chat(QUESTION, params[2])
    assert free.text == alone.text


def test_sequences_share_the_prompt_and_the_first_is_the_one_alone(llm):
    params = SamplingParams(n=4, max_tokens=12, seed=11, temperature=1.0)
    (several,) = llm.chat(QUESTION, params)
    (alone,) = llm.chat(QUESTION, SamplingParams(max_tokens=12, seed=11, temperature=1.0))
    assert several.text == alone.text
    assert len({sequence.text for sequence in several.sequences}) == 4


def test_penalties_bias_and_bad_words_change_what_is_said(llm):
    prompt = "one two one two one two one two"
    (plain,) = llm.generate(prompt, SamplingParams(max_tokens=16, temperature=0))
    assert plain.text.startswith(" two")
    for params in (
        SamplingParams(max_tokens=16, temperature=0, bad_words=("two",)),
        SamplingParams(max_tokens=16, temperature=0, logit_bias=dict.fromkeys(plain.token_ids[:1], -100.0)),
    ):
        (changed,) = llm.generate(prompt, params)
        assert changed.token_ids[0] != plain.token_ids[0]
    (penalised,) = llm.generate(prompt, SamplingParams(max_tokens=32, temperature=0, frequency_penalty=2.0))
    assert max(map(penalised.token_ids.count, penalised.token_ids)) < max(map(plain.token_ids.count, plain.token_ids))
    (ended,) = llm.generate(prompt, SamplingParams(max_tokens=64, temperature=0, repetition=Repetition(1, 4, 4)))
    assert ended.finish.reason is FinishReason.REPETITION


def test_greedy_log_probabilities_rank_first_and_score_tells_the_likelier_text(llm):
    (output,) = llm.generate("The capital of France is", SamplingParams(max_tokens=4, temperature=0, logprobs=3))
    logprobs = output.sequences[0].logprobs
    assert logprobs.ranks == [1] * 4
    assert [next(iter(logprobs.candidates(row))) for row in range(4)] == output.token_ids
    assert all(value <= 0 for value in logprobs.logprobs)
    likely, odd = llm.score(["The capital of France is Paris.", "The capital of France is umbrella."])
    assert likely.perplexity < odd.perplexity
    assert math.isfinite(odd.perplexity)


def test_beam_search_finds_at_least_what_greedy_finds(llm):
    prompt = "The capital of France is"
    (greedy,) = llm.generate(prompt, SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=0))
    beams = llm.beam_search(prompt, width=4, max_tokens=6, length_penalty=0.0)
    assert beams[0][1].cumulative_logprob >= greedy.finish.cumulative_logprob - 1e-3
    assert len(beams) == 4
