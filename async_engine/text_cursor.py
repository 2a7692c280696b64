"""TextCursor: reads a text that arrives in pieces as if it were whole.

Its readers are generators: they yield while they need more text to decide, and take nothing before they
have decided. So a parser is written as for a whole text, and cannot depend on how it was cut. What is
not taken while one waits is never longer than the longest marker it looks for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import TypeVar

_T = TypeVar("_T")
Reading = Generator[None, None, _T]
Emit = Callable[[str], object]

SPACE = re.compile(r"[ \t\r\n]+")


class Markers:
    """Strings to look for. None contains another but at its end."""

    __slots__ = ("_beginning", "_longest", "find", "find_first")

    def __init__(self, markers: tuple[str, ...]) -> None:
        never = "(?!)"
        self._longest = max(map(len, markers), default=0)
        self.find = re.compile("|".join(map(re.escape, markers)) or never).search
        self.find_first = re.compile("|".join({re.escape(marker[0]) for marker in markers}) or never).search
        """Finds where a marker may begin. A text without such a character has nothing to do with them."""
        self._beginning = re.compile("|".join(map(_beginning_of, markers)) or never).search

    def open_at(self, text: str, at: int) -> int:
        """Where, from `at` on, the longest end of the text begins that begins a marker."""
        found = self._beginning(text, max(at, len(text) - self._longest + 1))
        return len(text) if found is None else found.start()


def _beginning_of(marker: str) -> str:
    """A pattern for the proper, not empty beginnings of `marker` where the text ends."""
    pattern = ""
    for character in reversed(marker[:-1]):
        pattern = re.escape(character) + (f"(?:{pattern})?" if pattern else "")
    return rf"(?:{pattern or '(?!)'})\Z"


@lru_cache(maxsize=256)
def markers_of(*markers: str) -> Markers:
    return Markers(tuple(dict.fromkeys(filter(None, markers))))


class TextCursor:
    """A position in a growing text."""

    __slots__ = ("at", "ended", "taken", "text")

    def __init__(self) -> None:
        self.text = ""
        """What is not taken yet, from `at` on."""
        self.at = 0
        self.ended = False
        """No more text follows."""
        self.taken: list[str] | None = None
        """Where it is a list, what is taken is noted in it."""

    @property
    def finished(self) -> bool:
        return self.ended and self.at == len(self.text)

    def more(self) -> Reading[bool]:
        """Waits for a piece, which may be empty. False if none follows."""
        if self.ended:
            return False
        self.text = self.text[self.at :]
        self.at = 0
        yield
        return True

    def take(self, length: int) -> str:
        piece = self.text[self.at : self.at + length]
        self.at += length
        if self.taken is not None and piece:
            self.taken.append(piece)
        return piece

    def peek(self) -> Reading[str]:
        """The next character, "" at the end. Takes nothing."""
        while self.at == len(self.text):
            if not (yield from self.more()):
                return ""
        return self.text[self.at]

    def literal(self, *options: str) -> Reading[str]:
        """Takes and returns the one of these that comes next; "" if none does. None may begin another."""
        longest = max(map(len, options), default=0)
        while True:
            rest = self.text[self.at : self.at + longest]
            for option in options:
                if rest.startswith(option):
                    return self.take(len(option))
            if not any(option.startswith(rest) for option in options) or not (yield from self.more()):
                return ""

    def run(self, pattern: re.Pattern[str], emit: Emit | None = None) -> Reading[None]:
        """Takes characters as long as `pattern`, a repeated set of them, matches."""
        while True:
            found = pattern.match(self.text, self.at)
            if found is not None:
                piece = self.take(found.end() - self.at)
                if emit is not None:
                    emit(piece)
            if self.at < len(self.text) or not (yield from self.more()):
                return

    def until(self, markers: Markers, emit: Emit) -> Reading[str]:
        """Takes text up to and with the first marker, which it returns; to the end and "" if there is none.

        Text that cannot be part of a marker is emitted before the next piece is waited for.
        """
        while True:
            found = markers.find(self.text, self.at)
            stop = markers.open_at(self.text, self.at) if found is None else found.start()
            if stop > self.at:
                emit(self.take(stop - self.at))
            if found is not None:
                return self.take(len(found.group()))
            if not (yield from self.more()):
                if not self.finished:
                    emit(self.take(len(self.text) - self.at))
                return ""
