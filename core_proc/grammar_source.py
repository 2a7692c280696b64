"""From the source of a constraint to the grammar engine's own language, a dialect of Lark.

Runs in the sandbox (`grammar_sandbox.py`): what comes here is hostile until it has been compiled once. Accepted are:

- json_schema: a schema, draft 2020-12 or older. Properties come in the schema's order; a keyword that cannot be
  enforced is an error, and so is a `oneOf` whose branches are not plainly apart.
- json_object: nothing; the output is any JSON object.
- regex: Rust's `regex` syntax, which is near Python's but has no look-around and no backreferences. All of the
  output must match. `\\d`, `\\w` and `\\s` are ASCII.
- grammar: GBNF, also known as EBNF, where rules are `name ::= …` and the start is `root`; else Lark, where rules
  are `name: …` and the start is `start`, with its `%import common.X`, `%ignore` and `%json {…}`.
- choices: a JSON list of strings.
- structural_tag: JSON, `{"structures": [{"begin": "<f=a>", "schema": {…}, "end": "</f>"}, …], "triggers": ["<f="]}`.
  Free text until it spells a trigger; then the rest of a `begin` that starts so, JSON of its schema, its
  `end`, and text again.

Whitespace in JSON is bounded, so that no model can print blanks for ever: where JSON allows it, one blank, or one line
break and up to 20 blanks or 8 tabs; none around the whole. A schema may choose otherwise by its key "x-guidance":
`{"x-guidance": {"whitespace_flexible": false}, …}` is compact.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

from protos.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Callable

    from protos.messages import GrammarSpec

MAX_SOURCE_BYTES = 256 * 1024
MAX_REGEX_BYTES = 16 * 1024
"""A regex may cost a step time in proportion to its length."""
JSON_WHITESPACE = r" |\r?\n( {0,20}|\t{0,8})"
NO_FORCING = '%llguidance {"no_forcing": true}\n'
"""Tells the engine to allow every tokenization of a text: which one is the model's own, it does not know."""
MAX_MESSAGE = 300
STATE_DUMP = re.compile(r"\n<(?:non-verbose|state|backtrace)")
SOURCE_LISTING = re.compile(r"\s*(\d+ \|.*|\^+\s*)")
PLACE = re.compile(r"^(at )?\d+\(\d+\): ")
GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)


class Structure(msgspec.Struct):
    """What follows a trigger."""

    begin: str
    schema: dict[str, Any] | bool
    end: str


class StructuralTag(msgspec.Struct):
    structures: list[Structure]
    triggers: list[str]


def translate(spec: GrammarSpec) -> str:
    """The Lark text of a constraint. It need not compile.

    Raises InvalidRequestError, of the field `constraint.<kind>`.
    """
    check_size(spec)
    try:
        return TRANSLATORS[spec.kind](spec.value) + NO_FORCING
    except (GbnfToLarkError, ValueError) as error:  # a msgspec.DecodeError is one, too
        refuse(spec, str(error))
    except RecursionError:
        refuse(spec, "nested too deeply")


def check_size(spec: GrammarSpec) -> None:
    """Raises InvalidRequestError for a source that is too long to look at."""
    limit = MAX_REGEX_BYTES if spec.kind == "regex" else MAX_SOURCE_BYTES
    if len(spec.value) > limit or len(spec.value.encode("utf-8", "surrogatepass")) > limit:
        refuse(spec, f"longer than {limit} bytes")


def refuse(spec: GrammarSpec, why: str) -> NoReturn:
    """Raises the error of a constraint, with an engine's message made one line of bounded length."""
    lines = STATE_DUMP.split(why)[0].splitlines()
    text = " ".join(" ".join(line for line in lines if not SOURCE_LISTING.fullmatch(line)).split())
    if spec.kind != "grammar":  # places in a source that the caller did not write
        text = PLACE.sub("", text).removeprefix("failed to compile JSON schema: ")
    text = text if len(text) <= MAX_MESSAGE else text[: MAX_MESSAGE - 1] + "…"
    raise InvalidRequestError(f"constraint.{spec.kind}", text) from None


def _json(schema: dict[str, Any] | bool) -> str:
    """The term for JSON of a schema."""
    if schema is True:
        schema = {}
    if isinstance(schema, dict):
        options = schema.get("x-guidance", {})
        if not isinstance(options, dict):
            raise ValueError("x-guidance is not an object")
        schema = {**schema, "x-guidance": {"whitespace_pattern": JSON_WHITESPACE, **options}}
        if "whitespace_flexible" in options and "whitespace_pattern" not in options:
            del schema["x-guidance"]["whitespace_pattern"]
    return "%json " + msgspec.json.encode(schema).decode()


def _json_schema(value: str) -> str:
    return f"start: {_json(msgspec.json.decode(value, type=dict[str, Any] | bool))}\n"


def _json_object(_: str) -> str:
    return f"start: {_json({'type': 'object'})}\n"


def _regex(value: str) -> str:
    return f"start: TEXT\nTEXT: /{regex_to_lark(value, 'dws')}/\n" if value else 'start: ""\n'


def _grammar(value: str) -> str:
    if GBNF_RULE.search(value):
        try:
            return gbnf_to_lark(value)
        except RecursionError:
            raise
        except Exception as error:  # its bare `raise Exception` for unknown rules
            raise ValueError(str(error)) from None
    return value + "\n"  # our option comes behind, so that lines keep their numbers


def _choices(value: str) -> str:
    choices = msgspec.json.decode(value, type=list[str])
    if not choices:
        raise ValueError("no choices")
    # One terminal, so that thousands of them are one automaton.
    return f"start: CHOICE\nCHOICE: {' | '.join(map(_literal, choices))}\n"


def _structural_tag(value: str) -> str:
    tag = msgspec.json.decode(value, type=StructuralTag)
    if not tag.structures or not tag.triggers or "" in tag.triggers:
        raise ValueError("needs structures, and triggers that are not empty")
    for trigger in tag.triggers:
        if any(other != trigger and other.startswith(trigger) for other in tag.triggers):
            raise ValueError(f"trigger {trigger!r} begins another one")
    bodies: dict[str, list[str]] = {trigger: [] for trigger in tag.triggers}
    for structure in tag.structures:
        trigger = next(filter(structure.begin.startswith, bodies), "")
        if not trigger:
            raise ValueError(f"begin {structure.begin!r} starts with no trigger")
        rest = structure.begin.removeprefix(trigger)
        parts = [
            _literal(rest) if rest else "",
            _json(structure.schema),
            _literal(structure.end) if structure.end else "",
        ]
        bodies[trigger].append(" ".join(filter(None, parts)))
    rules = [f"start: ({' | '.join(f'tag_{i}' for i in range(len(bodies)))})* TEXT", "TEXT: /(?s:.*)/"]
    for i, (trigger, alternatives) in enumerate(bodies.items()):
        if not alternatives:
            raise ValueError(f"trigger {trigger!r} begins no structure")
        rules.append(f"trigger_{i}[lazy]: TEXT {_literal(trigger)}")
        rules.append(f"tag_{i}: trigger_{i} ({' | '.join(alternatives)})")
    return "\n".join(rules) + "\n"


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


TRANSLATORS: dict[str, Callable[[str], str]] = {
    "json_schema": _json_schema,
    "json_object": _json_object,
    "regex": _regex,
    "grammar": _grammar,
    "choices": _choices,
    "structural_tag": _structural_tag,
}
