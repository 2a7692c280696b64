"""Grammars: what they allow is valid, what is valid they allow, and nobody is hurt by the others."""

from __future__ import annotations

import json
import os
import queue
import random
import re
import signal
import threading
import time
from datetime import datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import jsonschema
import numpy as np
import pytest

from core_proc import grammar
from core_proc.grammar import Bits, GrammarCompiler, Matcher
from core_proc.grammar_sandbox import WALL_SECONDS, Sandbox
from core_proc.grammar_source import MAX_REGEX_BYTES, MAX_SOURCE_BYTES
from protos.errors import InvalidRequestError, OverloadedError, RequestFailedError, TailraceError
from protos.messages import GrammarSpec, Vocabulary
from tests.core_proc.grammar_schemas import SCHEMAS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

EOS, EOT, SPECIAL, EMPTY = 256, 257, 258, 259
TEXTS = [
    '{"',
    '":',
    '": "',
    '",',
    '"}',
    "},",
    "]}",
    "true",
    "false",
    "null",
    "the",
    " and",
    "name",
    "\n  ",
    "  ",
    "é",
    "a",
]
TOKENS = [bytes([i]) for i in range(256)]
TOKENS += [b"<eos>", b"<eot>", b"{", b"", *(text.encode() for text in TEXTS), "😀".encode()[:2], "😀".encode()[2:]]
VOCABULARY = Vocabulary(TOKENS, special_token_ids=(EOS, EOT, SPECIAL), eos_token_ids=(EOS, EOT))
VOCAB_SIZE = 330
WORDS = 11
CLOSERS = [b"}", b"]", b'"', b"]}", b'"}']


def tokens_of(text: str) -> Iterator[int]:
    """Longest tokens first; never special ones."""
    data = text.encode()
    by_length = sorted(
        (i for i in range(len(TOKENS)) if i not in (EOS, EOT, SPECIAL, EMPTY)), key=lambda i: -len(TOKENS[i])
    )
    while data:
        token = next(i for i in by_length if data.startswith(TOKENS[i]))
        yield token
        data = data[len(TOKENS[token]) :]


def compile_with(
    compiler: GrammarCompiler, kind: str, value: str = "", output: tuple[int, ...] = ()
) -> Matcher | TailraceError:
    results: queue.SimpleQueue[Matcher | TailraceError] = queue.SimpleQueue()
    compiler.submit(GrammarSpec(kind, value), output, results.put)  # type: ignore[arg-type]
    return results.get(timeout=60)


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(VOCABULARY, VOCAB_SIZE)
    yield compiler
    compiler.close()


@pytest.fixture
def make(compiler: GrammarCompiler) -> Callable[..., Matcher]:
    def make(kind: str, value: Any = "", output: tuple[int, ...] = ()) -> Matcher:
        value = value if isinstance(value, str) else json.dumps(value)
        result = compile_with(compiler, kind, value, output)
        assert isinstance(result, Matcher), result
        return result

    return make


def mask_of(matcher: Matcher) -> Bits:
    row = np.full(WORDS, -1, np.int32)
    matcher.fill(row)
    return row


def allowed(matcher: Matcher) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask_of(matcher).view(np.uint8), bitorder="little")).tolist())


def may_end(matcher: Matcher) -> bool:
    return EOS in allowed(matcher)


def follow(matcher: Matcher, text: str) -> bool:
    """Whether all of a text is allowed; each token is looked up in the mask before it is accepted."""
    for token in tokens_of(text):
        is_allowed = token in allowed(matcher)
        assert matcher.accept(token) == is_allowed
        if not is_allowed:
            return False
    return True


def matches(matcher: Matcher, text: str) -> bool:
    matcher = matcher.copy()
    return follow(matcher, text) and may_end(matcher)


def generate(matcher: Matcher, seed: int, num_free: int = 40) -> str:
    """A random walk; behind `num_free` tokens it takes what ends something, wherever it may."""
    rng, data = random.Random(seed), b""
    for step in range(3000):
        if matcher.is_done:
            break
        ids = allowed(matcher)
        assert ids, matcher
        if EOS in ids and (step >= num_free or rng.random() < 0.2):
            break
        ids -= {EOS, EOT}
        closers = [i for i in ids if TOKENS[i] in CLOSERS and rng.random() < (0.9 if step >= num_free else 0.2)]
        token = rng.choice(closers or sorted(ids))
        assert matcher.accept(token)
        data += TOKENS[token]
    assert may_end(matcher)
    return data.decode()


def check_format(schema: Any, document: Any) -> None:
    """Of a time, which jsonschema checks only with one more package."""
    if isinstance(schema, dict) and schema.get("format") in ("time", "date-time"):
        start = "" if schema["format"] == "date-time" else "1970-01-01T"
        datetime.fromisoformat(start + document.upper().replace(":60", ":59"))


# JSON schemas --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEMAS)
def test_random_output_is_valid_json_of_its_schema(make: Callable[..., Matcher], name: str) -> None:
    schema = SCHEMAS[name][0]
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    validator = jsonschema.Draft202012Validator(exact, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    matcher = make("json_schema", schema)
    for seed in range(4):
        text = generate(matcher.copy(), seed)
        document = json.loads(text, parse_float=Decimal)
        errors = [error.message for error in validator.iter_errors(document)]
        assert not errors, text
        check_format(schema, document)
        assert not re.search(r"\s{30}", re.sub(r'"(\\.|[^"\\])*"', "", text))


@pytest.mark.parametrize("name", SCHEMAS)
def test_valid_documents_are_allowed_token_by_token(make: Callable[..., Matcher], name: str) -> None:
    schema, documents = SCHEMAS[name]
    matcher = make("json_schema", schema)
    for document in documents:
        for style in ({"separators": (",", ":")}, {}, {"indent": 2}, {"indent": "\t"}):
            text = json.dumps(document, ensure_ascii=False, **style)  # type: ignore[arg-type]
            assert matches(matcher, text), text


def test_there_are_many_schemas() -> None:
    assert len(SCHEMAS) >= 60


@pytest.mark.parametrize(
    ("name", "document"),
    [
        ("flat object", {"name": "Ada", "age": 131}),
        ("flat object", {"name": "Ada"}),
        ("flat object", {"name": "a name too long", "age": 1}),
        ("flat object", {"name": "Ada", "age": 1, "more": 1}),
        ("array with bounds", [1]),
        ("array with bounds", [1, 2, 3, 4, 5]),
        ("tuple", ["a", 1]),
        ("tuple", ["a", 1, True, None]),
        ("pattern", "AB-12"),
        ("date", "2024-13-01"),
        ("uuid", "123e4567"),
        ("exclusive bounds", 1000),
        ("multiple of 5", 7),
        ("enum of strings", "dark"),
        ("recursive list", {"head": 1, "tail": 2}),
        ("nullable by type", "1"),
        ("map of integers", {"x": "1"}),
        ("allOf of bounds", 10),
    ],
)
def test_invalid_documents_are_not_allowed(make: Callable[..., Matcher], name: str, document: Any) -> None:
    assert not matches(make("json_schema", SCHEMAS[name][0]), json.dumps(document, separators=(",", ":")))


def test_json_object_is_any_object_and_nothing_else(make: Callable[..., Matcher]) -> None:
    matcher = make("json_object")
    for text in ('{"a": [1, {"b": null}], "c": "x"}', "{}", '{\n  "é": -1.5e3\n}'):
        assert matches(matcher, text)
    for text in ("[]", "1", '"x"', "{a: 1}", " {}", '{"a":1,}'):
        assert not matches(matcher, text)
    for seed in range(20):
        assert isinstance(json.loads(generate(matcher.copy(), seed)), dict)


def test_whitespace_is_bounded_and_a_schema_may_change_that(make: Callable[..., Matcher]) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    compact, free = ({**schema, "x-guidance": {"whitespace_flexible": flexible}} for flexible in (False, True))
    blanks = {
        '{"a":1}': (True, True, True),
        '{"a": 1}': (True, False, True),
        '{\n    "a": 1\r\n}': (True, False, True),
        '{  "a":1}': (False, False, True),
        '{\n\n"a":1}': (False, False, True),
        "{\n" + 21 * " " + '"a":1}': (False, False, True),
    }
    for text, expected in blanks.items():
        assert tuple(matches(make("json_schema", each), text) for each in (schema, compact, free)) == expected, text


# Other kinds ---------------------------------------------------------------------------------

REGEXES = [
    "a+b*", "(ab|a)(c|bcd)", "[^a-c\\d]{2}", "\\w+@\\w+\\.(com|org)", "^anchored$", "^a|b$", "(ab)$",
    "x{2,3}|y", "a/b\\\\c", "price \\$",
    "(é|😀|名)+", "\\d{3}-\\d{4}", "(?i)yes|no", ".{1,3}", "", "a|", "line\nbreak", "\\s\\S", "[\\w.-]+", "(a|b)*abb",
]  # fmt: skip
SAMPLES = [
    "", "a", "b", "ab", "aab", "abb", "ac", "abcd", "abc", "xy", "zz", "é", "😀名", "me@x.com", "me@x.net", "anchored",
    "anchored ", "xx", "xxx", "x", "y", "a/b\\c", "price $", "price", "555-1234", "555-123", "YES", "no", "abcde",
    "line\nbreak", " x", "a.b-c", "babb", "baba", "٣", "\n",
]  # fmt: skip


@pytest.mark.parametrize("pattern", REGEXES)
def test_regex_allows_what_python_matches(make: Callable[..., Matcher], pattern: str) -> None:
    matcher = make("regex", pattern)
    for text in SAMPLES:
        assert matches(matcher, text) == bool(re.fullmatch(pattern, text, re.ASCII)), text
    for seed in range(10):
        text = generate(matcher.copy(), seed, num_free=10)
        assert re.fullmatch(pattern, text, re.ASCII), text


def test_choices_are_exactly_the_list(make: Callable[..., Matcher]) -> None:
    choices = [
        "yes",
        "yes, but",
        "no",
        "é😀",
        'quote " and \\ and \\x41',
        "two\nlines\x00",
        " ",
        "%json",
        "<[258]>",
        "/a/",
    ]
    matcher = make("choices", choices)
    assert all(matches(matcher, choice) for choice in choices)
    assert not any(matches(matcher, text) for text in ("", "ye", "yes,", "yes, but no", "A", "{", "noo"))
    assert {generate(matcher.copy(), seed) for seed in range(400)} == set(choices)
    assert matches(make("choices", ["", "a"]), "")


def test_thousands_of_choices(make: Callable[..., Matcher]) -> None:
    matcher = make("choices", [f"item {i}" for i in range(9000)])
    assert matches(matcher, "item 8999")
    assert not matches(matcher, "item 9000")


GBNF = """
# arithmetic, as llama.cpp writes it
root  ::= expr "\\n"
expr  ::= term ([-+*/] term)*
term  ::= num | "(" ws expr ")"
num   ::= [0-9]+ ("." [0-9]{1,2})?
ws    ::= " "?
"""
LARK = """
%import common.INT
start: expr "\\n"
expr: expr /[-+*\\/]/ term | term
term: NUM | "(" " "? expr ")"
NUM: INT ("." /[0-9]{1,2}/)?
"""


@pytest.mark.parametrize("source", [GBNF, LARK])
def test_grammar_in_either_notation(make: Callable[..., Matcher], source: str) -> None:
    matcher = make("grammar", source)
    for text in ("1\n", "12+3.5\n", "( 1+2)*(3/4)\n", "((((7))))\n"):
        assert matches(matcher, text), text
    for text in ("", "1", "1+\n", "(1\n", "1.234\n", "a\n", "1\n\n"):
        assert not matches(matcher, text), text
    for seed in range(10):
        assert re.fullmatch(r"[0-9.()+*/ -]+\n", generate(matcher.copy(), seed))


def test_lark_grammar_with_json_inside(make: Callable[..., Matcher]) -> None:
    matcher = make(
        "grammar", 'start: "call " %json {"type": "object", "properties": {"x": {"type": "integer"}}} " end"'
    )
    assert matches(matcher, 'call {"x":1} end')
    assert not matches(matcher, 'call {"x":"1"} end')


def structures(*entries: tuple[str, Any, str], triggers: tuple[str, ...]) -> dict[str, Any]:
    keys = ("begin", "schema", "end")
    return {"structures": [dict(zip(keys, entry, strict=True)) for entry in entries], "triggers": triggers}


def test_structural_tag_is_free_text_until_a_trigger(make: Callable[..., Matcher]) -> None:
    place = {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    }
    source = structures(
        ("<function=weather>", place, "</function>"),
        ("<function=count>", {"type": "integer"}, "</function>"),
        ("[note]", True, ""),
        triggers=("<function=", "[note]"),
    )
    matcher = make("structural_tag", source)
    call = '<function=weather>{"city": "Oslo"}</function>'
    for text in ("", "Only text, with < and <func and [not.", call, f"Let me see. {call} Done é😀\n\n", f"{call}{call}",
                 "<function=count>12</function> x [note]{} y"):  # fmt: skip
        assert matches(matcher, text), text
    for text in ("<function=", "<function=other>", "<function=weather>{}", "<function=count>x", "<function=count>1",
                 '<function=weather>{"city": "Oslo"}<', "[note]x", "<function=count>1</function> [note]"):  # fmt: skip
        assert not matches(matcher, text), text
    assert not matcher.is_done
    for seed in range(10):
        generate(matcher.copy(), seed)


# Sources that are no good --------------------------------------------------------------------

BAD = [
    ("json_schema", "{", "truncated"),
    ("json_schema", "[1]", "got `array`"),
    ("json_schema", '{"type": "strin"}', "strin"),
    ("json_schema", '{"type": "object", "properties": 3}', "properties"),
    ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
    ("json_schema", '{"not": {"type": "string"}}', "not"),
    ("json_schema", '{"$ref": "#/$defs/none"}', "none"),
    ("json_schema", '{"$ref": "http://example.org/x.json"}', "example.org"),
    ("json_schema", '{"type": "string", "format": "no-such"}', "no-such"),
    ("json_schema", '{"type": "string", "pattern": "(?=x)"}', "look-around"),
    ("json_schema", '{"oneOf": [{"type": "integer"}, {"type": "number"}]}', "oneOf"),
    ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 4}', "minimum"),
    ("json_schema", '{"x-guidance": 1}', "x-guidance"),
    ("json_schema", "false", "false"),
    ("regex", "(", "unclosed group"),
    ("regex", "(" + "long" * 200, "invalid regex"),
    ("regex", "(?=a)b", "look-around"),
    ("regex", "(a)\\1", "backreferences"),
    ("regex", "a{3,2}", "repetition"),
    ("regex", "a^b", "lookarounds"),
    ("grammar", "", "start"),
    ("grammar", 'root ::= "a" other', "Rule 'other' not found"),
    ("grammar", 'rule ::= "a"', "No 'root' rule"),
    ("grammar", 'root ::= ("a"', "Expected ')' at line 1"),
    ("grammar", "start: other", 'at 1(8): unknown name: "other"'),
    ("grammar", 'start: "a"\nstart: "b"', "start"),
    ("grammar", "start: start", "nothing can match"),
    ("grammar", "no grammar at all", "Expected token"),
    ("choices", "yes", "malformed"),
    ("choices", "[]", "no choices"),
    ("choices", '["a", 1]', "Expected `str`, got `int`"),
    ("structural_tag", "{}", "missing required field `structures`"),
    ("structural_tag", structures(("<a>", {}, ""), triggers=("<b>",)), "'<a>' starts with no trigger"),
    ("structural_tag", structures(("<a>", {}, ""), triggers=("<a", "<a>")), "'<a' begins another"),
    ("structural_tag", structures(("<a>", {}, ""), triggers=("<a", "<b")), "'<b' begins no structure"),
    ("structural_tag", structures(("<a>", {"type": "x"}, ""), triggers=("<a",)), "x"),
    ("structural_tag", structures(triggers=()), "needs structures"),
]


@pytest.mark.parametrize(("kind", "value", "part"), BAD)
def test_bad_source_is_refused_with_its_field_and_one_clear_line(
    compiler: GrammarCompiler, kind: str, value: Any, part: str
) -> None:
    error = compile_with(compiler, kind, value if isinstance(value, str) else json.dumps(value))
    assert isinstance(error, InvalidRequestError), error
    assert error.field == f"constraint.{kind}"
    assert part in error.description
    assert len(error.description) <= 300
    assert error.description.isprintable()
    assert "llguidance" not in error.description
    assert kind == "grammar" or not re.match(r"(at )?\d+\(", error.description)


def chain(length: int) -> dict[str, Any]:
    links = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(length)}
    return {"$ref": "#/$defs/a0", "$defs": {**links, f"a{length}": {"type": "string"}}}


def nested(depth: int) -> str:
    return '{"type":"object","properties":{"a":' * depth + "{}" + "}}" * depth


HOSTILE = {
    "too long": ("json_schema", json.dumps({"enum": ["x" * 80] * 130_000}), "longer than"),
    "long regex": ("regex", "ab?" * 10_000, "longer than"),
    "deep schema": ("json_schema", nested(150), "recursion limit"),
    "deeper schema": ("json_schema", nested(5_000), "nested"),
    "chain of references": ("json_schema", chain(6_000), "memory"),
    "minutes of arithmetic": ("json_schema", {"type": "integer", "multipleOf": 999_983}, "longer to compile than"),
    "chain of terminals": (
        "grammar",
        "start: A0\n" + "".join(f'A{i}: "a" A{i + 1}\n' for i in range(9_000)) + 'A9000: "x"',
        "memory",
    ),
    "deep brackets": ("grammar", "start: " + "(" * 50_000 + '"x"' + ")" * 50_000, "nested"),
    "deep brackets, GBNF": ("grammar", "root ::= " + "(" * 50_000 + '"x"' + ")" * 50_000, "nested"),
    "intersections": ("grammar", "start: R\nR: /(.*a.{14})/ & /(.*b.{15})/ & ~/(.*c.{13})/", "fuel"),
    "endless recursion": ("json_schema", {"$ref": "#"}, "nothing can match"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_source_is_refused_in_time_and_stalls_nobody(compiler: GrammarCompiler, name: str) -> None:
    kind, value, part = HOSTILE[name]
    compile_with(compiler, "regex", "warm")  # the sandbox runs
    gaps, stop = [0.0], threading.Event()

    def tick() -> None:
        last = time.perf_counter()
        while not stop.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    ticker = threading.Thread(target=tick)
    ticker.start()
    start = time.perf_counter()
    error = compile_with(compiler, kind, value if isinstance(value, str) else json.dumps(value))
    seconds = time.perf_counter() - start
    stop.set()
    ticker.join()
    assert isinstance(error, InvalidRequestError)
    assert error.field == f"constraint.{kind}"
    assert part in error.description
    assert seconds < WALL_SECONDS  # the limit that counts is of processor time
    assert max(gaps) < 0.5


@pytest.mark.parametrize(
    "pattern", ["(a+)+b", "(a|a)*(a|a)*c", "a{1,1000000}", "((a{1,1000}){1,1000}){1,1000}", "(a|b)*a(a|b){18}"]
)
def test_expensive_regexes_are_no_trouble(make: Callable[..., Matcher], pattern: str) -> None:
    matcher = make("regex", pattern)
    seconds = []
    for _ in range(60):
        start = time.thread_time()
        mask_of(matcher)
        seconds.append(time.thread_time() - start)
        if not matcher.accept(ord("a")):
            break
    assert len(seconds) > 15
    assert max(seconds) < 0.1


def test_limits_of_length_are_of_bytes(compiler: GrammarCompiler, make: Callable[..., Matcher]) -> None:
    assert matches(make("choices", ["x" * (MAX_SOURCE_BYTES - 100)]), "x" * 10) is False
    assert isinstance(compile_with(compiler, "choices", json.dumps(["x" * MAX_SOURCE_BYTES])), InvalidRequestError)
    assert isinstance(compile_with(compiler, "regex", "é" * (MAX_REGEX_BYTES // 2 + 1)), InvalidRequestError)


# A matcher -----------------------------------------------------------------------------------


def test_end_of_sequence_is_allowed_exactly_where_the_grammar_may_end(make: Callable[..., Matcher]) -> None:
    matcher = make("regex", "ab(c|cd)?")
    ends = []
    for token in b"abc":
        ends.append(allowed(matcher) >= {EOS, EOT})
        assert matcher.copy().accept(EOS) == matcher.copy().accept(EOT) == ends[-1]
        assert matcher.accept(token)
    assert ends == [False, False, True]
    assert allowed(matcher) == {ord("d"), EOS, EOT}
    assert not matcher.is_done
    assert matcher.accept(EOT)
    assert matcher.is_done
    assert not matcher.accept(ord("d"))


def test_done_when_nothing_may_follow(make: Callable[..., Matcher]) -> None:
    matcher = make(
        "json_schema", {"type": "object", "properties": {"a": {"type": "boolean"}}, "additionalProperties": False}
    )
    for token in tokens_of('{"a":true'):
        assert matcher.accept(token)
        assert not matcher.is_done
    assert matcher.accept(ord("}"))
    assert matcher.is_done
    assert allowed(matcher) == {EOS, EOT}
    assert matcher.error is None
    assert make("regex", "").is_done
    assert not make("choices", ["a", "ab"]).is_done


def test_refused_token_changes_nothing(make: Callable[..., Matcher]) -> None:
    matcher = make("regex", "abc")
    assert matcher.accept(ord("a"))
    before = mask_of(matcher)
    for token in (ord("c"), ord("a"), EOS, SPECIAL, EMPTY, len(TOKENS), VOCAB_SIZE - 1, VOCAB_SIZE, 10**6, -1):
        assert not matcher.accept(token)
    assert np.array_equal(mask_of(matcher), before)
    assert matcher.error is None
    assert matcher.accept(ord("b"))


def test_copies_go_their_own_ways(make: Callable[..., Matcher]) -> None:
    matcher = make("regex", "a(b+c|d+e)")
    assert matcher.accept(ord("a"))
    left, right = matcher.copy(), matcher.copy()
    assert left.accept(ord("b"))
    assert right.accept(ord("d"))
    assert allowed(matcher) == {ord("b"), ord("d")}
    assert allowed(left) == {ord("b"), ord("c")}
    assert allowed(right) == {ord("d"), ord("e")}
    assert left.accept(ord("c"))
    assert (left.is_done, right.is_done, matcher.is_done) == (True, False, False)
    assert left.copy().is_done


def test_replayed_output_leads_to_the_same_state(make: Callable[..., Matcher], compiler: GrammarCompiler) -> None:
    schema = SCHEMAS["tool call"][0]
    output = tuple(tokens_of('{"name": "get_weather", "arguments": {"location": "Os'))
    walked, replayed = make("json_schema", schema), make("json_schema", schema, output)
    assert all(map(walked.accept, output))
    assert np.array_equal(mask_of(walked), mask_of(replayed))
    for token in tokens_of('lo"}}'):
        assert walked.accept(token) == replayed.accept(token) is True
        assert np.array_equal(mask_of(walked), mask_of(replayed))
    assert walked.is_done
    assert replayed.is_done
    error = compile_with(compiler, "json_schema", json.dumps(schema), (*output, SPECIAL))
    assert isinstance(error, InvalidRequestError)
    assert error.field == "constraint.json_schema"
    assert "output" in error.description


def test_mask_allows_every_spelling_and_no_token_that_is_no_text(make: Callable[..., Matcher]) -> None:
    twin = 260 + TEXTS.index("a")
    anything = allowed(make("regex", "(?s:.*)"))
    assert anything >= {ord("a"), twin, ord("{"), EOS, EOT}
    assert not anything & {SPECIAL, EMPTY}
    assert max(anything) < len(TOKENS)
    assert allowed(make("regex", "ab")) == {ord("a"), twin}
    assert SPECIAL not in allowed(make("json_object"))
    assert allowed(make("grammar", "start: <[0-255]>")) <= set(range(len(TOKENS))) - {SPECIAL, EMPTY}


def test_mask_overwrites_its_row_and_is_zero_beyond_the_vocabulary(make: Callable[..., Matcher]) -> None:
    for fill in (0, -1):
        row = np.full(WORDS, fill, np.int32)
        make("regex", "(?s:.*)").fill(row)
        bits = np.unpackbits(row.view(np.uint8), bitorder="little")
        assert bits[ord("a")]
        assert not bits[len(TOKENS) :].any()
    with pytest.raises(ValueError, match="buffer size"):
        make("json_object").fill(np.zeros(WORDS - 1, np.int32))


def test_grammar_that_outgrows_its_limits_fails_its_own_sequence(make: Callable[..., Matcher]) -> None:
    pattern = "(.*a.{300}b)"
    matcher, rng = make("regex", pattern), random.Random(0)
    for _ in range(20_000):
        ids = allowed(matcher)
        if not ids:
            break
        matcher.accept(rng.choice([ord("a"), ord("c")]))
    assert not mask_of(matcher).any()
    assert matcher.error is not None
    assert "too many" in matcher.error
    assert not matcher.accept(ord("a"))
    assert not matcher.is_done
    bits = np.full((2, WORDS), -1, np.int32)
    other = make("regex", pattern)
    for each, row in zip((matcher, other), bits, strict=True):
        each.fill(row)
    assert not bits[0].any()
    assert bits[1].any()
    assert other.error is None


def test_grammar_whose_steps_get_slow_fails_its_own_sequence(make: Callable[..., Matcher]) -> None:
    matcher = make("grammar", 'start: a\na: a a | a a a | "x" |')
    seconds = []
    while True:
        assert len(seconds) < 3000
        start = time.thread_time()
        if not matcher.accept(ord("x")):
            break
        seconds.append(time.thread_time() - start)
    assert max(seconds) < 0.2
    assert sum(each for each in seconds if each > grammar.SLOW_ACCEPT_SECONDS) < 2 * grammar.MAX_SLOW_SECONDS
    assert not mask_of(matcher).any()
    assert not matcher.is_done
    assert matcher.error is not None
    assert "too" in matcher.error


# The compiler --------------------------------------------------------------------------------


def test_known_constraint_is_answered_at_once(compiler: GrammarCompiler, make: Callable[..., Matcher]) -> None:
    make("regex", "known")
    threads: list[threading.Thread] = []
    compiler.submit(GrammarSpec("regex", "known"), (), lambda _: threads.append(threading.current_thread()))
    assert threads == [threading.current_thread()]
    compile_with(compiler, "regex", "(bad")
    compiler.submit(GrammarSpec("regex", "(bad"), (), lambda _: threads.append(threading.current_thread()))
    assert len(threads) == 2


def test_cache_is_bounded_and_keeps_the_recent(compiler: GrammarCompiler, make: Callable[..., Matcher]) -> None:
    make("regex", "n0")
    first = compiler._cache["regex", "n0"]
    for number in range(1, grammar.MAX_CACHED + 5):
        make("regex", f"n{number}")
        make("regex", "n0", (ord("n"),) * (number % 2))
    assert len(compiler._cache) == grammar.MAX_CACHED
    assert compiler._cache["regex", "n0"] is first
    assert ("regex", "n1") not in compiler._cache


def test_worn_grammar_is_compiled_afresh(
    compiler: GrammarCompiler, make: Callable[..., Matcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "MAX_COPIES", 3)
    grammars = {id(make("regex", "worn")._grammar) for _ in range(3)}
    first = compiler._cache["regex", "worn"]
    assert grammars == {id(first)}
    assert matches(make("regex", "worn"), "worn")
    assert compiler._cache["regex", "worn"] is not first


def test_queue_is_bounded(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "MAX_WAITING", 0)
    assert isinstance(compile_with(compiler, "regex", "no room"), OverloadedError)


@pytest.mark.parametrize(
    "value", ["start: (", "start: start", "start: R\nR: /(.*a.{14})/ & /(.*b.{15})/ & ~/(.*c.{13})/"]
)
def test_sandbox_refuses_by_itself_what_does_not_compile(value: str) -> None:
    sandbox = Sandbox()
    with pytest.raises(InvalidRequestError):
        sandbox.try_out(GrammarSpec("grammar", value))
    sandbox.close()


def test_sandbox_that_was_killed_is_replaced(compiler: GrammarCompiler, make: Callable[..., Matcher]) -> None:
    make("regex", "before")
    child = compiler._sandbox._child
    assert child is not None
    os.kill(child.pid, signal.SIGKILL)
    make("regex", "after")
    assert compiler._sandbox._child is not child


def test_close_ends_the_sandbox_while_it_compiles() -> None:
    compiler = GrammarCompiler(VOCABULARY, VOCAB_SIZE)
    assert isinstance(compile_with(compiler, "regex", "x"), Matcher)
    child = compiler._sandbox._child
    assert child is not None
    results: queue.SimpleQueue[Matcher | TailraceError] = queue.SimpleQueue()
    compiler.submit(GrammarSpec("json_schema", '{"type":"integer","multipleOf":999983}'), (), results.put)
    time.sleep(0.2)
    compiler.close()
    assert child.poll() is not None
    assert isinstance(results.get(timeout=10), TailraceError)


def test_vocabulary_without_an_end_of_sequence() -> None:
    compiler = GrammarCompiler(Vocabulary([b"<pad>", b"a", b"b"], (0,), ()), 3)
    matcher = compile_with(compiler, "regex", "ab?")
    assert isinstance(matcher, Matcher)
    row = np.zeros(1, np.int32)
    masks = []
    for token in (1, 2):
        matcher.fill(row)
        masks.append(int(row[0]))
        assert matcher.accept(token)
    assert masks == [0b010, 0b100]
    assert matcher.is_done
    compiler.close()


@pytest.mark.parametrize("ids", [((40,), ()), ((), (40,))])
def test_vocabulary_that_makes_no_sense_fails_requests_and_not_the_worker(ids: tuple[tuple[int], tuple[int]]) -> None:
    compiler = GrammarCompiler(Vocabulary([b"a"], *ids), 1)
    for _ in range(2):
        assert isinstance(compile_with(compiler, "regex", "a"), RequestFailedError)
    compiler.close()
