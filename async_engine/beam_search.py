"""Beam search, over the same core: one request of one token per beam and step, whose prompt the cache holds."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from async_engine.request import GenerationRequest
from async_engine.results import gather
from protos.errors import InvalidRequestError
from protos.params import MAX_LOGPROBS, SamplingParams

if TYPE_CHECKING:
    from async_engine.async_llm import AsyncLLM

MAX_WIDTH = MAX_LOGPROBS // 2


class Beam(msgspec.Struct, frozen=True):
    """One of the likeliest outputs."""

    token_ids: list[int]
    cumulative_logprob: float
    ended: bool = False
    """By the model's end of sequence, which `token_ids` leaves out but the log-probability has."""

    def score(self, length_penalty: float) -> float:
        """Log-probability per length; above 1 the penalty favours long outputs, below 1 short ones."""
        length = len(self.token_ids) + self.ended
        return self.cumulative_logprob / length**length_penalty if length else self.cumulative_logprob


async def beam_search(
    llm: AsyncLLM, prompt: list[int], width: int, max_tokens: int, length_penalty: float = 1.0, adapter: str = ""
) -> list[Beam]:
    """The `width` best outputs found, best first. A beam ends with the model's end of sequence, at `max_tokens` or
    with the context. `adapter` is the name of a loaded one.

    Each step extends every open beam by its 2 * width likeliest tokens, and keeps the width likeliest of all.
    Raises InvalidRequestError as a request would.
    """
    if not 1 <= width <= MAX_WIDTH:
        raise InvalidRequestError("width", f"must be in [1, {MAX_WIDTH}], not {width}")
    if max_tokens < 1:
        raise InvalidRequestError("max_tokens", f"must be at least 1, not {max_tokens}")
    eos = set(llm.model.eos_token_ids)
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=2 * width)
    room = llm.ready.max_model_len - len(prompt)
    beams = [Beam([], 0.0)]
    ended: list[Beam] = []
    for _ in range(min(max_tokens, max(1, room))):
        try:
            async with asyncio.TaskGroup() as tasks:
                extending = [tasks.create_task(_extend(llm, prompt, beam, params, eos, adapter)) for beam in beams]
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        extended = [beam for task in extending for beam in task.result()]
        best = sorted(extended, key=lambda beam: -beam.cumulative_logprob)
        ended += [beam for beam in best[: 2 * width] if beam.ended]
        beams = [beam for beam in best if not beam.ended][:width]
        if not beams:
            break
    everything = sorted([*ended, *beams], key=lambda beam: -beam.score(length_penalty))
    return everything[:width]


async def _extend(
    llm: AsyncLLM, prompt: list[int], beam: Beam, params: SamplingParams, eos: set[int], adapter: str
) -> list[Beam]:
    token_ids = prompt + beam.token_ids
    request = GenerationRequest(prompt=token_ids, params=params, adapter=adapter, wants_text=False)
    output = await gather(token_ids, llm.generate(request))
    logprobs = output.sequences[0].logprobs
    assert logprobs is not None
    return [
        Beam(
            beam.token_ids if token_id in eos else [*beam.token_ids, token_id],
            beam.cumulative_logprob + value,
            token_id in eos,
        )
        for token_id, value in logprobs.candidates(0).items()
    ]
