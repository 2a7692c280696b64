"""Stop strings are found wherever tokens are cut, and only what could begin one is held back."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_engine.stop_strings import StopMatcher

if TYPE_CHECKING:
    from collections.abc import Iterable

ALPHABET = "ab🦩\n"
stops_of = st.lists(st.text(ALPHABET, min_size=1, max_size=5), min_size=1, max_size=4)


def run(stops: list[str], pieces: Iterable[str], include_match: bool = False) -> tuple[list[str], str | None]:
    """What each piece released, the flush last, and the match."""
    matcher = StopMatcher(stops, include_match)
    released = []
    for piece in pieces:
        text, matched = matcher.push(piece)
        released.append(text)
        if matched is not None:
            return released, matched
    return [*released, matcher.flush()], None


@st.composite
def cut_texts(draw: st.DrawFn) -> list[str]:
    text = draw(st.text(ALPHABET, max_size=40))
    cuts = draw(st.lists(st.integers(0, len(text)), max_size=40))
    return [text[start:end] for start, end in pairwise([0, *sorted(cuts), len(text)])]


def reference(stops: list[str], pieces: list[str], skipped: int) -> tuple[int, str] | None:
    """(end of the match, match) that completes first behind the skipped pieces, by trying all."""
    text = "".join(pieces)
    for end in range(sum(map(len, pieces[:skipped])) + 1, len(text) + 1):
        completed = [stop for stop in stops if text[:end].endswith(stop)]
        if completed:
            return end, max(completed, key=len)
    return None


@given(stops=stops_of, pieces=cut_texts(), include_match=st.booleans(), data=st.data())
@settings(max_examples=400, deadline=None)
def test_first_completing_match_wins_and_text_is_cut_there(
    stops: list[str], pieces: list[str], include_match: bool, data: st.DataObject
) -> None:
    skipped = data.draw(st.integers(0, len(pieces)))
    matcher = StopMatcher(stops, include_match)
    expected = reference(stops, pieces, skipped)
    seen = released = ""
    for index, piece in enumerate(pieces):
        seen += piece
        if index < skipped:
            released += matcher.skip(piece)
        else:
            text, matched = matcher.push(piece)
            released += text
            if expected is not None and expected[0] <= len(seen):
                end, stop = expected
                assert matched == stop
                assert released == seen[: end if include_match else end - len(stop)]
                return
            assert matched is None
        held = next(
            size for size in reversed(range(len(seen) + 1))
            if size == 0 or any(stop.startswith(seen[-size:]) and size < len(stop) for stop in stops)
        )  # fmt: skip
        assert released == seen[: len(seen) - held]
    assert expected is None
    assert released + matcher.flush() == seen


def test_match_across_several_tokens() -> None:
    assert run(["User:"], ["Hi.", " U", "se", "r", ":", " no"]) == (["Hi.", " ", "", "", ""], "User:")


def test_match_across_an_emoji() -> None:
    assert run(["x🦩y"], ["ax", "🦩", "y"]) == (["a", "", ""], "x🦩y")


def test_match_at_the_start_of_the_text_leaves_nothing() -> None:
    assert run(["\n\n"], ["\n", "\nHello"]) == (["", ""], "\n\n")


def test_match_inside_one_token_drops_the_rest_of_it() -> None:
    assert run(["###"], ["a### b"]) == (["a"], "###")
    assert run(["###"], ["a### b"], include_match=True) == (["a###"], "###")


def test_match_that_completes_first_beats_one_that_starts_first() -> None:
    assert run(["abcd", "bc"], ["abcd"]) == (["a"], "bc")


def test_longest_of_matches_that_complete_together_wins() -> None:
    assert run(["bc", "abc"], ["abc"]) == ([""], "abc")
    assert run(["bc", "abc"], ["abc"], include_match=True) == (["abc"], "abc")


def test_text_that_cannot_begin_a_stop_string_is_not_delayed() -> None:
    assert run(["<|end|>"], ["one", " two", " three"]) == (["one", " two", " three", ""], None)


def test_held_text_is_released_as_soon_as_it_cannot_match() -> None:
    assert run(["<|end|>"], ["a<", "|e", "x", "<"]) == (["a", "", "<|ex", "", "<"], None)


def test_a_shorter_beginning_stays_held_when_a_longer_one_fails() -> None:
    assert run(["aab"], ["aa", "a", "b"]) == (["", "a", ""], "aab")


def test_match_that_begins_in_skipped_text_counts_when_it_completes_later() -> None:
    matcher = StopMatcher(["ab"], False)
    assert matcher.skip("ab-a") == "ab-"
    assert matcher.push("b") == ("", "ab")


@pytest.mark.parametrize("characters", ["]", "^", "\\", "-", "[]^-\\"])
def test_any_character_may_begin_a_stop_string(characters: str) -> None:
    stops = [f"{character}!" for character in characters]
    for stop in stops:
        assert run(stops, ["a", stop[0], "!"]) == (["a", "", ""], stop)


def test_time_is_linear_however_near_the_text_comes_to_a_match() -> None:
    matcher = StopMatcher(["a" * 1000 + "b"], False)
    start = time.process_time()
    for _ in range(20_000):
        matcher.push("a")
    assert time.process_time() - start < 1.0
    assert matcher.push("b") == ("", "a" * 1000 + "b")
