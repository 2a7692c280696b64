"""Whole generations against a reference that decodes everything at once: 200 of each kind of tokenizer."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest

from async_engine.output_processor import OutputProcessor
from async_engine.request_state import Rendering, RequestState
from async_engine.stop_strings import StopMatcher
from async_engine.tokenizer import byte_tokenizer
from protos.messages import EngineCoreOutputs, Finished, FinishReason
from tests.async_engine.test_detokenizer import SYNTHETIC

if TYPE_CHECKING:
    from async_engine.outputs import Extra, SequenceFinish
    from async_engine.tokenizer import Tokenizer

NUM_GENERATIONS = 200
TOKENIZERS = {"bytes": byte_tokenizer(), "llama 2": SYNTHETIC["llama 2"], "word piece": SYNTHETIC["word piece"]}
ALPHABET = "ab cé€🦩\n日"


class Output:
    """What one request's deltas add up to."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.text = ""
        self.finished: SequenceFinish | None = None

    num_merged = 0

    def sequence(self, index: int) -> Output:
        return self

    def tokens(self, token_ids: list[int], text: str, extra: Extra | None = None) -> None:
        self.token_ids += token_ids
        self.text += text

    def finish(self, finish: SequenceFinish) -> None:
        self.finished = finish

    def summary(self, summary: object) -> None:
        pass


def random_ids(tokenizer: Tokenizer, rng: random.Random) -> list[int]:
    """Text in any script, and now and then ids that no text would have."""
    text = "".join(rng.choice(ALPHABET) for _ in range(rng.randrange(1, 30)))
    token_ids = tokenizer.encode(text, False)
    for _ in range(rng.randrange(3)):
        token_ids.insert(rng.randrange(len(token_ids) + 1), rng.randrange(tokenizer.vocab_size))
    return token_ids


def first_match(text: str, stops: list[str]) -> tuple[int, int] | None:
    """(start, end) of the match that completes first, the longest of those that complete together."""
    found = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    if not found:
        return None
    end, negative_length = min(found)
    return end + negative_length, end


@pytest.mark.parametrize("name", TOKENIZERS)
def test_joined_deltas_equal_the_full_decode_cut_at_the_stop_string(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    stopped = 0
    for seed in range(NUM_GENERATIONS):
        rng = random.Random(seed)
        skip, include_match = rng.random() < 0.5, rng.random() < 0.5
        prompt, generated = tokenizer.encode("é日a", False), random_ids(tokenizer, rng)
        before = tokenizer.decode(prompt, skip)
        text = tokenizer.decode(prompt + generated, skip)[len(before) :]
        certain = text.rstrip("\ufffd")  # of the end, what could not be a character yet was never matched
        stops = [certain[start : start + rng.randrange(1, 5)] for start in rng.choices(range(len(certain) + 1), k=2)]
        stops = [stop for stop in [*stops, "nowhere"] if stop and "\ufffd" not in stop][: rng.randrange(4)]
        match = first_match(certain, stops)
        expected = text if match is None else text[: match[1] if include_match else match[0]]
        output = generate(tokenizer, prompt, generated, stops, skip, include_match, rng)
        note = f"seed {seed}, stops {stops}, text {text!r}"
        assert output.text == expected, note
        assert output.finished is not None
        if match is None:
            assert output.finished.reason is FinishReason.MAX_TOKENS, note
            assert output.token_ids == generated, note
        else:
            stopped += 1
            assert output.finished.matched_string == text[slice(*match)], note
            assert output.token_ids == generated[: len(output.token_ids)], note
        assert output.finished.output_tokens == len(output.token_ids), note
    assert stopped > NUM_GENERATIONS / 4


def generate(
    tokenizer: Tokenizer,
    prompt: list[int],
    generated: list[int],
    stops: list[str],
    skip: bool,
    include_match: bool,
    rng: random.Random,
) -> Output:
    """The request's output, its tokens in messages of random size."""
    output, handle = Output(), 5
    processor = OutputProcessor(lambda state: None, lambda state, finished: None)
    (state,) = RequestState("r", output, [handle]).sequences
    detokenizer = tokenizer.new_detokenizer(skip)
    detokenizer.prime(prompt)
    matcher = StopMatcher(stops, include_match) if stops else None
    state.render(Rendering(detokenizer, matcher, include_match=include_match, wants_text=True))
    processor.sequences[handle] = state
    at = 0
    while at < len(generated):
        part = generated[at : at + rng.randrange(1, 6)]
        at += len(part)
        finished = [Finished(handle, FinishReason.MAX_TOKENS)] if at == len(generated) else []
        processor.process(
            EngineCoreOutputs(
                handles=np.full(len(part), handle, "<i8").tobytes(),
                token_ids=np.array(part, "<i4").tobytes(),
                finished=finished,
            )
        )
    return output
