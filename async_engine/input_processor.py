"""InputProcessor: everything is checked at the door, and what passes becomes an EngineCoreRequest."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from async_engine.chat import render_chat
from async_engine.outputs import SequenceFinish
from async_engine.request import ChatPrompt, GenerationRequest
from async_engine.stop_strings import StopMatcher
from protos.errors import InvalidRequestError, ModelNotFoundError
from protos.messages import EngineCoreRequest, FinishReason, Sampling
from protos.params import TEMPERATURE_GREEDY, SamplingParams

if TYPE_CHECKING:
    from async_engine.request_state import RequestState
    from async_engine.served_model import ServedModel

UNLIMITED_TOKENS = (1 << 31) - 1
MAX_PRIORITY = (1 << 31) - 1


class Accepted(msgspec.Struct, frozen=True):
    """A request that passed, with every default filled in."""

    request: GenerationRequest
    params: SamplingParams
    model_name: str
    prompt_token_ids: list[int]
    max_tokens: int
    """Output tokens at most, by request or by context."""
    complete: SequenceFinish | None
    """Set when the resumed output was whole already: there is nothing to generate."""


class InputProcessor:
    """Knows the model and its limits. `max_model_len` is in tokens."""

    def __init__(self, model: ServedModel, max_model_len: int) -> None:
        self._model = model
        self._max_model_len = max_model_len
        self._max_text_length = max_model_len * model.tokenizer.max_token_length

    async def accept(self, request: GenerationRequest, state: RequestState) -> Accepted:
        """Checks and tokenizes a request, and tells `state` what its output processing needs.

        Raises InvalidRequestError with the path of the field, or ModelNotFoundError.
        """
        if request.model and request.model not in self._model.names:
            raise ModelNotFoundError(f"no model {request.model!r} here; served: {', '.join(self._model.names)}")
        request.params.verify(self._model.vocab_size)
        self._check_scheduling(request)
        params = self._fill_in(request.params)
        prompt_token_ids = await self._prompt_token_ids(request)
        self._check_ids("resume_from", request.resume_token_ids)
        self._check_length(prompt_token_ids, request, params)
        needs_text = request.wants_text or bool(params.stop)
        detokenizer = None
        if needs_text:
            detokenizer = self._model.tokenizer.new_detokenizer(params.skip_special_tokens)
            detokenizer.prime(prompt_token_ids)
        state.prepare(
            prompt_tokens=len(prompt_token_ids),
            detokenizer=detokenizer,
            matcher=StopMatcher(params.stop, params.include_match) if params.stop else None,
            include_match=params.include_match,
            min_tokens=params.min_tokens,
            wants_text=request.wants_text,
        )
        if state.output_text is not None:
            state.prompt_text = self._model.tokenizer.decode(prompt_token_ids, skip_special_tokens=False)
        complete = self._resume(request, params, len(prompt_token_ids), state)
        room = self._max_model_len - len(prompt_token_ids)
        max_tokens = min(params.max_tokens or room, room)
        return Accepted(request, params, self._model.names[0], prompt_token_ids, max_tokens, complete)

    def core_request(self, handle: int, accepted: Accepted, elapsed: float) -> EngineCoreRequest:
        """The request as the core takes it. `elapsed` seconds of its time limits are gone already."""
        request, params = accepted.request, accepted.params
        assert params.temperature is not None
        assert params.seed is not None
        assert params.top_k is not None
        assert params.top_p is not None
        assert params.min_p is not None
        greedy = params.temperature < TEMPERATURE_GREEDY
        return EngineCoreRequest(
            handle=handle,
            prompt_token_ids=np.array(accepted.prompt_token_ids, "<i4").tobytes(),
            output_token_ids=np.array(request.resume_token_ids, "<i4").tobytes(),
            sampling=Sampling(
                temperature=0.0 if greedy else params.temperature,
                top_k=0 if greedy else min(params.top_k, self._model.vocab_size),
                top_p=1.0 if greedy else params.top_p,
                min_p=0.0 if greedy else params.min_p,
                seed=params.seed,
                min_tokens=params.min_tokens,
                stop_token_ids=params.stop_token_ids,
                ignore_eos=params.ignore_eos,
            ),
            max_tokens=params.max_tokens or UNLIMITED_TOKENS,
            priority=request.priority,
            cache_salt=request.cache_salt,
            bypass_cache=request.bypass_cache,
            deadline=_left(request.deadline, elapsed),
            time_limit=_left(params.time_limit, elapsed),
            queue_timeout=_left(request.queue_timeout, elapsed),
        )

    def _fill_in(self, params: SamplingParams) -> SamplingParams:
        defaults = self._model.defaults
        return msgspec.structs.replace(
            params,
            temperature=defaults.temperature if params.temperature is None else params.temperature,
            top_p=defaults.top_p if params.top_p is None else params.top_p,
            top_k=defaults.top_k if params.top_k is None else params.top_k,
            min_p=defaults.min_p if params.min_p is None else params.min_p,
            # 63 bits: every client language has a signed type that holds it.
            seed=random.getrandbits(63) if params.seed is None else params.seed,
        )

    async def _prompt_token_ids(self, request: GenerationRequest) -> list[int]:
        prompt = request.prompt
        tokenizer = self._model.tokenizer
        if isinstance(prompt, list):
            self._check_ids("token_ids", prompt)
            return prompt
        if isinstance(prompt, ChatPrompt):
            if tokenizer.chat_template is None:
                raise InvalidRequestError("chat", "this model has no chat template; send text or token_ids")
            text = render_chat(
                tokenizer.chat_template,
                prompt.messages,
                add_generation_prompt=prompt.add_generation_prompt,
                template_kwargs=prompt.template_kwargs,
                bos_token=tokenizer.bos_token,
                eos_token=tokenizer.eos_token,
            )
            field = "chat"
        else:
            text, field = prompt, "text"
        # No tokenization of so long a text can fit: refuse it before it costs anything.
        if len(text) > self._max_text_length:
            raise InvalidRequestError(field, f"{len(text)} characters cannot fit the context of {self._max_model_len}")
        return await tokenizer.encode_async(text, add_special_tokens=field == "text")

    def _check_ids(self, field: str, token_ids: list[int]) -> None:
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self._model.vocab_size:
            bad = next(token_id for token_id in token_ids if not 0 <= token_id < self._model.vocab_size)
            raise InvalidRequestError(field, f"{bad} is outside the vocabulary of {self._model.vocab_size}")

    def _check_length(self, prompt: list[int], request: GenerationRequest, params: SamplingParams) -> None:
        if not prompt:
            raise InvalidRequestError("prompt", "it has no tokens")
        # One place must be left for a token to draw.
        length = len(prompt) + len(request.resume_token_ids)
        if length >= self._max_model_len:
            raise InvalidRequestError(
                "prompt", f"{length} tokens leave no room in the context of {self._max_model_len} tokens"
            )
        if params.max_tokens is not None and len(request.resume_token_ids) > params.max_tokens:
            raise InvalidRequestError(
                "resume_from", f"{len(request.resume_token_ids)} tokens are more than max_tokens, {params.max_tokens}"
            )

    def _check_scheduling(self, request: GenerationRequest) -> None:
        if abs(request.priority) > MAX_PRIORITY:
            raise InvalidRequestError("scheduling.priority", f"must fit 32 bits, not {request.priority}")
        if request.queue_timeout is not None and not request.queue_timeout >= 0:
            raise InvalidRequestError("scheduling.queue_timeout", f"must not be negative, not {request.queue_timeout}")

    def _resume(
        self, request: GenerationRequest, params: SamplingParams, num_prompt_tokens: int, state: RequestState
    ) -> SequenceFinish | None:
        """Continues behind earlier output; the finish of one that was whole but for being told so."""
        resumed = request.resume_token_ids
        if not resumed:
            return None
        stopped = state.resume(resumed, request.resume_text_bytes)
        if stopped is not None:
            return stopped
        last, count = resumed[-1], len(resumed)
        if count >= params.min_tokens:
            if last in self._model.eos_token_ids and not params.ignore_eos:
                return SequenceFinish(FinishReason.EOS, matched_token_id=last, output_tokens=count)
            if last in params.stop_token_ids:
                return SequenceFinish(FinishReason.STOP_TOKEN, matched_token_id=last, output_tokens=count)
        if count == params.max_tokens:
            return SequenceFinish(FinishReason.MAX_TOKENS, output_tokens=count)
        return None


def _left(limit: float | None, elapsed: float) -> float | None:
    return None if limit is None else limit - elapsed
