"""Detokenizer: token ids in, the text that has become certain out.

A stream shows what `Tokenizer.decode` says, never something nicer: the joined results of `push` and
`flush` equal `decode(ids)`, for any ids and however they are cut into pushes.

After `prime(prompt)` the output is what `decode(prompt + ids)` has beyond the prompt's finished
characters. So a character that the prompt begins and the output finishes belongs to the output, and
so does its U+FFFD if the output leaves it unfinished; when `ids` decode to nothing the output is
empty. One case has no common prefix to speak of: a SentencePiece byte run that starts in the prompt
and that the output makes invalid decodes to U+FFFD per byte. There the bytes of the prompt's
finished characters stay with the prompt, and each other byte is one U+FFFD of the output.
"""

from __future__ import annotations

import json
import re
from codecs import utf_8_decode
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tokenizers import Tokenizer as Backend

REPLACEMENT = "\ufffd"
_LONGEST_UNFINISHED = 3
"""Bytes that a UTF-8 character can have before its last one."""


class Detokenizer(Protocol):
    """The text of one sequence as it grows. Ids are not negative; an id without a token has no text."""

    def prime(self, token_ids: Sequence[int]) -> None:
        """Continues behind this prompt: called at most once, before the first push. Reads a few ids
        from the end, more only where those are special tokens or bytes.

        Output made earlier, elsewhere, is not primed but pushed, and its text dropped.
        """

    def push(self, token_ids: Sequence[int]) -> str:
        """The text, possibly empty, that these tokens make certain."""

    def flush(self) -> str:
        """The rest, once no more tokens follow: U+FFFD for a character that was never finished."""


def detokenizer_factory(
    backend: Backend, tokens: Sequence[str | None], hidden: frozenset[str]
) -> Callable[[], Detokenizer]:
    """Makes detokenizers that share one table, which takes about a microsecond per id to build.

    `tokens` are the backend's token strings by id, None where there is none; those in `hidden` have no text.
    """
    steps = _decoder_steps(backend)
    shown = [None if token in hidden else token for token in tokens]
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return partial(ByteDetokenizer, ByteTable(shown))
    # Hidden tokens never reach the decoder.
    return partial(WindowDetokenizer, DecoderRules(partial(backend.decode, skip_special_tokens=False), shown, steps))


def token_bytes(backend: Backend, tokens: Sequence[str | None], hidden: frozenset[str]) -> list[bytes]:
    """By id, what each token adds to the UTF-8 of a text that has begun; nothing for those in `hidden`."""
    steps = _decoder_steps(backend)
    shown = [None if token in hidden else token for token in tokens]
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return ByteTable(shown).pieces
    decode = partial(backend.decode, skip_special_tokens=False)
    rules = DecoderRules(decode, shown, steps)
    guard = rules.guard()
    start = len(decode(guard))

    def spelt(token_id: int) -> bytes:
        kind = rules.kind(token_id)
        if kind == _HIDDEN:
            return b""
        if kind == _BYTE:
            return bytes([rules.byte(token_id)])
        return decode([*guard, token_id])[start:].encode()

    return [spelt(token_id) for token_id in range(len(tokens))]


def _decoder_steps(backend: Backend) -> list[dict[str, Any]]:
    """The decoder's steps in order, as tokenizer.json has them, nested sequences opened."""

    def opened(step: dict[str, Any]) -> list[dict[str, Any]]:
        if step["type"] != "Sequence":
            return [step]
        return [inner for nested in step["decoders"] for inner in opened(nested)]

    decoder = backend.decoder
    return [] if decoder is None else opened(json.loads(decoder.__getstate__()))


# ByteLevel decoders: every token has its bytes ------------------------------------------------


def byte_alphabet() -> str:
    """By byte, the character that byte-level vocabularies write it as: itself where it is printable
    Latin-1, the others in order from U+0100."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    stand_ins = iter(range(0x100, 0x200))
    return "".join(chr(byte if byte in printable else next(stand_ins)) for byte in range(256))


class ByteTable:
    """Bytes of each token id, and their text where they are whole characters."""

    def __init__(self, tokens: Sequence[str | None]) -> None:
        # Characters that stand for no byte turn into, or are, what Latin-1 cannot encode.
        to_byte = {**dict.fromkeys(range(256), 0x100), **{ord(c): byte for byte, c in enumerate(byte_alphabet())}}
        self.pieces: list[bytes] = []
        self.texts: list[str | None] = []
        """None where the bytes are not UTF-8 by themselves."""
        for token in tokens:
            piece = b""
            if token is not None:
                try:
                    piece = token.translate(to_byte).encode("latin-1")
                except UnicodeEncodeError:  # an added token, written as plain text: it stands for itself
                    piece = token.encode()
            self.pieces.append(piece)
            try:
                self.texts.append(piece.decode())
            except UnicodeDecodeError:
                self.texts.append(None)


class ByteDetokenizer:
    """Looks tokens up in a ByteTable and decodes UTF-8 across their borders."""

    __slots__ = ("_inherited", "_pending", "_pieces", "_texts")

    def __init__(self, table: ByteTable) -> None:
        self._texts = table.texts
        self._pieces = table.pieces
        self._pending = b""
        """The bytes of a character that is not finished."""
        self._inherited = False
        """Whether all of them are the prompt's."""

    def prime(self, token_ids: Sequence[int]) -> None:
        data = b""
        for token_id in reversed(token_ids):
            data = self._bytes([token_id]) + data
            if len(data) >= _LONGEST_UNFINISHED:
                break
        self._pending = data[utf_8_decode(data, "replace", False)[1] :]
        self._inherited = bool(self._pending)

    def push(self, token_ids: Sequence[int]) -> str:
        if len(token_ids) == 1:
            token_id = token_ids[0]
            try:
                if not self._pending:
                    text = self._texts[token_id]
                    if text is not None:  # the hot path
                        return text
                data = self._pieces[token_id]
            except IndexError:
                return ""
        else:
            data = self._bytes(token_ids)
        if not data:
            return ""
        self._inherited = False
        data = self._pending + data
        text, consumed = utf_8_decode(data, "replace", False)
        self._pending = data[consumed:]
        return text

    def flush(self) -> str:
        pending, self._pending = self._pending, b""
        return "" if self._inherited else pending.decode(errors="replace")

    def _bytes(self, token_ids: Sequence[int]) -> bytes:
        pieces = self._pieces
        try:
            return b"".join([pieces[token_id] for token_id in token_ids])
        except IndexError:
            return b"".join([pieces[token_id] for token_id in token_ids if token_id < len(pieces)])


# All other decoders: what decode says about a window of the last tokens ------------------------

_HIDDEN, _TEXT, _BYTE = range(3)
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_ALONE = {"ByteFallback", "Fuse", "Metaspace", "Replace", "Strip", "WordPiece"}
"""Steps that look at one token (or byte run) and at whether it is the first."""
_WITH_NEIGHBOURS = {"BPEDecoder", "ByteLevel", "CTC"}
"""Steps that also look at the token before, or at whether one follows."""
_SPACES = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}


class DecoderRules:
    """What one may conclude from the text of some tokens to that of more, given a decoder's steps.

    With the steps known here text only grows at its end, but for the last byte run (ByteFallback)
    and a last unfinished character (ByteLevel), which are held back.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        tokens: Sequence[str | None],
        steps: Sequence[dict[str, Any]],
    ) -> None:
        kinds = [step["type"] for step in steps]
        fused = next((index for index, kind in enumerate(kinds) if kind in ("ByteLevel", "Fuse")), len(kinds))
        after = steps[fused + 1 :]
        has_bytes = "ByteFallback" in kinds
        self.decode = decode
        self._tokens = tokens
        self._kinds = bytes(
            _HIDDEN if token is None else _BYTE if has_bytes and _BYTE_TOKEN.fullmatch(token) else _TEXT
            for token in tokens
        )
        self.holds_replacement = "ByteLevel" in kinds
        self.grows = (
            (_ALONE | _WITH_NEIGHBOURS).issuperset(kinds)
            # Once the text is one string, a step that rewrites it could reach back without bound.
            and all(step["type"] in ("Fuse", "Strip") for step in after)
            # Byte tokens are told by their own string, so nothing may have made or unmade one before.
            and (not has_bytes or all(step == _SPACES for step in steps[: kinds.index("ByteFallback")]))
        )
        """False for decoders that may change text long past; theirs is certain only at the end."""
        self.pieces: dict[int, str] | None = None
        """What each token id was seen to add to a text that had begun, where that is always the same."""
        if self.grows and _ALONE.issuperset(kinds) and not any(step.get("stop") for step in after):
            self.pieces = {}

    def kind(self, token_id: int) -> int:
        return self._kinds[token_id] if token_id < len(self._kinds) else _HIDDEN

    def guard(self) -> list[int]:
        """A token that has text, for windows behind a prompt of byte tokens only."""
        texts = (token_id for token_id, kind in enumerate(self._kinds) if kind == _TEXT)
        return next(([token_id] for token_id in texts if self.decode([token_id])), [])

    def byte(self, token_id: int) -> int:
        """The byte that a token of kind _BYTE stands for."""
        return int((self._tokens[token_id] or "")[3:5], 16)


class WindowDetokenizer:
    """Decodes a window of the last tokens, and releases what its text has beyond the text before.

    The window's first tokens only guard: they keep what decoders do to the first token of a text
    (strip its space, leave out a joiner) away from later ones.
    """

    __slots__ = ("_emitted", "_inherited", "_rules", "_run", "_window")

    _GUARD = 4
    """Tokens kept when the window is cut: more than an unfinished character can have bytes."""
    _LIMIT = 8
    """Tokens at which the window is cut: the cost of a push grows with it, cuts are rarer with it."""

    def __init__(self, rules: DecoderRules) -> None:
        self._rules = rules
        self._window: list[int] = []
        self._run: list[int] = []
        """Byte tokens behind the window: whether they are text depends on the whole run."""
        self._emitted = 0
        """Characters of the window's text that were released, or are the prompt's."""
        self._inherited = False
        """Whether all that is held back is the prompt's."""

    def prime(self, token_ids: Sequence[int]) -> None:
        tail: list[int] = []
        guards = 0
        for token_id in reversed(token_ids):
            tail.append(token_id)
            guards += self._rules.kind(token_id) == _TEXT
            if guards == self._GUARD:
                break
        self._append(reversed(tail))
        run = bytes(self._rules.byte(token_id) for token_id in self._run)
        given = self._window
        try:
            finished = utf_8_decode(run, "strict", False)[1]
        except UnicodeDecodeError:  # this run stays invalid, whatever the output adds to it
            given = self._window + self._run
        else:
            del self._run[:finished]
            if finished and not given:
                given += self._rules.guard()
        self._emitted = self._certain(self._rules.decode(given)) if given else 0
        self._inherited = True

    def push(self, token_ids: Sequence[int]) -> str:
        window, rules = self._window, self._rules
        # A text that has not begun, or a run that this push may end, makes a token's part another one.
        pieces = rules.pieces if len(token_ids) == 1 and self._emitted and not self._run else None
        if pieces is not None:
            piece = pieces.get(token_ids[0])
            if piece is not None:  # the hot path; the window stays behind, and guards as well
                self._inherited = False
                return piece
        size = len(window)
        self._append(token_ids)
        if len(window) == size or not rules.grows:
            return ""
        text = rules.decode(window)
        end = self._certain(text)
        new = text[self._emitted : end]
        self._emitted = end
        if pieces is not None:
            pieces[token_ids[0]] = new
        if len(window) > self._LIMIT:
            guard = window[-self._GUARD :]
            text = rules.decode(guard)
            if text:  # else the decoder might still be waiting for its first character
                window[:] = guard
                self._emitted = self._certain(text)
        return new

    def flush(self) -> str:
        if self._inherited:
            return ""
        self._window += self._run
        self._run.clear()
        text = self._rules.decode(self._window) if self._window else ""
        new = text[self._emitted :]
        self._emitted = len(text)
        return new

    def _append(self, token_ids: Iterable[int]) -> None:
        """Sorts tokens to the window, the open run, or nowhere."""
        for token_id in token_ids:
            kind = self._rules.kind(token_id)
            if kind == _TEXT:
                if self._run:
                    self._window += self._run
                    self._run.clear()
                self._window.append(token_id)
            elif kind == _BYTE:
                self._run.append(token_id)
            else:
                continue
            self._inherited = False

    def _certain(self, text: str) -> int:
        """Characters of the window's text that no later token can change."""
        return len(text) - (self._rules.holds_replacement and text.endswith(REPLACEMENT))
