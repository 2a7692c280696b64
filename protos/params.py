"""How one request is continued: the parameters a caller chooses."""

from __future__ import annotations

import math
from typing import Annotated

import msgspec
from msgspec import Meta

from protos.errors import InvalidRequestError

MAX_TOKENS = (1 << 32) - 1
"""What the wire can say; the context ends an output long before."""
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 256
TEMPERATURE_GREEDY = 1e-5
"""Temperatures below this are greedy: dividing logits by them would overflow float32."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of one request. None means the default of the model or the server."""

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
    seed: Annotated[
        int | None,
        Meta(description="draws depend on (seed, position) alone; default: a new one, which is told"),
    ] = None
    max_tokens: Annotated[int | None, Meta(description="output tokens at most; default: the rest of the context")] = (
        None
    )
    min_tokens: Annotated[int, Meta(description="no end of sequence, stop id or stop string before so many tokens")] = 0
    stop: Annotated[tuple[str, ...], Meta(description="strings that end the output, matched across token borders")] = ()
    stop_token_ids: Annotated[tuple[int, ...], Meta(description="ids that end the output")] = ()
    include_match: Annotated[bool, Meta(description="keep the matched stop string or token in the output")] = False
    ignore_eos: Annotated[bool, Meta(description="go on past the model's own end-of-sequence tokens")] = False
    skip_special_tokens: Annotated[bool, Meta(description="leave special tokens out of the text")] = True
    time_limit: Annotated[
        float | None, Meta(description="seconds after which the output ends with what there is; default: none")
    ] = None

    def verify(self, vocab_size: int) -> None:
        """Raises InvalidRequestError, with the path of the field in `GenerationSpec`, for values out of bounds."""
        for name, value, low, high in (
            ("sampling.temperature", self.temperature, 0.0, 100.0),
            ("sampling.min_p", self.min_p, 0.0, 1.0),
            ("stop.time_limit", self.time_limit, 0.0, math.inf),
        ):
            if value is not None and not low <= value <= high:
                raise InvalidRequestError(name, f"must be in [{low:g}, {high:g}], not {value}")
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise InvalidRequestError("sampling.top_p", f"must be in (0, 1], not {self.top_p}")
        if self.top_k is not None and not 0 <= self.top_k <= MAX_TOKENS:
            raise InvalidRequestError("sampling.top_k", f"must be in [0, {MAX_TOKENS}], not {self.top_k}")
        if self.seed is not None and not 0 <= self.seed < 1 << 64:
            raise InvalidRequestError("sampling.seed", f"must fit 64 bits without a sign, not {self.seed}")
        if self.max_tokens is not None and not 1 <= self.max_tokens <= MAX_TOKENS:
            raise InvalidRequestError("stop.max_tokens", f"must be in [1, {MAX_TOKENS}], not {self.max_tokens}")
        if not 0 <= self.min_tokens <= MAX_TOKENS:
            raise InvalidRequestError("stop.min_tokens", f"must be in [0, {MAX_TOKENS}], not {self.min_tokens}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                "stop.min_tokens", f"{self.min_tokens} is more than max_tokens, {self.max_tokens}"
            )
        self._verify_stops(vocab_size)

    def _verify_stops(self, vocab_size: int) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequestError("stop.strings", f"at most {MAX_STOP_STRINGS} are allowed, not {len(self.stop)}")
        for string in self.stop:
            if not 0 < len(string) <= MAX_STOP_STRING_LENGTH:
                raise InvalidRequestError(
                    "stop.strings", f"each needs 1 to {MAX_STOP_STRING_LENGTH} characters, not {len(string)}"
                )
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequestError(
                "stop.token_ids", f"at most {MAX_STOP_TOKEN_IDS} are allowed, not {len(self.stop_token_ids)}"
            )
        for token_id in self.stop_token_ids:
            if not 0 <= token_id < vocab_size:
                raise InvalidRequestError("stop.token_ids", f"{token_id} is outside the vocabulary of {vocab_size}")
