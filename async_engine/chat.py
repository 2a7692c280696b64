"""render_chat: a conversation, through the model's own template, to the text of its prompt."""

from __future__ import annotations

import asyncio
import json
from datetime import datetime
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension

from async_engine.chat_sandbox import MAX_CHARACTERS, ChatEnvironment, TooSlowError, limited
from protos.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from jinja2 import Template
    from jinja2.parser import Parser

INLINE_SECONDS = 0.01
"""Of processor time that a template may take on the event loop. Usual ones take a hundredth."""
MAX_SECONDS = 2.0
"""That it may take on a thread."""
_MAX_ERROR = 300


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool,
    template_kwargs: Mapping[str, Any],
    bos_token: str,
    eos_token: str,
    max_seconds: float = MAX_SECONDS,
) -> str:
    """The prompt, its special tokens spelt out: encode it without adding more.

    `template_kwargs` are variables for the template (tools, documents and what it knows beside).
    Templates run in a sandbox: they see the values given here, no attribute of Python's own, and
    change nothing. Raises InvalidRequestError("chat"), one line, for whatever goes wrong, be it that
    rendering takes longer than `max_seconds`.
    """
    variables = {
        "tools": None,
        "documents": None,
        **{name: token for name, token in (("bos_token", bos_token), ("eos_token", eos_token)) if token},
        **template_kwargs,
        "messages": messages,
        "add_generation_prompt": add_generation_prompt,
    }
    try:
        with limited(max_seconds):
            return _joined(_compiled(template).generate(variables))
    except Exception as error:  # a template can fail in any way that Python code can
        problem = InvalidRequestError("chat", _one_line(error))
        raise problem from (error if isinstance(error, TooSlowError) else None)


async def render_chat_async(template: str, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
    """`render_chat` that does not hold the event loop up, however long the template takes."""
    render = partial(render_chat, template, messages, **variables)
    try:
        return render(max_seconds=INLINE_SECONDS)
    except InvalidRequestError as error:
        if not isinstance(error.__cause__, TooSlowError):
            raise
    return await asyncio.to_thread(render, max_seconds=MAX_SECONDS)


def _joined(output: Iterable[str]) -> str:
    parts = []
    size = 0
    for part in output:
        size += len(part)
        if size > MAX_CHARACTERS:
            raise TemplateError(f"the prompt is longer than {MAX_CHARACTERS} characters")
        parts.append(part)
    return "".join(parts)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    if not isinstance(error, TemplateError):
        text = f"{type(error).__name__}: {text}"
    return f"the chat template failed: {text[:_MAX_ERROR]}"


@lru_cache(maxsize=16)
def _compiled(template: str) -> Template:
    return _environment().from_string(template)


@lru_cache(maxsize=1)
def _environment() -> ChatEnvironment:
    """What templates written for Hugging Face expect to find."""
    environment = ChatEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationTag(Extension):
    """{% generation %} marks the text of the assistant for training; here it only renders."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML and non-ASCII characters, which models did not see in training."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
