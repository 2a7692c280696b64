"""GenerationRequest: what a caller of AsyncLLM asks for."""

from __future__ import annotations

from typing import Any

import msgspec

from protos.params import SamplingParams


class ChatPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """Messages for the model's chat template."""

    messages: list[dict[str, Any]]
    """Each with "role" and "content", and whatever else the template knows."""
    template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True


Prompt = str | list[int] | ChatPrompt
"""Text to tokenize, token ids to use as they are, or messages to render."""


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt and how to continue it. Times in seconds; None is no limit."""

    prompt: Prompt
    params: SamplingParams = SamplingParams()
    model: str = ""
    """A served name; empty is the one there is."""
    resume_token_ids: list[int] = []
    """Output made earlier, which is continued and not sent again."""
    resume_text_bytes: int | None = None
    """UTF-8 length of the text the caller has of it; None if it has what its tokens alone make certain."""
    wants_text: bool = True
    tool_format: str = ""
    """Takes tool calls out of the text: a format's name, "auto" for the chat template's own, or empty."""
    reasoning_format: str = ""
    """The same for reasoning."""
    priority: int = 0
    adapter: str = ""
    """Name of a loaded adapter, empty for the model alone."""
    cache_salt: str = ""
    bypass_cache: bool = False
    caller: str = ""
    """Who asks, for fairness: callers take turns, whatever each of them asks for."""
    deadline: float | None = None
    queue_timeout: float | None = None
