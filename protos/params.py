"""How one request is continued: the parameters a caller chooses."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from protos.errors import InvalidRequestError
from protos.messages import GrammarSpec, Repetition

if TYPE_CHECKING:
    from collections.abc import Collection

MAX_TOKENS = (1 << 32) - 1
"""What the wire can say; the context ends an output long before."""
MAX_SEQUENCES = 128
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_LENGTH = 64
"""Characters, or tokens."""
MAX_LOGPROBS = 128
"""Candidates, and ids, reported per position."""
MAX_PATTERN_TOKENS = 256
MAX_GRAMMAR_LENGTH = 1 << 18
TEMPERATURE_GREEDY = 1e-5
"""Temperatures below this are greedy: dividing logits by them would overflow float32."""

_BOUNDS: dict[str, tuple[str, float, float]] = {
    "temperature": ("sampling.temperature", 0.0, 100.0),
    "min_p": ("sampling.min_p", 0.0, 1.0),
    "top_k": ("sampling.top_k", 0, MAX_TOKENS),
    "presence_penalty": ("sampling.presence_penalty", -2.0, 2.0),
    "frequency_penalty": ("sampling.frequency_penalty", -2.0, 2.0),
    "repetition_penalty": ("sampling.repetition_penalty", 1e-3, 100.0),
    "seed": ("sampling.seed", 0, (1 << 64) - 1),
    "max_tokens": ("stop.max_tokens", 1, MAX_TOKENS),
    "min_tokens": ("stop.min_tokens", 0, MAX_TOKENS),
    "time_limit": ("stop.time_limit", 0.0, math.inf),
    "n": ("num_sequences", 1, MAX_SEQUENCES),
    "truncate_prompt_tokens": ("truncate_prompt_tokens", 1, MAX_TOKENS),
    "logprobs": ("output.logprobs", 0, MAX_LOGPROBS),
    "prompt_logprobs": ("output.prompt_logprobs", 0, MAX_LOGPROBS),
}
"""By parameter, the path of its field in `GenerationSpec`, and what it must be within."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drawn, and when the output ends.

    None means the default of the model or the server.
    """

    temperature: Annotated[float | None, Meta(description="0 is greedy; default: the model's, else 1")] = None
    top_p: Annotated[
        float | None,
        Meta(description="the likeliest tokens that together reach this probability, in (0, 1]; default: 1"),
    ] = None
    top_k: Annotated[
        int | None,
        Meta(description="the k likeliest tokens, and ties with the k-th; 0 keeps all; default: the model's, else 0"),
    ] = None
    min_p: Annotated[
        float | None,
        Meta(description="only tokens this fraction as likely as the likeliest, in [0, 1]; default: 0"),
    ] = None
    presence_penalty: Annotated[float, Meta(description="taken from the logits of tokens the output has")] = 0.0
    frequency_penalty: Annotated[float, Meta(description="the same, for each time the output has them")] = 0.0
    repetition_penalty: Annotated[
        float, Meta(description="divides the logits of tokens that prompt or output have (multiplies negative ones)")
    ] = 1.0
    logit_bias: dict[int, float] = {}
    """Added to the logits of these tokens."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Only these are drawn."""
    bad_words: Annotated[tuple[str, ...], Meta(description="a text that the output never completes")] = ()
    bad_token_sequences: tuple[tuple[int, ...], ...] = ()
    """The same as token ids."""
    seed: Annotated[
        int | None,
        Meta(description="draws depend on (seed, position) alone; default: a new one, which is told"),
    ] = None
    max_tokens: Annotated[int | None, Meta(description="output tokens at most; default: the rest of the context")] = (
        None
    )
    min_tokens: Annotated[int, Meta(description="no end of sequence, stop id or stop string before so many tokens")] = 0
    stop: Annotated[tuple[str, ...], Meta(description="a string that ends the output, also across token borders")] = ()
    stop_token_ids: Annotated[tuple[int, ...], Meta(description="an id that ends the output")] = ()
    include_match: Annotated[bool, Meta(description="keep the matched stop string or token in the output")] = False
    ignore_eos: Annotated[bool, Meta(description="go on past the model's own end-of-sequence tokens")] = False
    skip_special_tokens: Annotated[bool, Meta(description="leave special tokens out of the text")] = True
    time_limit: Annotated[
        float | None, Meta(description="seconds after which the output ends with what there is; default: none")
    ] = None
    truncate_prompt_tokens: Annotated[
        int | None, Meta(description="of a longer prompt only so many tokens are kept, the last ones; default: all")
    ] = None
    n: int = 1
    """Sequences drawn from the prompt."""
    repetition: Repetition | None = None
    """Ends an output that goes round in circles."""
    grammar: GrammarSpec | None = None
    logprobs: int | None = None
    """Candidates to report beside each token; 0 reports the token alone."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens, from the second on."""
    logprob_token_ids: tuple[int, ...] = ()
    """Ids reported at each position behind the candidates."""
    processed_logprobs: bool = False
    """Report what tokens are drawn from, rather than what the model said."""

    def verify(self, vocab_size: int) -> None:
        """Raises InvalidRequestError, with the path of the field in `GenerationSpec`, for values out of bounds."""
        self._verify_types()
        for name, (path, low, high) in _BOUNDS.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise InvalidRequestError(path, f"must be in [{low:.17g}, {high:.17g}], not {value}")
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise InvalidRequestError("sampling.top_p", f"must be in (0, 1], not {self.top_p}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                "stop.min_tokens", f"{self.min_tokens} is more than max_tokens, {self.max_tokens}"
            )
        _verify_strings("stop.strings", self.stop, MAX_STOP_STRINGS, MAX_STOP_STRING_LENGTH)
        _verify_strings("sampling.bad_words", self.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_LENGTH)
        _verify_strings("sampling.bad_token_sequences", self.bad_token_sequences, MAX_BAD_WORDS, MAX_BAD_WORD_LENGTH)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequestError("sampling.allowed_token_ids", "is empty: nothing could be drawn")
        if self.repetition is not None:
            _verify_repetition(self.repetition)
        if self.grammar is not None and len(self.grammar.value) > MAX_GRAMMAR_LENGTH:
            raise InvalidRequestError(f"constraint.{self.grammar.kind}", f"is over {MAX_GRAMMAR_LENGTH} characters")
        self._verify_ids(vocab_size)

    def _verify_types(self) -> None:
        """The core decodes strictly: what it would not take must not reach it."""
        try:
            msgspec.msgpack.decode(msgspec.msgpack.encode(self), type=SamplingParams)
        except OverflowError:
            return  # an integer of any size is a matter of bounds
        except (TypeError, ValueError) as error:
            problem, _, path = str(error).partition(" - at ")
            found = re.search(r"\$\.(\w+)", path)
            name = found[1] if found else "params"
            raise InvalidRequestError(_BOUNDS.get(name, (name,))[0], problem) from None

    def _verify_ids(self, vocab_size: int) -> None:
        _verify_ids("stop.token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS, vocab_size)
        _verify_ids("sampling.allowed_token_ids", self.allowed_token_ids or (), vocab_size, vocab_size)
        _verify_ids("sampling.logit_bias", self.logit_bias, MAX_LOGIT_BIAS, vocab_size)
        _verify_ids("output.logprob_token_ids", self.logprob_token_ids, MAX_LOGPROBS, vocab_size)
        for sequence in self.bad_token_sequences:
            _verify_ids("sampling.bad_token_sequences", sequence, MAX_BAD_WORD_LENGTH, vocab_size)
        for token_id, bias in self.logit_bias.items():
            if not -100.0 <= bias <= 100.0:
                raise InvalidRequestError("sampling.logit_bias", f"must be in [-100, 100], not {bias} for {token_id}")


def _verify_ids(path: str, token_ids: Collection[int], most: int, vocab_size: int) -> None:
    if len(token_ids) > most:
        raise InvalidRequestError(path, f"at most {most} are allowed, not {len(token_ids)}")
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(path, f"{token_id} is outside the vocabulary of {vocab_size}")


def _verify_strings(path: str, strings: Collection[Collection[Any]], most: int, longest: int) -> None:
    if len(strings) > most:
        raise InvalidRequestError(path, f"at most {most} are allowed, not {len(strings)}")
    for string in strings:
        if not 0 < len(string) <= longest:
            raise InvalidRequestError(path, f"each needs a length of 1 to {longest}, not {len(string)}")


def _verify_repetition(repetition: Repetition) -> None:
    low, high, count = repetition.min_size, repetition.max_size, repetition.count
    if not 1 <= low <= high <= MAX_PATTERN_TOKENS:
        raise InvalidRequestError(
            "stop.repetition", f"patterns must be of 1 to {MAX_PATTERN_TOKENS} tokens, not {low} to {high}"
        )
    if not 2 <= count <= MAX_TOKENS:
        raise InvalidRequestError("stop.repetition", f"count must be at least 2, not {count}")
