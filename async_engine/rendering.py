"""What turns a request's ids into what its caller wants of them: text, without stop strings, taken apart or not."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

from async_engine.chat_formats import REASONING_FORMATS, TOOL_FORMATS, detect_formats, markers
from async_engine.chat_parser import new_parser
from async_engine.request import ChatPrompt
from async_engine.request_state import Rendering
from async_engine.stop_strings import StopMatcher
from protos.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Collection

    from async_engine.request import GenerationRequest
    from async_engine.tokenizer import Tokenizer
    from protos.params import SamplingParams

AUTO = "auto"
PROMPT_TAIL_TOKENS = 64
"""Of the prompt's end, what a format looks at to tell what the output begins inside of."""


class Renderer:
    """Makes the Rendering of each of a request's sequences.

    Raises InvalidRequestError for formats that nobody knows.
    """

    def __init__(
        self, tokenizer: Tokenizer, request: GenerationRequest, params: SamplingParams, prompt_token_ids: list[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._request = request
        self._params = params
        self._prompt_token_ids = prompt_token_ids
        template = tokenizer.chat_template or ""
        own_tool, own_reasoning = "", ""
        if AUTO in (request.tool_format, request.reasoning_format):
            own_tool, own_reasoning = detect_formats(template)
        self._tool = _resolve("output.tool_format", request.tool_format, own_tool, TOOL_FORMATS)
        self._reasoning = _resolve(
            "output.reasoning_format", request.reasoning_format, own_reasoning, REASONING_FORMATS
        )
        self._parses = request.wants_text and bool(self._tool or self._reasoning)
        self._shown = markers(self._tool, self._reasoning) if self._parses else frozenset()
        self._tail = ""
        if self._parses:
            self._tail = tokenizer.decode(prompt_token_ids[-PROMPT_TAIL_TOKENS:], skip_special_tokens=False)

    def rendering(self) -> Rendering:
        """One sequence's."""
        request, params = self._request, self._params
        rendering = Rendering(include_match=params.include_match, min_tokens=params.min_tokens)
        if request.wants_text or params.stop:
            rendering.detokenizer = self._tokenizer.new_detokenizer(params.skip_special_tokens, self._shown)
            rendering.detokenizer.prime(self._prompt_token_ids)
            rendering.wants_text = request.wants_text
        if params.stop:
            rendering.matcher = StopMatcher(params.stop, params.include_match)
        if self._parses:
            prompt = request.prompt
            tools = prompt.template_kwargs.get("tools") if isinstance(prompt, ChatPrompt) else None
            rendering.parser = new_parser(
                self._tool,
                self._reasoning,
                self._tail,
                id_prefix=f"call_{uuid.uuid4().hex[:12]}_",
                tools=tools if isinstance(tools, list) else (),
            )
        if params.logprobs is not None or params.logprob_token_ids:
            rendering.logprobs_width = (params.logprobs or 0) + len(params.logprob_token_ids)
        return rendering


def _resolve(field: str, name: str, own: str, table: Collection[str]) -> str:
    """The format by its name in the table, "" for none."""
    if name == AUTO:
        return own
    if name and name not in table:
        raise InvalidRequestError(field, f"no format {name[:40]!r}; there are {AUTO}, {', '.join(table)}")
    return name
