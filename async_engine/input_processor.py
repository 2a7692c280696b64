"""InputProcessor: everything is checked at the door."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from async_engine.chat import render_chat_async
from async_engine.outputs import SequenceFinish
from async_engine.rendering import Renderer
from async_engine.request import ChatPrompt, GenerationRequest
from core_proc.intake import repeats
from protos.errors import InvalidRequestError, ModelNotFoundError
from protos.messages import FinishReason
from protos.params import SamplingParams

if TYPE_CHECKING:
    from async_engine.request_state import RequestState
    from async_engine.served_model import ServedModel

MAX_PRIORITY = (1 << 31) - 1
MAX_SALT_LENGTH = 256
"""Characters; it is kept, and told, with each block."""
MAX_SHOWN_NAME = 80


class Accepted(msgspec.Struct, frozen=True):
    """A request that passed, with every default filled in."""

    request: GenerationRequest
    params: SamplingParams
    model_name: str
    prompt_token_ids: list[int]
    max_tokens: int
    """Output tokens at most, by request or by context."""
    bad_words: list[tuple[int, ...]]
    """Those of the params as tokens."""
    complete: SequenceFinish | None
    """Set when the resumed output was whole already: there is nothing to generate."""


class InputProcessor:
    """Knows the model and its limits. `max_model_len` is in tokens, `queue_timeout` in seconds: of requests that say
    none."""

    def __init__(self, model: ServedModel, max_model_len: int, queue_timeout: float | None = None) -> None:
        self._model = model
        self._queue_timeout = queue_timeout
        self._max_model_len = max_model_len
        self._max_text_length = max_model_len * model.tokenizer.max_token_length

    async def accept(self, request: GenerationRequest, state: RequestState) -> Accepted:
        """Checks and tokenizes a request, and tells `state` what its output processing needs.

        Raises InvalidRequestError with the path of the field, or ModelNotFoundError.
        """
        self.check_model(request.model)
        request.params.verify(self._model.vocab_size)
        self._check_scheduling(request)
        if request.queue_timeout is None:
            request = msgspec.structs.replace(request, queue_timeout=self._queue_timeout)
        params = self._fill_in(request.params)
        prompt_token_ids = await self._prompt_token_ids(request)
        self.check_ids("resume_from", request.resume_token_ids)
        # At the start of a text and behind a blank: as tokens these differ.
        words = [before + (word.lstrip() or word) for word in params.bad_words for before in ("", " ")]
        spelt = await self._model.tokenizer.encode_all_async(words) if words else []
        bad_words = [tuple(token_ids) for token_ids in spelt if token_ids]
        renderer = Renderer(self._model.tokenizer, request, params, prompt_token_ids)
        state.prompt_tokens = len(prompt_token_ids)
        for sequence in state.sequences:
            sequence.render(renderer.rendering())
        if state.output_text is not None:
            state.prompt_text = self._model.tokenizer.decode(prompt_token_ids, skip_special_tokens=False)
        complete = self._resume(request, params, len(prompt_token_ids), state)
        room = self._max_model_len - len(prompt_token_ids)
        max_tokens = min(params.max_tokens or room, room)
        return Accepted(request, params, self._model.names[0], prompt_token_ids, max_tokens, bad_words, complete)

    def check_model(self, name: str) -> None:
        """Raises ModelNotFoundError unless the name is one of the model's, or empty."""
        if name and name not in self._model.names:
            raise ModelNotFoundError(f"no model {name[:MAX_SHOWN_NAME]!r} here; served: {self._model.names[0]}")

    def _fill_in(self, params: SamplingParams) -> SamplingParams:
        defaults = self._model.defaults
        return msgspec.structs.replace(
            params,
            temperature=defaults.temperature if params.temperature is None else params.temperature,
            top_p=defaults.top_p if params.top_p is None else params.top_p,
            top_k=defaults.top_k if params.top_k is None else params.top_k,
            min_p=defaults.min_p if params.min_p is None else params.min_p,
            # 53 bits: every client language has a number type that holds it.
            seed=random.getrandbits(53) if params.seed is None else params.seed,
        )

    async def _prompt_token_ids(self, request: GenerationRequest) -> list[int]:
        prompt = request.prompt
        if isinstance(prompt, list):
            prompt = _last(prompt, request.params.truncate_prompt_tokens)
            # Before its ids are looked at one by one.
            self._check_length("token_ids", prompt, request)
            self.check_ids("token_ids", prompt)
            return prompt
        if isinstance(prompt, ChatPrompt):
            field, text = "chat", await self.render(prompt)
        else:
            field, text = "text", prompt
        token_ids = await self.tokenize(field, text, add_special_tokens=field == "text")
        token_ids = _last(token_ids, request.params.truncate_prompt_tokens)
        self._check_length(field, token_ids, request)
        return token_ids

    async def render(self, chat: ChatPrompt) -> str:
        """The prompt of a conversation, its special tokens spelt out."""
        tokenizer = self._model.tokenizer
        if tokenizer.chat_template is None:
            raise InvalidRequestError("chat", "this model has no chat template; send text or token_ids")
        return await render_chat_async(
            tokenizer.chat_template,
            chat.messages,
            add_generation_prompt=chat.add_generation_prompt,
            template_kwargs=chat.template_kwargs,
            bos_token=tokenizer.bos_token,
            eos_token=tokenizer.eos_token,
        )

    async def tokenize(self, field: str, text: str, add_special_tokens: bool) -> list[int]:
        """The ids of a text, which the request has in `field`."""
        # No tokenization of so long a text can fit: refuse it before it costs anything.
        if len(text) > self._max_text_length:
            raise InvalidRequestError(field, f"{len(text)} characters cannot fit the context of {self._max_model_len}")
        return await self._model.tokenizer.encode_async(text, add_special_tokens=add_special_tokens)

    def check_ids(self, field: str, token_ids: list[int]) -> None:
        """Raises InvalidRequestError if one is outside the vocabulary."""
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self._model.vocab_size:
            bad = next(token_id for token_id in token_ids if not 0 <= token_id < self._model.vocab_size)
            raise InvalidRequestError(field, f"{bad} is outside the vocabulary of {self._model.vocab_size}")

    def _check_length(self, field: str, prompt: list[int], request: GenerationRequest) -> None:
        resumed, most = len(request.resume_token_ids), request.params.max_tokens
        if not prompt:
            raise InvalidRequestError(field, "the prompt is empty")
        # One place must be left for a token to draw.
        if len(prompt) >= self._max_model_len:
            raise InvalidRequestError(
                field, f"{len(prompt)} tokens leave no room in the context of {self._max_model_len} tokens"
            )
        if len(prompt) + resumed > self._max_model_len:
            raise InvalidRequestError(
                "resume_from",
                f"{resumed} tokens behind a prompt of {len(prompt)} do not fit the context of {self._max_model_len}",
            )
        if most is not None and resumed > most:
            raise InvalidRequestError("resume_from", f"{resumed} tokens are more than max_tokens, {most}")
        if resumed and request.params.n > 1:
            raise InvalidRequestError("resume_from", "continues one sequence: num_sequences must be 1")

    def _check_scheduling(self, request: GenerationRequest) -> None:
        if not -MAX_PRIORITY - 1 <= request.priority <= MAX_PRIORITY:
            raise InvalidRequestError("scheduling.priority", f"must fit 32 bits, not {request.priority}")
        if len(request.cache_salt) > MAX_SALT_LENGTH:
            raise InvalidRequestError("scheduling.cache_salt", f"must be at most {MAX_SALT_LENGTH} characters")
        if request.queue_timeout is not None and not request.queue_timeout >= 0:
            raise InvalidRequestError("scheduling.queue_timeout", f"must not be negative, not {request.queue_timeout}")

    def _resume(
        self, request: GenerationRequest, params: SamplingParams, num_prompt_tokens: int, state: RequestState
    ) -> SequenceFinish | None:
        """Continues behind earlier output; the finish of one that was whole but for being told so."""
        resumed = request.resume_token_ids
        if not resumed:
            return None
        stopped = state.sequences[0].resume(resumed, request.resume_text_bytes)
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
        if num_prompt_tokens + count == self._max_model_len:
            return SequenceFinish(FinishReason.CONTEXT_FULL, output_tokens=count)
        if params.repetition is not None and repeats(np.array(resumed, np.int32), params.repetition):
            return SequenceFinish(FinishReason.REPETITION, output_tokens=count)
        return None


def _last(token_ids: list[int], count: int | None) -> list[int]:
    return token_ids if count is None else token_ids[-count:]
