"""What the core is asked for."""

import asyncio

import msgspec
import pytest
from tokenizers import AddedToken

from async_engine.core_request import core_request, sequence_seed
from async_engine.error_status import MAX_TEXT, to_status
from async_engine.input_processor import InputProcessor
from async_engine.rendering import Renderer
from async_engine.request import GenerationRequest
from async_engine.request_state import RequestState
from async_engine.served_model import null_model
from async_engine.tokenizer import Tokenizer, byte_tokenizer
from protos.errors import InvalidRequestError
from protos.messages import FinishReason, GrammarSpec, Repetition
from protos.params import SamplingParams
from tests.async_engine.test_output_processor import Sink

MAX_MODEL_LEN = 100
MODEL = null_model("")


def ask(prompt="hi", resumed=(), **params):
    """(the accepted request, what the core is sent)"""
    request = GenerationRequest(prompt=prompt, params=SamplingParams(**params), resume_token_ids=list(resumed))
    state = RequestState("r", Sink(), list(range(7, 7 + request.params.n)))
    accepted = asyncio.run(InputProcessor(MODEL, MAX_MODEL_LEN).accept(request, state))
    return accepted, core_request(state, accepted, MODEL, MAX_MODEL_LEN, 0.0)


def test_every_sampling_option_reaches_the_device():
    options = {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 3,
        "min_p": 0.125,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "logit_bias": {3: -2.0},
        "allowed_token_ids": (3, 4),
        "seed": 9,
        "min_tokens": 2,
        "stop_token_ids": (5,),
        "ignore_eos": True,
        "logprobs": 2,
        "prompt_logprobs": 3,
        "logprob_token_ids": (6,),
        "processed_logprobs": True,
    }
    _, message = ask(**options)
    assert {name: getattr(message.sampling, name) for name in options} == options


def test_what_the_scheduler_looks_at_is_beside_the_sampling():
    grammar, repetition = GrammarSpec("regex", "a+"), Repetition(1, 2, 3)
    _, message = ask(grammar=grammar, repetition=repetition)
    assert (message.grammar, message.repetition) == (grammar, repetition)


def test_scheduling_options_reach_the_core_with_what_is_left_of_their_time():
    request = GenerationRequest(
        prompt="hi",
        params=SamplingParams(time_limit=5.0),
        priority=-2,
        adapter="a",
        cache_salt="s",
        bypass_cache=True,
        deadline=9.0,
        queue_timeout=7.0,
    )
    state = RequestState("r", Sink(), [7])
    accepted = asyncio.run(InputProcessor(MODEL, MAX_MODEL_LEN).accept(request, state))
    message = core_request(state, accepted, MODEL, MAX_MODEL_LEN, elapsed=1.0)
    assert (message.priority, message.cache_salt, message.bypass_cache) == (-2, "s", True)
    assert message.adapter == "a"
    assert (message.deadline, message.queue_timeout, message.time_limit) == (8.0, 6.0, 4.0)


def test_output_without_a_limit_ends_by_the_context_and_not_by_its_length():
    accepted, message = ask("hi")
    assert accepted.max_tokens == MAX_MODEL_LEN - len(accepted.prompt_token_ids)
    assert message.max_tokens > accepted.max_tokens


def test_drawn_seeds_are_numbers_that_every_client_language_holds():
    seeds = {ask()[0].params.seed for _ in range(50)}
    assert len(seeds) == 50
    assert max(seeds) < 1 << 53


def test_sequences_are_siblings_with_seeds_of_their_own():
    _, message = ask(n=3, seed=5)
    assert (message.handle, message.sampling.seed) == (7, 5)
    assert [sibling.handle for sibling in message.siblings] == [8, 9]
    assert [sibling.seed for sibling in message.siblings] == [sequence_seed(5, 1), sequence_seed(5, 2)]


def test_seeds_of_sequences_are_apart_and_fit_64_bits():
    seeds = {sequence_seed(seed, index) for seed in (0, 1, 2, (1 << 64) - 1) for index in range(128)}
    assert len(seeds) == 4 * 128
    assert all(0 <= seed < 1 << 64 for seed in seeds)
    assert sequence_seed(5, 0) == 5


def test_bad_words_are_spelt_at_a_start_and_behind_a_blank():
    _, message = ask(bad_words=("ab", " cd"), bad_token_sequences=((1, 2),))
    assert message.sampling.bad_words == ((1, 2), tuple(b"ab"), tuple(b" ab"), tuple(b"cd"), tuple(b" cd"))


def test_bad_word_that_the_tokenizer_makes_nothing_of_is_left_out(monkeypatch):
    monkeypatch.setattr(MODEL.tokenizer, "encode", lambda text, add_special_tokens: list(text.strip().encode()))
    _, message = ask([1], bad_words=("\x0b", "a"))
    assert message.sampling.bad_words == (tuple(b"a"), tuple(b"a"))


def test_largest_values_of_the_wire_fit_what_the_device_counts_in():
    largest = (1 << 32) - 1
    _, message = ask(min_tokens=largest, max_tokens=None, top_k=largest)
    assert message.sampling.min_tokens <= MAX_MODEL_LEN
    assert message.sampling.top_k <= MODEL.vocab_size


def test_of_a_longer_prompt_the_last_tokens_are_kept():
    text = "x" * 300 + "end"
    accepted, _ = ask(text, truncate_prompt_tokens=3)
    assert bytes(accepted.prompt_token_ids) == b"end"
    accepted, _ = ask(list(b"abcdef"), truncate_prompt_tokens=2)
    assert bytes(accepted.prompt_token_ids) == b"ef"
    accepted, _ = ask(list(b"ab"), truncate_prompt_tokens=5)
    assert bytes(accepted.prompt_token_ids) == b"ab"


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("text", {"prompt": "x" * 100}),
        ("token_ids", {"prompt": [1] * 100}),
        ("token_ids", {"prompt": []}),
        ("resume_from", {"prompt": [1] * 60, "resumed": [1] * 41}),
        ("resume_from", {"resumed": [1] * 3, "max_tokens": 2}),
        ("resume_from", {"resumed": [1], "n": 2}),
        ("resume_from", {"resumed": [1 << 40]}),
    ],
)
def test_length_is_checked_against_the_field_at_fault(field, arguments):
    with pytest.raises(InvalidRequestError) as caught:
        ask(**arguments)
    assert caught.value.field == field


@pytest.mark.parametrize("field", ["tool_format", "reasoning_format"])
def test_unknown_format_is_refused_with_those_there_are(field):
    request = GenerationRequest(prompt="hi", **{field: "nonsense"})
    with pytest.raises(InvalidRequestError, match=r"auto, ") as caught:
        asyncio.run(InputProcessor(MODEL, MAX_MODEL_LEN).accept(request, RequestState("r", Sink(), [1])))
    assert caught.value.field == f"output.{field}"


def test_output_whose_text_is_not_wanted_is_not_taken_apart():
    params = SamplingParams(stop=("STOP",))
    for wants_text in (True, False):
        request = GenerationRequest(prompt="hi", params=params, wants_text=wants_text, tool_format="hermes")
        rendering = Renderer(MODEL.tokenizer, request, params, [1]).rendering()
        assert rendering.matcher is not None
        assert (rendering.parser is not None) is rendering.wants_text is wants_text


def test_reported_candidates_are_the_likeliest_and_those_asked_for():
    request = GenerationRequest(prompt="hi")
    widths = [
        Renderer(MODEL.tokenizer, request, SamplingParams(**options), [1]).rendering().logprobs_width
        for options in ({}, {"logprobs": 0}, {"logprobs": 2, "logprob_token_ids": (5,)}, {"logprob_token_ids": (5,)})
    ]
    assert widths == [None, 0, 3, 1]


def test_description_of_a_field_is_as_short_as_the_message():
    status = to_status(InvalidRequestError("stop.strings", "x" * 10 * MAX_TEXT), "r")
    assert status.ByteSize() < 4 * MAX_TEXT


def test_format_looks_at_the_end_of_a_long_prompt():
    request = GenerationRequest(prompt="x", reasoning_format="think")
    prompt = list(b"x" * 200 + b"<think>")
    rendering = Renderer(MODEL.tokenizer, request, SamplingParams(), prompt).rendering()
    assert rendering.parser.push("hm").reasoning == "hm"


def test_text_goes_on_where_the_prompt_ends_inside_a_character():
    *start, last = "€".encode()
    rendering = Renderer(MODEL.tokenizer, GenerationRequest(prompt=start), SamplingParams(), start).rendering()
    assert rendering.detokenizer.push((last,)) == "€"


@pytest.mark.parametrize(
    ("resumed", "params", "reason"),
    [
        ([5, 9], {}, FinishReason.EOS),
        ([5, 9], {"ignore_eos": True}, None),
        ([5, 9], {"min_tokens": 2}, FinishReason.EOS),
        ([5, 9], {"min_tokens": 3}, None),
        ([9, 5], {}, None),
        ([9, 5], {"stop_token_ids": (5,)}, FinishReason.STOP_TOKEN),
        ([9, 5], {"stop_token_ids": (5,), "min_tokens": 3}, None),
        ([9, 5], {"max_tokens": 2}, FinishReason.MAX_TOKENS),
        ([9, 5], {"max_tokens": 3}, None),
    ],
)
def test_resumed_output_may_be_whole_already(resumed, params, reason):
    model = msgspec.structs.replace(MODEL, eos_token_ids=(9,))
    request = GenerationRequest(prompt="hi", params=SamplingParams(**params), resume_token_ids=resumed)
    state = RequestState("r", Sink(), [7])
    accepted = asyncio.run(InputProcessor(model, MAX_MODEL_LEN).accept(request, state))
    assert (accepted.complete and accepted.complete.reason) == reason


@pytest.mark.parametrize(("tool_format", "text"), [("hermes", "<tool_call>"), ("", "")])
def test_special_tokens_that_a_format_is_told_by_are_shown_to_it(tool_format, text):
    backend = byte_tokenizer()._backend
    backend.add_special_tokens([AddedToken("<tool_call>", special=True)])
    request = GenerationRequest(prompt="x", tool_format=tool_format)
    rendering = Renderer(Tokenizer(backend), request, SamplingParams(), [1]).rendering()
    assert rendering.detokenizer.push((backend.token_to_id("<tool_call>"),)) == text


def test_resumed_output_that_fills_the_context_is_whole():
    accepted, _ = ask([1] * 60, [1] * 40)
    assert accepted.complete.reason is FinishReason.CONTEXT_FULL
    assert accepted.complete.output_tokens == 40
    assert ask([1] * 60, [1] * 39)[0].complete is None
    assert ask([1] * 60, [1] * 40, max_tokens=40)[0].complete.reason is FinishReason.MAX_TOKENS
