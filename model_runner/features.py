"""Features: what a row asks of its sampler beyond a plain draw.

Each row has a few bits, so that a step learns what its rows use by one look at one column; and lists
of token ids, which are empty for nearly all rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from protos.params import TEMPERATURE_GREEDY

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from protos.messages import Sampling

Int64s = npt.NDArray[np.int64]

BIAS, ALLOWED, MIN_TOKENS, PENALTIES, BAD_WORDS = 1, 2, 4, 8, 16
EDITS = BIAS | ALLOWED | MIN_TOKENS | PENALTIES | BAD_WORDS
"""What changes logits before the temperature does."""
LOGPROBS = 32
PROCESSED = 64
"""Log-probabilities of what is drawn from; only together with LOGPROBS."""
PROMPT_LOGPROBS = 128
RANDOM = 256
"""A temperature at which not simply the largest logit is drawn."""
ADAPTER = 512
MORE_THAN_LARGEST = EDITS | LOGPROBS | RANDOM
"""A row with none of these draws its largest logit, and that is all there is to it."""


def features(sampling: Sampling, adapter: int = 0) -> int:
    """The bits of a row with these parameters, and an adapter in this slot."""
    reports = sampling.logprobs is not None or bool(sampling.logprob_token_ids)
    penalises = sampling.repetition_penalty != 1 or sampling.frequency_penalty != 0 or sampling.presence_penalty != 0
    return (
        BIAS * bool(sampling.logit_bias)
        | ALLOWED * bool(sampling.allowed_token_ids)
        | MIN_TOKENS * (sampling.min_tokens > 0)
        | PENALTIES * penalises
        | BAD_WORDS * bool(sampling.bad_words)
        | LOGPROBS * reports
        | PROCESSED * (reports and sampling.processed_logprobs)
        | PROMPT_LOGPROBS * (sampling.prompt_logprobs is not None)
        | RANDOM * (sampling.temperature >= TEMPERATURE_GREEDY)
        | ADAPTER * (adapter > 0)
    )


def used_by_any(uses: npt.NDArray[np.uint16]) -> int:
    """The bits of any of these rows."""
    return int(np.bitwise_or.reduce(uses))


@dataclass(frozen=True, slots=True)
class TokenLists:
    """One row's lists of token ids, as arrays."""

    bias_ids: Int64s
    biases: npt.NDArray[np.float32]
    """Parallel to bias_ids."""
    allowed_ids: Int64s
    logprob_ids: Int64s
    bad_ids: Int64s
    """The last token of each bad word."""
    before_word: Int64s
    """Of every other token of the bad words: the word, the token, and how far before the word's end it is."""
    before_ids: Int64s
    before_distance: Int64s


def token_lists(sampling: Sampling) -> TokenLists:
    """The lists of a row with these parameters; all rows without any share one."""
    if not (sampling.logit_bias or sampling.allowed_token_ids or sampling.logprob_token_ids or sampling.bad_words):
        return NO_LISTS
    before = [
        (word, token_id, len(token_ids) - 1 - place)
        for word, token_ids in enumerate(sampling.bad_words)
        for place, token_id in enumerate(token_ids[:-1])
    ]
    before_word, before_ids, before_distance = np.array(before, np.int64).reshape(-1, 3).T
    return TokenLists(
        bias_ids=_ids(sampling.logit_bias),
        biases=np.fromiter(sampling.logit_bias.values(), np.float32),
        allowed_ids=_ids(sampling.allowed_token_ids),
        logprob_ids=_ids(sampling.logprob_token_ids),
        bad_ids=_ids(token_ids[-1] for token_ids in sampling.bad_words),
        before_word=before_word,
        before_ids=before_ids,
        before_distance=before_distance,
    )


def _ids(numbers: Iterable[int]) -> Int64s:
    return np.fromiter(numbers, np.int64)


_NONE = np.zeros(0, np.int64)
NO_LISTS = TokenLists(_NONE, np.zeros(0, np.float32), *[_NONE] * 6)


def spread(owners: npt.NDArray[np.integer], lists: Sequence[npt.NDArray[np.generic]]) -> Int64s:
    """The owner of each element of the lists joined; owners are parallel to the lists."""
    return np.repeat(owners.astype(np.int64), [len(numbers) for numbers in lists])
