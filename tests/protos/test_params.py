"""Parameters of a request: what is out of bounds is refused with the path of its field."""

from __future__ import annotations

import math
from typing import Any

import pytest

from protos.errors import InvalidRequestError
from protos.messages import GrammarSpec, Repetition
from protos.params import (
    MAX_GRAMMAR_LENGTH,
    MAX_STOP_STRING_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)

VOCAB_SIZE = 100
NAN, INF = math.nan, math.inf

REFUSED: list[tuple[str, str, list[Any]]] = [
    ("temperature", "sampling.temperature", [-1.0, -1e-9, 100.1, 1e300, NAN, INF, -INF]),
    ("top_p", "sampling.top_p", [0.0, -0.1, 1.0000001, NAN, INF, -INF]),
    ("top_k", "sampling.top_k", [-1, -(1 << 62)]),
    ("min_p", "sampling.min_p", [-0.1, 1.0000001, NAN, INF, -INF]),
    ("presence_penalty", "sampling.presence_penalty", [-2.1, 2.1, NAN]),
    ("frequency_penalty", "sampling.frequency_penalty", [-2.1, 2.1, NAN]),
    ("repetition_penalty", "sampling.repetition_penalty", [0.0, -1.0, 1e-4, 1e9, NAN, INF]),
    ("logit_bias", "sampling.logit_bias", [{0: 100.1}, {0: NAN}, {VOCAB_SIZE: 1.0}, dict.fromkeys(range(1025), 1.0)]),
    ("allowed_token_ids", "sampling.allowed_token_ids", [(), (VOCAB_SIZE,), (-1,), (0,) * (VOCAB_SIZE + 1)]),
    ("bad_words", "sampling.bad_words", [("",), ("x" * 65,), ("x",) * 129]),
    (
        "bad_token_sequences",
        "sampling.bad_token_sequences",
        [((),), ((VOCAB_SIZE,),), ((1,) * 65,), ((1,),) * 129],
    ),
    ("seed", "sampling.seed", [-1, 1 << 64]),
    ("max_tokens", "stop.max_tokens", [0, -1]),
    ("min_tokens", "stop.min_tokens", [-1]),
    ("time_limit", "stop.time_limit", [-1e-9, -1.0, NAN, -INF]),
    (
        "stop",
        "stop.strings",
        [("",), ("a", ""), ("x" * (MAX_STOP_STRING_LENGTH + 1),), ("a",) * (MAX_STOP_STRINGS + 1)],
    ),
    ("truncate_prompt_tokens", "truncate_prompt_tokens", [0, -1]),
    ("n", "num_sequences", [0, -1, 129]),
    (
        "repetition",
        "stop.repetition",
        [Repetition(0, 1, 2), Repetition(2, 1, 2), Repetition(1, 257, 2), Repetition(1, 1, 1)],
    ),
    ("grammar", "constraint.regex", [GrammarSpec("regex", "x" * (MAX_GRAMMAR_LENGTH + 1))]),
    ("logprobs", "output.logprobs", [-1, 129]),
    ("prompt_logprobs", "output.prompt_logprobs", [-1, 129]),
    ("logprob_token_ids", "output.logprob_token_ids", [(VOCAB_SIZE,), (0,) * 129]),
    ("stop_token_ids", "stop.token_ids", [(-1,), (VOCAB_SIZE,), (0, 1 << 40), (1,) * (MAX_STOP_TOKEN_IDS + 1)]),
]
TAKEN: dict[str, list[Any]] = {
    "temperature": [None, 0.0, 1e-12, 1.0, 100.0],
    "top_p": [None, 1e-9, 0.5, 1.0],
    "top_k": [None, 0, 1, VOCAB_SIZE * 10],
    "min_p": [None, 0.0, 1.0],
    "presence_penalty": [-2.0, 2.0],
    "frequency_penalty": [-2.0, 2.0],
    "repetition_penalty": [0.001, 1.0, 100.0],
    "logit_bias": [{}, {0: -100.0, VOCAB_SIZE - 1: 100.0}],
    "allowed_token_ids": [None, (0,), tuple(range(VOCAB_SIZE))],
    "bad_words": [(), ("x" * 64,), ("x",) * 128],
    "bad_token_sequences": [(), ((0,), (1, 2))],
    "truncate_prompt_tokens": [None, 1, 1 << 30],
    "n": [1, 128],
    "repetition": [None, Repetition(1, 256, 2)],
    "grammar": [None, GrammarSpec("json_object")],
    "logprobs": [None, 0, 128],
    "prompt_logprobs": [None, 0, 128],
    "logprob_token_ids": [(), (0,) * 128],
    "seed": [None, 0, (1 << 64) - 1],
    "max_tokens": [None, 1, 1 << 30],
    "min_tokens": [0, 1, 1 << 20],
    "time_limit": [None, 0.0, 1e-3, 1e9],
    "stop": [(), ("x",), ("x" * MAX_STOP_STRING_LENGTH,), ("x",) * MAX_STOP_STRINGS, ("🦩\n",)],
    "stop_token_ids": [(), (0, VOCAB_SIZE - 1), (1,) * MAX_STOP_TOKEN_IDS],
}


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [pytest.param(name, path, v, id=f"{name}={str(v)[:24]}") for name, path, values in REFUSED for v in values],
)
def test_value_out_of_bounds_is_refused_with_its_path(name: str, path: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{name: value}).verify(VOCAB_SIZE)
    assert caught.value.field == path
    assert caught.value.status == "INVALID_ARGUMENT"
    assert len(str(caught.value)) < 200, "the message does not repeat a long value"


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("max_tokens", "stop.max_tokens", 5.5),
        ("max_tokens", "stop.max_tokens", "5"),
        ("seed", "sampling.seed", 1.5),
        ("temperature", "sampling.temperature", "1"),
        ("stop", "stop", "ab"),
        ("stop_token_ids", "stop_token_ids", (1.5,)),
        ("bad_words", "params", ("\ud800",)),
        ("logit_bias", "logit_bias", {"a": 1.0}),
        ("grammar", "grammar", "a+"),
        ("temperature", "params", object()),
    ],
)
def test_value_of_another_type_is_refused_here_and_not_by_the_core(name: str, field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{name: value}).verify(VOCAB_SIZE)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("name", "value"),
    [pytest.param(name, v, id=f"{name}={str(v)[:24]}") for name, values in TAKEN.items() for v in values],
)
def test_value_within_bounds_is_taken(name: str, value: Any) -> None:
    SamplingParams(**{name: value}).verify(VOCAB_SIZE)


def test_min_tokens_over_max_tokens_is_refused() -> None:
    SamplingParams(min_tokens=5, max_tokens=5).verify(VOCAB_SIZE)
    with pytest.raises(InvalidRequestError, match=r"stop\.min_tokens: 6 is more than max_tokens, 5"):
        SamplingParams(min_tokens=6, max_tokens=5).verify(VOCAB_SIZE)


def test_every_bounded_field_is_covered_here() -> None:
    unbounded = {"include_match", "ignore_eos", "skip_special_tokens", "processed_logprobs"}
    assert {name for name, _, _ in REFUSED} | unbounded == set(SamplingParams.__struct_fields__)
    assert TAKEN.keys() | unbounded == set(SamplingParams.__struct_fields__)
