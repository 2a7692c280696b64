"""ChatParser: the text of one sequence, taken apart into answer, reasoning and tool calls while it streams."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

from async_engine.call_reader import MalformedCallError, read_call
from async_engine.chat_formats import REASONING_FORMATS, TOOL_FORMATS, JsonCall, NamedCall, TaggedCall
from async_engine.text_cursor import SPACE, TextCursor, markers_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from async_engine.chat_formats import ReasoningFormat, ToolFormat
    from async_engine.text_cursor import Markers, Reading

_LINE_BREAKS = re.compile(r"\n+")
Schemas = dict[str, dict[str, Any]]
"""By tool and parameter, the JSON schema of the parameter."""


class ToolCallDelta(msgspec.Struct, frozen=True, gc=False):
    """New text of one call."""

    index: int
    """Which call of the output, from 0."""
    id: str
    """With the call's first delta, else empty."""
    name: str
    """With the call's first delta, else empty."""
    arguments: str
    """The next piece of the arguments' JSON text."""


class Parts(msgspec.Struct, frozen=True, gc=False):
    """What became certain. In the output, `text` and `reasoning` may lie before or behind `tool_calls`."""

    text: str
    reasoning: str
    tool_calls: list[ToolCallDelta]


def new_parser(
    tool_format: str,
    reasoning_format: str,
    prompt_text_tail: str,
    *,
    id_prefix: str = "call_",
    tools: Sequence[Mapping[str, Any]] = (),
) -> ChatParser | None:
    """A parser for one sequence; None if there is nothing to parse, both formats being "".

    A prompt that ends with the marker that opens reasoning has opened it. `tools` are those the template was given:
    formats that do not spell arguments as JSON need their schemas to tell the number 1 from the string "1", and
    without a schema take every argument for a string. Raises ValueError for a format that is in no table.
    """
    for kind, name, table in (
        ("tool", tool_format, TOOL_FORMATS),
        ("reasoning", reasoning_format, REASONING_FORMATS),
    ):
        if name and name not in table:
            raise ValueError(f"no {kind} format {name!r}; there are {', '.join(table)}")
    if not tool_format and not reasoning_format:
        return None
    tool = TOOL_FORMATS[tool_format] if tool_format else None
    reasoning = REASONING_FORMATS[reasoning_format] if reasoning_format else None
    inside = reasoning is not None and prompt_text_tail.rstrip().endswith(reasoning.begin)
    tagged = tool is not None and any(isinstance(call, TaggedCall) for call in tool.calls)
    return ChatParser(tool, reasoning, inside, id_prefix, _schemas(tools) if tagged else {})


class ChatParser:
    """Takes the text of one sequence in pieces of any size; what it makes of it does not depend on their borders.

    Held back is only what may still turn out to be a marker, and a call until its head is read: its name, and that
    arguments begin. Text that looked like a call and is none goes out unchanged. A call that breaks off keeps the
    arguments it has, and what follows is text. Whitespace behind a call belongs to it.

    The time is proportional to the length of the text.
    """

    __slots__ = (
        "_broken",
        "_calls",
        "_closing",
        "_cursor",
        "_fast",
        "_fresh",
        "_in_reasoning",
        "_in_text",
        "_last",
        "_next",
        "_opening",
        "_reading",
        "_reasoning",
        "_text",
        "_thought",
        "_tool",
    )

    def __init__(
        self,
        tool: ToolFormat | None,
        reasoning: ReasoningFormat | None,
        inside_reasoning: bool,
        id_prefix: str,
        schemas: Schemas,
    ) -> None:
        self._tool = tool
        self._reasoning = reasoning
        self._cursor = TextCursor()
        self._calls = _Calls(id_prefix, schemas)
        self._text: list[str] = []
        self._thought: list[str] = []
        self._in_reasoning = inside_reasoning
        self._fresh = True
        """No text since the output's start, or the last reasoning or call."""
        self._broken = False
        """The last call broke off, so the markers that were to close it are still to come."""
        self._fast: Markers | None = None
        """While copying text, the markers that end it."""

        begin = tool.begin if tool is not None else ""
        think = reasoning.begin if reasoning is not None else ""
        bare = tool is not None and any(isinstance(call, JsonCall) and call.bare for call in tool.calls)
        self._opening = tuple(filter(None, (begin, think, "{" if bare else "")))
        """What ends text while it is fresh, in the midst of it, and behind a broken call."""
        opening = (begin, think if reasoning is not None and reasoning.anywhere else "")
        self._in_text = markers_of(*opening)
        self._closing = self._in_text
        self._last = ""
        """The last of what closes calls."""
        self._next: tuple[str, ...] = ()
        """What may stand behind a call that is whole."""
        if tool is not None:
            closes = [call.close for call in tool.calls if not isinstance(call, JsonCall)]
            self._closing = markers_of(*opening, tool.end, tool.call_begin, tool.call_end, *closes)
            self._last = tool.end or "".join(closes)
            self._next = tuple(filter(None, (tool.end, tool.separator, tool.call_begin or _first_of(tool))))
        self._reading = self._output()
        next(self._reading)

    def push(self, text: str) -> Parts:
        """What `text` makes certain. Joined over an output, with `flush`, this is what one push of it all gives."""
        fast = self._fast
        if fast is not None and not self._cursor.text and fast.find_first(text) is None:
            return Parts("", text, []) if self._in_reasoning else Parts(text, "", [])
        self._cursor.text += text
        next(self._reading)
        return self._drain()

    def flush(self) -> Parts:
        """What is still held back, once nothing follows. The parser is then spent."""
        self._cursor.ended = True
        for _ in self._reading:
            pass
        return self._drain()

    def _drain(self) -> Parts:
        parts = Parts("".join(self._text), "".join(self._thought), self._calls.drain())
        self._text.clear()
        self._thought.clear()
        return parts

    def _output(self) -> Reading[None]:
        if self._in_reasoning:
            yield from self._read_reasoning()
        while not self._cursor.finished:
            marker = yield from self._read_text()
            if not marker:
                continue
            if self._reasoning is not None and marker == self._reasoning.begin:
                yield from self._read_reasoning()
            elif self._tool is not None and marker in (self._tool.begin, self._tool.call_begin, "{"):
                yield from self._read_calls(self._tool, marker)
            elif marker == self._last:
                yield from self._over()

    def _over(self) -> Reading[None]:
        """Behind the end of calls."""
        self._broken = False
        self._fresh = True
        yield from self._cursor.run(SPACE)

    def _read_text(self) -> Reading[str]:
        """Takes text up to and with a marker that ends it."""
        cursor = self._cursor
        if self._fresh:
            yield from cursor.run(SPACE, self._text.append)
            marker = yield from cursor.literal(*self._opening)
            if marker:
                return marker
            self._fresh = False
        self._fast = self._closing if self._broken else self._in_text
        marker = yield from cursor.until(self._fast, self._text.append)
        self._fast = None
        return marker

    def _read_reasoning(self) -> Reading[None]:
        assert self._reasoning is not None
        cursor = self._cursor
        yield from cursor.run(_LINE_BREAKS)
        self._in_reasoning = True
        self._fast = markers_of("\n" + self._reasoning.end, self._reasoning.end)
        yield from cursor.until(self._fast, self._thought.append)
        self._fast = None
        self._in_reasoning = False
        yield from cursor.run(_LINE_BREAKS)
        self._fresh = True

    def _read_calls(self, tool: ToolFormat, marker: str) -> Reading[None]:
        cursor, calls = self._cursor, self._calls
        before = calls.count
        cursor.taken = [marker]
        try:
            yield from self._read_run(tool, marker)
        except MalformedCallError:
            # The head of no call is text, and so is what does not belong to a call that broke off. An output that
            # ends within the frame of a call has no more to say.
            if not (calls.open and cursor.finished):
                self._text += cursor.taken or ()
            self._fresh = False
            self._broken = self._broken or calls.count > before
        else:
            yield from self._over()
        finally:
            calls.open = False
            cursor.taken = None

    def _read_run(self, tool: ToolFormat, marker: str) -> Reading[None]:
        """Takes all calls behind a marker, to what closes them."""
        cursor, calls = self._cursor, self._calls
        expected = self._next
        if marker == "{":
            self._give_back(marker)
        elif marker == tool.begin:
            yield from cursor.run(SPACE)
            listed = any(isinstance(call, JsonCall) and call.in_list for call in tool.calls)
            if listed and (yield from cursor.literal("[")):
                expected = (",", "]")
            if tool.call_begin and not (yield from cursor.literal(tool.call_begin)):
                raise MalformedCallError
        while True:
            yield from cursor.run(SPACE)
            spelling = tool.calls[0]
            if len(tool.calls) > 1 and (yield from cursor.peek()) != "{" and expected is self._next:
                spelling = tool.calls[1]
            yield from read_call(cursor, spelling, calls)
            yield from cursor.run(SPACE)
            if tool.call_end:
                yield from cursor.literal(tool.call_end)
                yield from cursor.run(SPACE)
            cursor.taken = []
            found = yield from cursor.literal(*expected)
            if found in ("", tool.end, "]"):
                if not found and (tool.end or expected is not self._next):
                    raise MalformedCallError
                return
            calls.open = False
            if found == _first_of(tool):
                self._give_back(found)

    def _give_back(self, literal: str) -> None:
        """Undoes the taking of `literal`, the last thing taken."""
        self._cursor.at -= len(literal)
        self._cursor.taken = []


def _first_of(tool: ToolFormat) -> str:
    """What a call that is not marked as one begins with, "" if that is its name."""
    call = tool.calls[0]
    if isinstance(call, JsonCall):
        return "{"
    return "" if isinstance(call, NamedCall) else call.before


class _Calls:
    """Gathers the calls of an output as deltas, one per call and push."""

    __slots__ = ("_deltas", "_id_prefix", "_name", "_pieces", "_properties", "_schemas", "count", "open")

    def __init__(self, id_prefix: str, schemas: Schemas) -> None:
        self.count = 0
        self.open = False
        """A call has begun that is not known to be whole."""
        self._id_prefix = id_prefix
        self._schemas = schemas
        self._properties: dict[str, Any] = {}
        self._name = ""
        """The last call's, until a delta has told it."""
        self._pieces: list[str] = []
        self._deltas: list[ToolCallDelta] = []

    def begin(self, name: str) -> None:
        self._close_delta()
        self.count += 1
        self.open = True
        self._name = name
        self._properties = self._schemas.get(name, {})

    def write(self, piece: str) -> None:
        self._pieces.append(piece)

    def is_text(self, key: str) -> bool:
        return key not in self._properties or _allows_strings(self._properties[key])

    def drain(self) -> list[ToolCallDelta]:
        self._close_delta()
        deltas, self._deltas = self._deltas, []
        return deltas

    def _close_delta(self) -> None:
        if not self._name and not self._pieces:
            return
        index = self.count - 1
        call_id = f"{self._id_prefix}{index}" if self._name else ""
        self._deltas.append(ToolCallDelta(index, call_id, self._name, "".join(self._pieces)))
        self._name = ""
        self._pieces.clear()


def _schemas(tools: Sequence[Mapping[str, Any]]) -> Schemas:
    """Whatever is not of the form that templates expect is as if it were not there."""
    found: Schemas = {}
    for tool in tools:
        function = tool.get("function", tool)
        try:
            found[function["name"]] = dict(function["parameters"]["properties"])
        except (KeyError, TypeError, ValueError):
            continue
    return found


def _allows_strings(schema: object) -> bool:
    if not isinstance(schema, dict):
        return True
    kind = schema.get("type")
    if kind is not None:
        return kind == "string" or (isinstance(kind, list) and "string" in kind)
    options = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(options, list):
        return any(_allows_strings(option) for option in options)
    values = schema.get("enum")
    return not isinstance(values, list) or any(isinstance(value, str) for value in values)
