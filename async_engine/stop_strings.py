"""StopMatcher: finds the stop string that ends an output, and holds back only what could begin one."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class StopMatcher:
    """Looks for stop strings in a text that arrives in pieces.

    The match that completes first wins; of several that complete with the same character, the
    longest, so that nothing of any of them is left in the text. Text after the match is dropped.
    To learn which token completed a match, push token by token. After a match the matcher is spent.

    The time is proportional to the length of the text, however long, and to the number of strings.
    """

    __slots__ = ("_find_first", "_held", "_include_match", "_searches")

    def __init__(self, stops: Sequence[str], include_match: bool) -> None:
        """Takes at least one string, none of them empty. `include_match` leaves the match in the text."""
        assert stops
        assert all(stops)
        firsts = {stop[0] for stop in stops}
        self._find_first = re.compile(f"[{''.join(map(re.escape, firsts))}]").search
        self._searches = [_Search(stop) for stop in dict.fromkeys(stops)]
        self._include_match = include_match
        self._held = ""
        """The longest suffix of the text so far that begins a stop string."""

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that may be shown now, and the stop string that `text` completed, if any."""
        if not self._held and self._find_first(text) is None:
            return text, None
        return self._scan(text, True)

    def skip(self, text: str) -> str:
        """Like `push` while the output may not end yet: matches that complete in `text` are ignored.

        What begins here and completes in a later `push` is a match, so text can be held back here too.
        """
        return self._scan(text, False)[0]

    def flush(self) -> str:
        """What is still held back, once nothing follows. The matcher is then spent."""
        return self._held

    def _scan(self, text: str, matching: bool) -> tuple[str, str | None]:
        pending = self._held + text
        at = len(self._held)
        open_length = at
        while at < len(pending):
            if not open_length:
                first = self._find_first(pending, at)
                if first is None:
                    break
                at = first.start()
            character = pending[at]
            at += 1
            matched = ""
            open_length = 0
            for search in self._searches:
                if search.length or search.first == character:
                    if search.step(character) and len(search.stop) > len(matched):
                        matched = search.stop
                    if search.length > open_length:
                        open_length = search.length
            if matched and matching:
                self._held = ""
                return pending[: at if self._include_match else at - len(matched)], matched
        self._held = pending[len(pending) - open_length :]
        return pending[: len(pending) - open_length], None


class _Search:
    """Knuth-Morris-Pratt for one string. The failure table grows as far as a text ever matched, so
    that a request with many long stop strings costs nothing to set up."""

    __slots__ = ("_borders", "first", "length", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.first = stop[0]
        self.length = 0
        """Characters of `stop` that the text ends with; a whole match counts as its longest border."""
        self._borders = [0]
        """[i] is the length of the longest proper prefix of stop[:i + 1] that is also its suffix."""

    def step(self, character: str) -> bool:
        """Takes the next character of the text; tells whether it completes the string."""
        stop, borders, length = self.stop, self._borders, self.length
        while length and stop[length] != character:
            length = borders[length - 1]
        if stop[length] != character:
            self.length = 0
            return False
        length += 1
        if length > len(borders):
            border = borders[-1]
            while border and stop[border] != character:
                border = borders[border - 1]
            borders.append(border + (stop[border] == character))
        complete = length == len(stop)
        self.length = borders[length - 1] if complete else length
        return complete
