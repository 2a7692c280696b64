"""render_chat: a conversation, through the model's own template, to the text of its prompt."""

from __future__ import annotations

import json
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from protos.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from jinja2 import Template
    from jinja2.parser import Parser

MAX_CHARACTERS = 4 << 20
"""Of a rendered prompt. A template that loops is stopped here."""
_MAX_ERROR = 300


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool,
    template_kwargs: Mapping[str, Any],
    bos_token: str,
    eos_token: str,
) -> str:
    """The prompt, its special tokens spelt out: encode it without adding more.

    `template_kwargs` are variables for the template (tools, documents and what it knows beside).
    Templates run in a sandbox: they see the values given here, no attribute of Python's own, and
    change nothing. Raises InvalidRequestError("chat"), one line, for whatever goes wrong.
    """
    variables = {
        "tools": None,
        "documents": None,
        **{name: token for name, token in (("bos_token", bos_token), ("eos_token", eos_token)) if token},
        **template_kwargs,
        "messages": messages,
        "add_generation_prompt": add_generation_prompt,
    }
    parts = []
    size = 0
    try:
        for part in _compiled(template).generate(variables):
            size += len(part)
            if size > MAX_CHARACTERS:
                raise TemplateError(f"the prompt is longer than {MAX_CHARACTERS} characters")
            parts.append(part)
    except Exception as error:  # a template can fail in any way that Python code can
        raise InvalidRequestError("chat", _one_line(error)) from None
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
def _environment() -> ImmutableSandboxedEnvironment:
    """What templates written for Hugging Face expect to find."""
    environment = ImmutableSandboxedEnvironment(
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
