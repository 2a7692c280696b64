"""Reads one tool call, in each of the spellings of chat_formats.

The arguments go out as they come in. JSON is delimited, not parsed: strings, escapes and brackets are
followed, and a value is broken off at the first character that JSON has not outside of strings. So
the arguments are the model's own text, byte for byte, also where "arguments" is a JSON string that holds
JSON: then they are that string, with its quotes. Only TaggedCall, which is not JSON, has to make some.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Protocol

from async_engine.chat_formats import JsonCall, NamedCall
from async_engine.text_cursor import SPACE, markers_of

if TYPE_CHECKING:
    from async_engine.chat_formats import TaggedCall
    from async_engine.text_cursor import Emit, Reading, TextCursor

_IN_STRING = re.compile(r'[^"\\]+')
_BETWEEN = re.compile(r"[ \t\r\n:,\d.+\-aeflnrstuE]+")
_SCALAR = re.compile(r"[\d.+\-aeflnrstuE]+")
_NAME = re.compile(r"[\w.:/\-]+")
_KEY = re.compile(r'[^<>"\r\n]+')
_CALL_KEYS = {"name", "arguments", "parameters", "type", "id"}


class MalformedCallError(Exception):
    """What comes next, or that nothing does, does not continue a call."""


class CallSink(Protocol):
    def begin(self, name: str) -> None:
        """The head is read: this is a call. What `cursor.taken` has noted is part of it."""

    def write(self, piece: str) -> None:
        """The arguments continue."""

    def is_text(self, key: str) -> bool:
        """Whether this argument of the call is a string, whatever it looks like."""


def read_call(cursor: TextCursor, call: JsonCall | NamedCall | TaggedCall, sink: CallSink) -> Reading[None]:
    """Takes one whole call. MalformedCallError comes before `begin` if there is none, else where it breaks off:
    what `cursor.taken` has then is not part of it.
    """
    if isinstance(call, JsonCall):
        yield from _json_call(cursor, call, sink)
    elif isinstance(call, NamedCall):
        yield from _named_call(cursor, call, sink)
    else:
        yield from _tagged_call(cursor, call, sink)


def _expect(cursor: TextCursor, *options: str) -> Reading[str]:
    yield from cursor.run(SPACE)
    found = yield from cursor.literal(*options)
    if not found:
        raise MalformedCallError
    return found


def _json_call(cursor: TextCursor, call: JsonCall, sink: CallSink) -> Reading[None]:
    name = ""
    early: list[str] = []
    """Arguments that came before the name."""
    begun = False
    yield from _expect(cursor, "{")
    while True:
        yield from cursor.run(SPACE)
        key = yield from _string(cursor)
        if call.bare and not begun and key not in _CALL_KEYS:
            raise MalformedCallError
        yield from _expect(cursor, ":")
        yield from cursor.run(SPACE)
        if key == "name" and not name:
            name = yield from _string(cursor)
            if not name:
                raise MalformedCallError
            if early:
                _begin(cursor, sink, name, "".join(early))
                begun = True
        elif key in ("arguments", "parameters") and not begun and not early:
            if name:
                yield from _arguments(cursor, sink, name, only_objects=call.bare)
                begun = True
            else:
                yield from _value(cursor, early.append)
        else:
            yield from _value(cursor)
        if (yield from _expect(cursor, ",", "}")) == "}":
            break
    if not begun:
        if call.bare or not name:
            raise MalformedCallError
        _begin(cursor, sink, name, "".join(early) or "{}")


def _named_call(cursor: TextCursor, call: NamedCall, sink: CallSink) -> Reading[None]:
    for part in call.before:
        yield from _expect(cursor, part)
    written = yield from _word(cursor, _NAME)
    found = re.fullmatch(call.name, written)
    if found is None:
        raise MalformedCallError
    yield from cursor.run(SPACE)
    if call.id_before and (yield from cursor.literal(call.id_before)):
        yield from _word(cursor, _NAME)
    yield from cursor.run(SPACE)
    if call.after and not (yield from cursor.literal(call.after)) and not call.may_lack_after:
        raise MalformedCallError
    yield from cursor.run(SPACE)
    yield from _arguments(cursor, sink, found.group(1), only_objects=True)
    if call.close:
        yield from _expect(cursor, call.close)


def _tagged_call(cursor: TextCursor, call: TaggedCall, sink: CallSink) -> Reading[None]:
    if call.before:
        yield from _expect(cursor, call.before)
    name = yield from _word(cursor, _NAME)
    if call.after:
        yield from _expect(cursor, call.after)
    found = yield from _expect(cursor, call.key_before, call.close)
    _begin(cursor, sink, name, "{")
    cursor.taken = [found]
    separator = ""
    ends = markers_of("\n" + call.value_after, call.value_after) if call.padded else markers_of(call.value_after)
    while found != call.close:
        key = yield from _word(cursor, _KEY)
        yield from _expect(cursor, call.key_after)
        if call.value_before:
            yield from _expect(cursor, call.value_before)
        if call.padded:
            yield from cursor.literal("\n")
        cursor.taken = None
        sink.write(f"{separator}{_quoted(key)}: ")
        separator = ", "
        if sink.is_text(key):
            sink.write('"')
            if (yield from cursor.until(ends, lambda piece: sink.write(_quoted(piece)[1:-1]))):
                sink.write('"')
        else:
            pieces: list[str] = []
            whole = yield from cursor.until(ends, pieces.append)
            sink.write(_as_json("".join(pieces)) if whole else "".join(pieces))
        cursor.taken = []
        found = yield from _expect(cursor, call.key_before, call.close)
    sink.write("}")


def _begin(cursor: TextCursor, sink: CallSink, name: str, arguments: str) -> None:
    sink.begin(name)
    sink.write(arguments)
    cursor.taken = []


def _word(cursor: TextCursor, pattern: re.Pattern[str]) -> Reading[str]:
    """Takes a word, which there must be."""
    yield from cursor.run(SPACE)
    pieces: list[str] = []
    yield from cursor.run(pattern, pieces.append)
    if not pieces:
        raise MalformedCallError
    return "".join(pieces)


def _arguments(cursor: TextCursor, sink: CallSink, name: str, only_objects: bool) -> Reading[None]:
    """Begins the call if what comes next can be its arguments, and takes them."""
    first = yield from cursor.peek()
    depth = 0
    pieces = []
    if first == "{":
        # Text in braces that is not JSON, like a dict of Python's, mostly shows here, before the call is begun.
        pieces.append(cursor.take(1))
        yield from cursor.run(SPACE, pieces.append)
        depth = 1
        if (yield from cursor.peek()) not in ('"', "}"):
            raise MalformedCallError
    elif only_objects or not (first in ('"', "[") or _SCALAR.match(first)):
        raise MalformedCallError
    sink.begin(name)
    cursor.taken = None
    for piece in pieces:
        sink.write(piece)
    yield from _value(cursor, sink.write, depth)
    cursor.taken = []


def _value(cursor: TextCursor, emit: Emit | None = None, depth: int = 0) -> Reading[None]:
    """Takes a JSON value, or its rest behind `depth` open brackets. Which bracket closes which is not looked at."""
    while True:
        character = yield from cursor.peek()
        if character == '"':
            yield from _string_text(cursor, emit)
        elif character in ("{", "["):
            depth += 1
            _emit(cursor, emit)
        elif depth and character in ("}", "]"):
            depth -= 1
            _emit(cursor, emit)
        elif character and (_BETWEEN if depth else _SCALAR).match(character):
            yield from cursor.run(_BETWEEN if depth else _SCALAR, emit)
        else:
            raise MalformedCallError
        if not depth:
            return


def _emit(cursor: TextCursor, emit: Emit | None) -> None:
    piece = cursor.take(1)
    if emit is not None:
        emit(piece)


def _string_text(cursor: TextCursor, emit: Emit | None) -> Reading[None]:
    """Takes a JSON string with its quotes, the first of which comes next."""
    _emit(cursor, emit)
    while True:
        yield from cursor.run(_IN_STRING, emit)
        character = yield from cursor.peek()
        if not character:
            raise MalformedCallError
        _emit(cursor, emit)
        if character == '"':
            return
        if not (yield from cursor.peek()):
            raise MalformedCallError
        _emit(cursor, emit)


def _string(cursor: TextCursor) -> Reading[str]:
    """Takes a JSON string and returns what it says."""
    if (yield from cursor.peek()) != '"':
        raise MalformedCallError
    pieces: list[str] = []
    yield from _string_text(cursor, pieces.append)
    try:
        value: str = json.loads("".join(pieces))
    except ValueError:
        raise MalformedCallError from None
    return value


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _as_json(text: str) -> str:
    """The text itself if it is JSON, else what it is in Python, else a string."""
    stripped = text.strip()
    try:
        json.loads(stripped, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return {"True": "true", "False": "false", "None": "null"}.get(stripped) or _quoted(text)
    return stripped


def _refuse(constant: str) -> Any:
    raise ValueError(constant)
