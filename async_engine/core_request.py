"""core_request: an accepted request as the core takes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from protos.messages import EngineCoreRequest, Sampling, Sibling
from protos.params import TEMPERATURE_GREEDY

if TYPE_CHECKING:
    from async_engine.input_processor import Accepted
    from async_engine.request_state import RequestState
    from async_engine.served_model import ServedModel

UNLIMITED_TOKENS = (1 << 31) - 1


def core_request(
    state: RequestState, accepted: Accepted, model: ServedModel, max_model_len: int, elapsed: float
) -> EngineCoreRequest:
    """The request and its sequences. `elapsed` seconds of its time limits are gone already."""
    request, params = accepted.request, accepted.params
    assert params.temperature is not None
    assert params.seed is not None
    assert params.top_k is not None
    assert params.top_p is not None
    assert params.min_p is not None
    greedy = params.temperature < TEMPERATURE_GREEDY
    first, *others = state.sequences
    return EngineCoreRequest(
        handle=first.handle,
        prompt_token_ids=np.array(accepted.prompt_token_ids, "<i4").tobytes(),
        output_token_ids=np.array(request.resume_token_ids, "<i4").tobytes(),
        sampling=Sampling(
            temperature=0.0 if greedy else params.temperature,
            top_k=0 if greedy else min(params.top_k, model.vocab_size),
            top_p=1.0 if greedy else params.top_p,
            min_p=0.0 if greedy else params.min_p,
            seed=params.seed,
            min_tokens=min(params.min_tokens, max_model_len),
            stop_token_ids=params.stop_token_ids,
            ignore_eos=params.ignore_eos,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=params.repetition_penalty,
            logit_bias=params.logit_bias,
            allowed_token_ids=params.allowed_token_ids or (),
            bad_words=(*params.bad_token_sequences, *accepted.bad_words),
            logprobs=params.logprobs,
            prompt_logprobs=params.prompt_logprobs,
            logprob_token_ids=params.logprob_token_ids,
            processed_logprobs=params.processed_logprobs,
        ),
        max_tokens=params.max_tokens or UNLIMITED_TOKENS,
        priority=request.priority,
        cache_salt=request.cache_salt,
        bypass_cache=request.bypass_cache,
        deadline=time_left(request.deadline, elapsed),
        time_limit=time_left(params.time_limit, elapsed),
        queue_timeout=time_left(request.queue_timeout, elapsed),
        siblings=[Sibling(other.handle, sequence_seed(params.seed, index)) for index, other in enumerate(others, 1)],
        repetition=params.repetition,
        grammar=params.grammar,
        caller=request.caller,
        adapter=request.adapter,
    )


def sequence_seed(seed: int, index: int) -> int:
    """The seed of a request's sequence: the request's own for the first, unlike those of all others.

    The finalizer of SplitMix64 over (seed, index).
    """
    if index == 0:
        return seed
    mask = (1 << 64) - 1
    value = (seed + index * 0x9E3779B97F4A7C15) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return value ^ (value >> 31)


def time_left(limit: float | None, elapsed: float) -> float | None:
    """Of a limit in seconds, after so many of them; None is no limit."""
    return None if limit is None else limit - elapsed
