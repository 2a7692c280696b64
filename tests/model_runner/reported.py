"""What the generations of a Driver were told of log-probabilities, against transformers."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from model_runner.logprobs import split

if TYPE_CHECKING:
    from protos.messages import Sampling
    from protos.step import Logprobs
    from tests.model_runner.driver import Generation

TOLERANCE = 2e-4


@cache
def reference_logprobs(model: Any, token_ids: tuple[int, ...]) -> np.ndarray:
    """[tokens, vocabulary]: of the token after each."""
    with torch.inference_mode():
        return np.asarray(model(torch.tensor([token_ids])).logits[0].log_softmax(-1).numpy())


def check_generation(model: Any, generation: Generation, first: int = 1) -> None:
    """Its prompt's columns, once each and in order, and its output's, against transformers."""
    sampling, num_prompt = generation.sampling, generation.num_prompt_tokens
    theirs = reference_logprobs(model, tuple(generation.token_ids))
    position = first
    for told in generation.prompt_logprobs:
        assert told.start == position
        assert told.logprobs.index.tolist() == list(range(len(told.logprobs.index)))
        for row in split(told.logprobs, np.ones_like(told.logprobs.index)):
            check_close(row, generation.token_ids[position], theirs[position - 1], sampling.prompt_logprobs, sampling)
            position += 1
    if sampling.prompt_logprobs is not None:
        assert position == max(num_prompt, first)
    for place, row in enumerate(generation.logprobs, num_prompt):
        check_close(row, generation.token_ids[place], theirs[place - 1], sampling.logprobs, sampling)
    assert len(generation.logprobs) == (len(generation.output) if sampling.logprobs is not None else 0)


def check_close(row: Logprobs, token_id: int, theirs: np.ndarray, num_top: int | None, sampling: Sampling) -> None:
    num_top = num_top or 0
    assert row.widths.tolist() == [num_top + len(sampling.logprob_token_ids)]
    assert row.top_ids[num_top:].tolist() == list(sampling.logprob_token_ids)
    np.testing.assert_allclose(row.logprobs, [theirs[token_id]], atol=TOLERANCE)
    np.testing.assert_allclose(row.top_logprobs, theirs[row.top_ids], atol=TOLERANCE)
    np.testing.assert_allclose(row.top_logprobs[:num_top], np.sort(theirs)[::-1][:num_top], atol=TOLERANCE)
    low, high = (theirs > theirs[token_id] + 2 * TOLERANCE).sum(), (theirs > theirs[token_id] - 2 * TOLERANCE).sum()
    assert low + 1 <= row.ranks[0] <= high + 1
