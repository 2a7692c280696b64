"""Tool calls and reasoning are told from text, in every format and wherever the text is cut; nothing gets lost."""

# ruff: noqa: RUF001 (DeepSeek's markers have these characters)

from __future__ import annotations

import json
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_engine.chat_formats import REASONING_FORMATS, TOOL_FORMATS, detect_formats, markers
from async_engine.chat_parser import new_parser

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from async_engine.chat_parser import Parts


class Output(NamedTuple):
    text: str
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    """(name, arguments)"""


def stream(tool: str, reasoning: str, pieces: Iterable[str], tail: str = "", **more: Any) -> list[Parts]:
    """What each piece released, the flush last."""
    parser = new_parser(tool, reasoning, tail, **more)
    assert parser is not None
    return [*map(parser.push, pieces), parser.flush()]


def joined(stream: Sequence[Parts]) -> Output:
    calls: list[list[str]] = []
    for delta in (delta for parts in stream for delta in parts.tool_calls):
        if delta.index == len(calls):
            assert delta.id == f"call_{delta.index}"
            assert delta.name
            calls.append([delta.name, delta.arguments])
        else:
            assert delta.index == len(calls) - 1
            assert (delta.id, delta.name) == ("", "")
            calls[-1][1] += delta.arguments
    text = "".join(parts.text for parts in stream)
    return Output(text, "".join(parts.reasoning for parts in stream), tuple((name, text) for name, text in calls))


def parse(tool: str, reasoning: str, text: str, tail: str = "", **more: Any) -> Output:
    return joined(stream(tool, reasoning, [text], tail, **more))


HARD = '{"ort": "Zürich 🦩 }]{[ \\"alt\\" \\\\", "tiefe": [{"a": {"b": []}}, 1.5e-3, null]}'
"""Braces in strings, escaped quotes and backslashes, nesting."""
NAMED = f'"name": "wetter", "arguments": {HARD}'
LLAMA = f'{{"name": "wetter", "parameters": {HARD}}}'
HERMES = f"<tool_call>\n{{{NAMED}}}\n</tool_call>"
XML = '<tool_call>\n<function=wetter>\n<parameter=ort>\nZürich "alt"\n\n</parameter>\n</function>\n</tool_call>'
SEEK, SEP, SEEK_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
R1 = f"{SEEK}function{SEP}wetter\n```json\n{HARD}\n```{SEEK_END}"
V31 = f"{SEEK}wetter{SEP}{HARD}{SEEK_END}"
ONE, TWO = (("wetter", HARD),), (("wetter", HARD),) * 2
KIMI = f"<|tool_call_begin|>functions.wetter:0<|tool_call_argument_begin|>{HARD}<|tool_call_end|>"

EXAMPLES: list[tuple[str, str, str, Output]] = [
    # Hermes, Qwen
    ("hermes", "", HERMES, Output("", "", ONE)),
    ("hermes", "", f"{HERMES}\n{HERMES}", Output("", "", TWO)),
    ("hermes", "think", f"<think>\nHm <x>\n</think>\n\nSo: {HERMES}", Output("So: ", "Hm <x>", ONE)),
    ("hermes", "think", f"{HERMES}\n<think>Noch</think>{HERMES} Da.\n", Output("Da.\n", "Noch", TWO)),
    ("hermes", "", "Nur <b>Text</b>. <tool_cal", Output("Nur <b>Text</b>. <tool_cal")),
    ("hermes", "", f'<tool_call>{{"arguments": {HARD}, "name": "wetter"}}</tool_call>', Output("", "", ONE)),
    ("hermes", "", f'<tool_call>{{"id": [1], "name": "wetter", "arguments":{HARD}, "x": 1}}', Output("", "", ONE)),
    ("hermes", "", '<tool_call>{"name": "j", "arguments": "{\\"a\\": 1}"}', Output("", "", (("j", '"{\\"a\\": 1}"'),))),
    ("hermes", "", '<tool_call>{"name": "jetzt"}</tool_call>', Output("", "", (("jetzt", "{}"),))),
    ("hermes", "", '<tool_call>{"name": "f", "arguments": {"a": "un\\', Output("", "", (("f", '{"a": "un\\'),))),
    ("hermes", "", '<tool_call>{"name": "f", "argum', Output('<tool_call>{"name": "f", "argum')),
    ("hermes", "", "<tool_call>no</tool_call> x", Output("<tool_call>no</tool_call> x")),
    ("hermes", "", "<tool_call>{'name': 'f'}</tool_call>", Output("<tool_call>{'name': 'f'}</tool_call>")),
    ("hermes", "", "<tool_call>{\"name\": \"f\", \"arguments\": {'a': 1}}", Output(
        "<tool_call>{\"name\": \"f\", \"arguments\": {'a': 1}}")),
    ("hermes", "", f"<tool_call>{HERMES}", Output("<tool_call>", "", ONE)),
    ("hermes", "", f"<tool_call>{{{NAMED}}}}}\n</tool_call> x", Output("}\nx", "", ONE)),
    ("hermes", "", '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>x', Output("x", "", (("f", '{"a": 1'),))),
    ("hermes", "", '<tool_call>{"name": "f", "arguments": {}, oh </tool_call>x', Output(", oh x", "", (("f", "{}"),))),
    ("hermes", "", '<tool_call>{"arguments": {}, "name": "f"', Output("", "", (("f", "{}"),))),
    ("hermes", "", '<tool_call>{"name": "f", "arguments": {}, "id": "a', Output("", "", (("f", "{}"),))),
    ("hermes", "", f"<tool_call>{{{NAMED}}}x<tool_call>{{{NAMED[:9]}", Output(f"x<tool_call>{{{NAMED[:9]}", "", ONE)),
    ("hermes", "think", "<tool_call><think>a</think>", Output("<tool_call><think>a</think>")),
    # Llama 3
    ("llama3", "", f"<|python_tag|>{LLAMA}", Output("", "", ONE)),
    ("llama3", "", f'{{"type": "function", "name": "wetter", "parameters": {HARD}}}', Output("", "", ONE)),
    ("llama3", "", f"{LLAMA}; {LLAMA}\n", Output("", "", TWO)),
    ("llama3", "", f"Gut.<|python_tag|>{LLAMA} ; x", Output("Gut.; x", "", ONE)),
    ("llama3", "", f"{LLAMA}; {LLAMA[:19]}", Output(f"; {LLAMA[:19]}", "", ONE)),
    ("llama3", "", '<|python_tag|>suche.call(query="x")', Output('<|python_tag|>suche.call(query="x")')),
    ("llama3", "", '{"name": "Bo", "age": 3}', Output('{"name": "Bo", "age": 3}')),
    ("llama3", "", '{"name": "Bo", "parameters": 3}', Output('{"name": "Bo", "parameters": 3}')),
    ("llama3", "", '{"name": "Bo"}', Output('{"name": "Bo"}')),
    ("llama3", "", 'Da: {"name": "f", "parameters": {}}', Output('Da: {"name": "f", "parameters": {}}')),
    # Mistral
    ("mistral", "", f'[TOOL_CALLS] [{{{NAMED}, "id": "abcdefghi"}}]', Output("", "", ONE)),
    ("mistral", "", f"A[TOOL_CALLS][{{{NAMED}}}, {{{NAMED}}}]", Output("A", "", TWO)),
    ("mistral", "mistral", f"[THINK]Hm[x[/THINK]So[TOOL_CALLS]wetter[ARGS]{HARD}[TOOL_CALLS]wetter{HARD}", Output(
        "So", "Hm[x", TWO)),
    ("mistral", "mistral", "A[THINK]b[/THINK]c", Output("Ac", "b")),
    ("mistral", "", f"[TOOL_CALLS]wetter[CALL_ID]abcdefghi[ARGS]{HARD}", Output("", "", ONE)),
    ("mistral", "", "[TOOL_CALLS]Sure, [1]", Output("[TOOL_CALLS]Sure, [1]")),
    ("mistral", "", '[TOOL_CALLS] [{"name": "f", "arguments": {"a', Output("", "", (("f", '{"a'),))),
    # DeepSeek
    ("deepseek_v3", "think", f"Hm.\n</think>\n\nSo.<｜tool▁calls▁begin｜>{R1}\n{R1}<｜tool▁calls▁end｜>", Output(
        "So.", "Hm.", TWO)),
    ("deepseek_v3", "", f"<｜tool▁calls▁begin｜>{SEEK}code{SEP}f", Output(f"<｜tool▁calls▁begin｜>{SEEK}code{SEP}f")),
    ("deepseek_v31", "", f"<｜tool▁calls▁begin｜>{V31}{V31}<｜tool▁calls▁end｜>", Output("", "", TWO)),
    ("deepseek_v31", "", f"<｜tool▁calls▁begin｜>{SEEK}f{SEP}{{}}}}{SEEK_END}{V31}<｜tool▁calls▁end｜>x", Output(
        "}x", "", (("f", "{}"), *ONE))),
    ("kimi_k2", "", f"<|tool_calls_section_begin|>{KIMI}{KIMI}<|tool_calls_section_end|>", Output("", "", TWO)),
    # Arguments between tags
    ("qwen3_coder", "think", f"<think>a\n</think>\n\n{XML}\n{XML}", Output(
        "", "a", (("wetter", '{"ort": "Zürich \\"alt\\"\\n"}'),) * 2)),
    ("qwen3_coder", "", "<tool_call>\n<function=f>\n</function>\n</tool_call>", Output("", "", (("f", "{}"),))),
    ("qwen3_coder", "", "<tool_call><function=f><parameter=a>1</par", Output("", "", (("f", '{"a": "1</par'),))),
    ("qwen3_coder", "", "<tool_call><function=f><parameter=>", Output("<parameter=>", "", (("f", "{"),))),
    ("qwen3_coder", "", "<tool_call><function=f>x", Output("<tool_call><function=f>x")),
    ("qwen3_coder", "", "<tool_call><function=f><parameter=a>1</parameter><parameter=>", Output(
        "<parameter=>", "", (("f", '{"a": "1"'),))),
    ("seed_oss", "seed_oss", "<seed:think>a</seed:think><seed:tool_call>\n<function=f>\n<parameter=a>1</parameter>\n"
     "<parameter=b>\\</parameter>\n</function>\n</seed:tool_call>", Output(
         "", "a", (("f", '{"a": "1", "b": "\\\\"}'),))),
    ("minimax_m2", "", '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">1</parameter>\n</invoke>\n'
     '<invoke name="g">\n</invoke>\n</minimax:tool_call>', Output("", "", (("f", '{"a": "1"}'), ("g", "{}")))),
    ("glm4", "think", "\n<think></think>\nA\n<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
     "\n<tool_call>g</tool_call>", Output("\nA\n", "", (("f", '{"a": "1"}'), ("g", "{}")))),
    ("", "command_a", "<|START_THINKING|>a<|END_THINKING|>b", Output("b", "a")),
    ("", "kimi_vl", "◁think▷a◁/think▷b", Output("b", "a")),
    ("", "think", "a <think>b</think>", Output("a <think>b</think>")),
    ("", "think", "<think>a\n\n", Output("", "a\n\n")),
    ("", "think", "\n\n", Output("\n\n")),
]  # fmt: skip
TAILS = {"deepseek_v3": "<｜Assistant｜><think>\n"}


@pytest.mark.parametrize(("tool", "reasoning", "text", "expected"), EXAMPLES)
def test_example_whole_and_cut_everywhere(tool: str, reasoning: str, text: str, expected: Output) -> None:
    tail = TAILS.get(tool, "")
    assert parse(tool, reasoning, text, tail) == expected
    assert joined(stream(tool, reasoning, text, tail)) == expected
    for cut in range(len(text)):
        assert joined(stream(tool, reasoning, [text[:cut], text[cut:]], tail)) == expected


def test_every_format_has_an_example_with_calls_or_reasoning() -> None:
    assert set(TOOL_FORMATS) == {tool for tool, _, _, output in EXAMPLES if output.calls}
    assert set(REASONING_FORMATS) == {reasoning for _, reasoning, _, output in EXAMPLES if output.reasoning}


@given(data=st.data())
@settings(max_examples=600, deadline=None)
def test_what_is_said_does_not_depend_on_the_cuts_and_nothing_is_lost(data: st.DataObject) -> None:
    tool = data.draw(st.sampled_from(["", *TOOL_FORMATS]))
    reasoning = data.draw(st.sampled_from(["", *REASONING_FORMATS] if tool else [*REASONING_FORMATS]))
    whole = [text for name, _, text, _ in EXAMPLES if name == tool and tool]
    bits = [
        *markers(tool, reasoning),
        *whole,
        "{",
        "}",
        '"',
        "\\",
        "[",
        ",",
        ":",
        " ",
        "\n",
        "<",
        "a",
        '"name"',
        '{"a": 1}',
    ]
    pieces = data.draw(st.lists(st.sampled_from(bits) | st.sampled_from(bits).flatmap(starts_of), max_size=12))
    text = "".join(pieces)
    inside = data.draw(st.booleans()) and bool(reasoning)
    tail = REASONING_FORMATS[reasoning].begin if inside else ""
    expected = parse(tool, reasoning, text, tail)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=20))
    parts = [text[start:end] for start, end in pairwise([0, *sorted(cuts), len(text)])]
    assert joined(stream(tool, reasoning, parts, tail)) == expected
    assert joined(stream(tool, reasoning, text, tail)) == expected
    if not expected.calls and not reasoning:
        assert expected.text == text


def starts_of(text: str) -> st.SearchStrategy[str]:
    return st.integers(0, len(text)).map(lambda length: text[:length])


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_only_what_may_begin_a_marker_is_held_back(data: st.DataObject) -> None:
    inside = data.draw(st.booleans())
    opens = ["\n</think>", "</think>"] if inside else ["<tool_call>"]
    bits = st.sampled_from(["<", "</", "<tool_call", "\n", "a", "🦩", *[marker[:-1] for marker in opens]])
    parser = new_parser("hermes", "think", "<think>" if inside else "")
    assert parser is not None
    seen = released = ""
    for piece in ["a", *data.draw(st.lists(bits, max_size=20))]:
        seen += piece
        parts = parser.push(piece)
        released += parts.reasoning if inside else parts.text
        held = next(
            size for size in reversed(range(len(seen) + 1))
            if size == 0 or any(marker.startswith(seen[-size:]) for marker in opens)
        )  # fmt: skip
        assert released == seen[: len(seen) - held]
    parts = parser.flush()
    assert released + parts.reasoning + parts.text == seen


@given(text=st.text(), tool=st.sampled_from(["", *TOOL_FORMATS]), reasoning=st.sampled_from([*REASONING_FORMATS]))
@settings(max_examples=200, deadline=None)
def test_text_without_markers_is_unchanged(text: str, tool: str, reasoning: str) -> None:
    assert joined(stream(tool, reasoning, text)) == Output(text)


def test_arguments_come_out_as_they_come_in() -> None:
    parser = new_parser("hermes", "", "")
    assert parser is not None
    head = parser.push('<tool_call>{"name": "wetter", "arguments": ' + HARD[:2])
    assert [(delta.name, delta.arguments) for delta in head.tool_calls] == [("wetter", HARD[:2])]
    for character in HARD[2:]:
        (delta,) = parser.push(character).tool_calls
        assert (delta.index, delta.id, delta.name, delta.arguments) == (0, "", "", character)
    assert parser.push("}</tool_call>").tool_calls == []


def test_a_text_that_is_no_call_is_let_go_at_the_first_character_that_tells() -> None:
    assert [parts.text for parts in stream("hermes", "", ["<tool_call>", " ", "{", "n", "o"])] == [
        *("", "", "", "<tool_call> {n", "o", "")
    ]
    assert [parts.text for parts in stream("llama3", "", ['{"', 'age"', ": 3}"])] == ["", '{"age"', ": 3}", ""]


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        ("<|Assistant|><think>\n", Output("b", "a")),
        ("<think>", Output("b", "a")),
        ("<think>\n\n</think>\n\n", Output("a</think>b")),
        ("<think> means?", Output("a</think>b")),
        ("", Output("a</think>b")),
    ],
)
def test_a_prompt_may_have_opened_the_reasoning(tail: str, expected: Output) -> None:
    assert parse("", "think", "a</think>b", tail) == expected


SCHEMAS = {
    "s": {"type": "string"}, "i": {"type": "integer"}, "o": {"type": "object"}, "b": {"type": "boolean"},
    "u": {"type": ["string", "null"]}, "x": {"anyOf": [{"type": "integer"}, {"type": "null"}]}, "e": {"enum": [1, 2]},
    "any": {},
}  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("s", "1", "1"), ("i", "1", 1), ("i", "eins", "eins"), ("o", '{"a": [1]}', {"a": [1]}), ("b", "True", True),
        ("b", "false", False), ("u", "null", "null"), ("x", "null", None), ("e", "2", 2), ("any", "2", "2"),
        ("unknown", "2", "2"), ("i", "NaN", "NaN"), ("i", "[" * 100_000, "[" * 100_000),
    ],
)  # fmt: skip
def test_schemas_tell_what_tagged_arguments_are(key: str, value: str, expected: object) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": SCHEMAS}}}, {"bad": 1}]
    text = f"<tool_call><function=f><parameter={key}>\n{value}\n</parameter></function></tool_call>"
    whole = parse("qwen3_coder", "", text, tools=tools)
    assert json.loads(whole.calls[0][1]) == {key: expected}
    assert joined(stream("qwen3_coder", "", text, tools=tools)) == whole


QWEN3 = "<tools>{{ tools }}</tools> <tool_call>\n{\"name\": ...}</tool_call> {{ '<think>\\n' + r + '\\n</think>' }}"
TEMPLATES = [
    ("hermes", "think", QWEN3),
    ("qwen3_coder", "", "<tool_call>\n<function=example>\n<parameter=p>\nv\n</parameter>"),
    ("glm4", "think", "<tool_call>{name}\n<arg_key>k</arg_key> <think></think>"),
    ("llama3", "", "<|start_header_id|>{{ '{\"name\": ' }} {{- '\"parameters\": ' }}"),
    ("llama3", "", "{{ '<|python_tag|>' + call }}"),
    ("mistral", "mistral", "{{ '[TOOL_CALLS]' + name + '[ARGS]' }}[THINK]"),
    ("deepseek_v3", "think", f"{R1.replace('wetter', 'x')}<｜tool▁calls▁begin｜><think>\\n"),
    ("deepseek_v31", "think", f"{V31}<｜tool▁calls▁begin｜></think><think>"),
    ("kimi_k2", "kimi_vl", "<|tool_calls_section_begin|> ◁think▷"),
    ("seed_oss", "seed_oss", "<seed:tool_call>\n<function=f><seed:think>"),
    ("minimax_m2", "", "<minimax:tool_call>"),
    ("", "command_a", "<|START_THINKING|>"),
    ("", "", "{{ messages }} <|start_header_id|>"),
]


@pytest.mark.parametrize(("tool", "reasoning", "template"), TEMPLATES)
def test_formats_are_known_from_the_template(tool: str, reasoning: str, template: str) -> None:
    assert detect_formats(template) == (tool, reasoning)


def test_every_format_can_be_detected() -> None:
    assert {tool for tool, _, _ in TEMPLATES} == {"", *TOOL_FORMATS}
    assert {reasoning for _, reasoning, _ in TEMPLATES} == {"", *REASONING_FORMATS}


def test_markers_are_what_may_be_special_tokens() -> None:
    assert markers("", "") == frozenset()
    assert markers("hermes", "think") == {"<tool_call>", "</tool_call>", "<think>", "</think>"}
    assert markers("llama3", "") == {"<|python_tag|>"}
    assert markers("mistral", "mistral") == {"[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"}
    assert markers("deepseek_v3", "") == {
        *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", SEEK, SEEK_END, SEP),
    }
    assert markers("glm4", "") >= {
        "<tool_call>",
        "</tool_call>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
    }


def test_no_format_means_no_parser_and_an_unknown_one_is_told() -> None:
    assert new_parser("", "", "<think>") is None
    with pytest.raises(ValueError, match="no tool format 'gpt'; there are hermes, llama3, "):
        new_parser("gpt", "", "")
    with pytest.raises(ValueError, match="no reasoning format 'gpt'; there are think, "):
        new_parser("", "gpt", "")
