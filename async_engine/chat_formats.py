"""The formats in which models write tool calls and reasoning: one row each, read by chat_parser.

A row states markers and how a call between them is spelt; what a model family does beyond that is not
known here. Whitespace between the pieces of a call is free everywhere.
"""

# ruff: noqa: RUF001 (DeepSeek's markers have these characters)

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class JsonCall:
    """`{"name": "f", "arguments": {…}}`, in any order, `parameters` for `arguments`, other keys passed over."""

    bare: bool = False
    """An output that begins with such an object is a call without a marker. So that an answer in JSON is not taken
    for one, or not for long, these calls have an object for arguments, and only the keys of a call before them."""
    in_list: bool = False
    """The calls may stand in one JSON array."""


@dataclass(frozen=True)
class NamedCall:
    """The name as it is, then the arguments' JSON."""

    before: tuple[str, ...] = ()
    after: str = ""
    """Between name and arguments."""
    may_lack_after: bool = False
    id_before: str = ""
    """Goes before an id of the model's own, which is passed over."""
    close: str = ""
    name: str = r"(.+)"
    """A regular expression whose group is the tool's name."""


@dataclass(frozen=True)
class TaggedCall:
    """Each parameter between tags: not JSON. The arguments' JSON is made here, `{"key": value, "key": value}`."""

    before: str
    after: str
    key_before: str
    key_after: str
    value_before: str
    value_after: str
    close: str
    padded: bool = False
    """One line break before and one behind a value are not part of it."""


@dataclass(frozen=True)
class ToolFormat:
    begin: str
    """Opens one call, or a run of calls."""
    calls: tuple[JsonCall | NamedCall | TaggedCall, ...]
    """Spellings of a call; of two, the first is JsonCall, known by its brace."""
    end: str = ""
    """Closes what `begin` opened; "" where nothing does."""
    call_begin: str = ""
    """Opens each call, where `begin` opens a run of them."""
    call_end: str = ""
    separator: str = ""
    """May stand between two calls."""


@dataclass(frozen=True)
class ReasoningFormat:
    """Reasoning opens where no text has been since the output's start or the last reasoning or call. Line breaks
    next to the markers belong to them: all behind a marker, one before `end`."""

    begin: str
    end: str
    anywhere: bool = False
    """Opens in the midst of text too: for markers that are control tokens and never a quotation."""


_XML = {"before": "<function=", "after": ">", "key_before": "<parameter=", "key_after": ">", "value_before": ""}
_XML_CALL = TaggedCall(**_XML, value_after="</parameter>", close="</function>", padded=True)

TOOL_FORMATS = {
    "hermes": ToolFormat(begin="<tool_call>", calls=(JsonCall(),), end="</tool_call>"),
    "llama3": ToolFormat(begin="<|python_tag|>", calls=(JsonCall(bare=True),), separator=";"),
    "mistral": ToolFormat(
        begin="[TOOL_CALLS]",
        calls=(JsonCall(in_list=True), NamedCall(id_before="[CALL_ID]", after="[ARGS]", may_lack_after=True)),
    ),
    "deepseek_v3": ToolFormat(
        begin="<｜tool▁calls▁begin｜>",
        end="<｜tool▁calls▁end｜>",
        call_begin="<｜tool▁call▁begin｜>",
        call_end="<｜tool▁call▁end｜>",
        calls=(NamedCall(before=("function", "<｜tool▁sep｜>"), after="```json", close="```"),),
    ),
    "deepseek_v31": ToolFormat(
        begin="<｜tool▁calls▁begin｜>",
        end="<｜tool▁calls▁end｜>",
        call_begin="<｜tool▁call▁begin｜>",
        call_end="<｜tool▁call▁end｜>",
        calls=(NamedCall(after="<｜tool▁sep｜>"),),
    ),
    "kimi_k2": ToolFormat(
        begin="<|tool_calls_section_begin|>",
        end="<|tool_calls_section_end|>",
        call_begin="<|tool_call_begin|>",
        call_end="<|tool_call_end|>",
        calls=(NamedCall(after="<|tool_call_argument_begin|>", name=r"(?:functions\.)?(.+?)(?::\d+)?"),),
    ),
    "qwen3_coder": ToolFormat(begin="<tool_call>", calls=(_XML_CALL,), end="</tool_call>"),
    "seed_oss": ToolFormat(begin="<seed:tool_call>", calls=(_XML_CALL,), end="</seed:tool_call>"),
    "minimax_m2": ToolFormat(
        begin="<minimax:tool_call>",
        calls=(TaggedCall('<invoke name="', '">', '<parameter name="', '">', "", "</parameter>", close="</invoke>"),),
        end="</minimax:tool_call>",
    ),
    "glm4": ToolFormat(
        begin="<tool_call>",
        calls=(TaggedCall("", "", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", close="</tool_call>"),),
    ),
}

REASONING_FORMATS = {
    "think": ReasoningFormat("<think>", "</think>"),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]", anywhere=True),
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>"),
    "command_a": ReasoningFormat("<|START_THINKING|>", "<|END_THINKING|>"),
    "kimi_vl": ReasoningFormat("◁think▷", "◁/think▷"),
}


def detect_formats(chat_template: str) -> tuple[str, str]:
    """(tool format, reasoning format) that a template's text speaks of, "" for none."""
    tool = next((name for name, row in TOOL_FORMATS.items() if _speaks_of(row, name, chat_template)), "")
    reasoning = next((name for name, row in REASONING_FORMATS.items() if row.begin in chat_template), "")
    return tool, reasoning


def _speaks_of(row: ToolFormat, name: str, chat_template: str) -> bool:
    # Llama 3.2 writes calls as Llama 3.1 does, in a template without the tag.
    if name == "llama3" and '"parameters": ' in chat_template and "<|start_header_id|>" in chat_template:
        return True
    if row.begin not in chat_template:
        return False
    # Of formats with the same marker, those without a mark of their own leave it to the others.
    if name == "hermes":
        return "<function=" not in chat_template and "<arg_key>" not in chat_template
    if name == "deepseek_v31":
        return "```json" not in chat_template
    own = {"deepseek_v3": "```json", "qwen3_coder": "<function=", "glm4": "<arg_key>"}
    return own.get(name, "") in chat_template


def markers(tool_format: str, reasoning_format: str) -> frozenset[str]:
    """The strings, of those the formats are made of, that a tokenizer may hold as special tokens: whoever drops
    special tokens from the text keeps these, or nothing is parsed. Names as in the tables, or "".
    """
    parts: list[str] = []
    if tool_format:
        row = TOOL_FORMATS[tool_format]
        parts = [row.begin, row.end, row.call_begin, row.call_end]
        for call in row.calls:
            for field in fields(call):
                value = getattr(call, field.name)
                parts += value if isinstance(value, tuple) else [value] if isinstance(value, str) else []
    if reasoning_format:
        parts += [REASONING_FORMATS[reasoning_format].begin, REASONING_FORMATS[reasoning_format].end]
    return frozenset(part for part in parts if part[:1] in _BRACKETS and part.endswith(_BRACKETS[part[:1]]))


_BRACKETS = {"<": ">", "[": "]", "◁": "▷"}
