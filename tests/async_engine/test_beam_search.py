"""Beam search against an exhaustive one, over a scripted model."""

import asyncio
import itertools
import math
from types import SimpleNamespace

import pytest

from async_engine.beam_search import Beam, beam_search
from async_engine.logprobs import Logprobs
from async_engine.outputs import Delta, Extra, SequenceFinish, Summary
from protos.errors import InvalidRequestError
from protos.messages import FinishReason

EOS = 0
VOCAB = range(4)


def distribution(context):
    """Log-probabilities of the next token: any, but fixed, function of what came before."""
    weights = [1 + (7 * len(context) + 3 * sum(context) + 5 * token * token) % 11 for token in VOCAB]
    return [math.log(weight / sum(weights)) for weight in weights]


class ScriptedLLM:
    """Answers one-token requests as AsyncLLM does."""

    def __init__(self, max_model_len=100):
        self.model = SimpleNamespace(eos_token_ids=(EOS,))
        self.ready = SimpleNamespace(max_model_len=max_model_len)
        self.num_requests = 0

    async def generate(self, request):
        self.num_requests += 1
        params = request.params
        assert (params.max_tokens, params.ignore_eos) == (1, True)
        ranked = sorted(VOCAB, key=lambda token: -distribution(request.prompt)[token])[: params.logprobs]
        logprobs = Logprobs(len(ranked))
        logprobs.logprobs.append(distribution(request.prompt)[ranked[0]])
        logprobs.ranks.append(1)
        logprobs.top_ids += ranked
        logprobs.top_logprobs += [distribution(request.prompt)[token] for token in ranked]
        yield Delta(0, [ranked[0]], "", SequenceFinish(FinishReason.MAX_TOKENS, output_tokens=1), 0, Extra(logprobs))
        yield Summary(len(request.prompt), 0, 1, 0.0, 0.0, 0.0, 0)


def every_output(prompt, max_tokens):
    """(tokens, log-probability, ended) of every output there is."""
    for length in range(max_tokens + 1):
        for tokens in itertools.product([token for token in VOCAB if token != EOS], repeat=length):
            total, context = 0.0, list(prompt)
            for token in tokens:
                total += distribution(context)[token]
                context.append(token)
            if length < max_tokens:
                yield Beam(list(tokens), total + distribution(context)[EOS], True)
            else:
                yield Beam(list(tokens), total, False)


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
def test_beams_wide_enough_to_miss_nothing_find_the_best_there_are(length_penalty):
    prompt, max_tokens, width = [1, 2], 3, 40
    found = asyncio.run(beam_search(ScriptedLLM(), prompt, width, max_tokens, length_penalty))
    best = sorted(every_output(prompt, max_tokens), key=lambda beam: -beam.score(length_penalty))[:width]
    assert [beam.score(length_penalty) for beam in found] == pytest.approx(
        [beam.score(length_penalty) for beam in best]
    )
    assert found[0].token_ids == best[0].token_ids


def test_narrow_beams_ask_for_no_more_than_their_width_a_step():
    llm = ScriptedLLM()
    found = asyncio.run(beam_search(llm, [1], 2, 5))
    assert len(found) == 2
    assert llm.num_requests <= 1 + 4 * 2
    assert found[0].score(1.0) >= found[1].score(1.0)


def test_one_beam_is_greedy_but_for_the_end():
    (beam,) = asyncio.run(beam_search(ScriptedLLM(), [3], 1, 3, length_penalty=0.0))
    context = [3]
    for token in beam.token_ids:
        assert distribution(context)[token] == max(distribution(context)[other] for other in VOCAB if other != EOS)
        context.append(token)


def test_beams_end_with_the_context():
    found = asyncio.run(beam_search(ScriptedLLM(max_model_len=4), [1, 2], 3, 50))
    assert max(len(beam.token_ids) for beam in found) == 2


@pytest.mark.parametrize(("field", "options"), [("width", (0, 5)), ("width", (65, 5)), ("max_tokens", (2, 0))])
def test_sizes_out_of_bounds_are_refused_by_name(field, options):
    with pytest.raises(InvalidRequestError) as caught:
        asyncio.run(beam_search(ScriptedLLM(), [1], *options))
    assert caught.value.field == field


def test_end_that_is_not_the_likeliest_token_is_still_an_output(monkeypatch):
    chances = [0.4, 0.6, 0.0, 0.0]  # the end has 0.4; going on for two tokens has 0.36
    monkeypatch.setattr(f"{__name__}.distribution", lambda context: [math.log(chance + 1e-9) for chance in chances])
    (beam,) = asyncio.run(beam_search(ScriptedLLM(), [3], 1, 2, length_penalty=0.0))
    assert beam == Beam([], pytest.approx(math.log(0.4)), True)


def test_score_is_per_token_and_the_end_is_one():
    assert Beam([1, 2], -6.0).score(1.0) == -3.0
    assert Beam([1, 2], -6.0, True).score(1.0) == -2.0
    assert Beam([1], -6.0, True).score(2.0) == -1.5
    assert Beam([1, 2], -6.0, True).score(0.0) == -6.0
    assert Beam([], -6.0).score(1.0) == -6.0
