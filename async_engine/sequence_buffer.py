"""SequenceBuffer: the output of one sequence that nobody has taken yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from async_engine.outputs import Delta, Extra

if TYPE_CHECKING:
    from collections.abc import Callable

    from async_engine.outputs import SequenceFinish

MAX_CELLS = 1 << 18
"""Log-probabilities and their ids in one delta: a message of that size stays well below what clients accept."""


class SequenceBuffer:
    """A single slot: whoever falls behind takes one larger delta, not many small ones.

    `offset` is the position in the output of the first token to come; `wake` is called when there is
    something to take; `coalesce` tokens are gathered for each delta after the first, 0 gathers all.
    """

    __slots__ = (
        "_coalesce",
        "_extra",
        "_finish",
        "_offset",
        "_text",
        "_threshold",
        "_token_ids",
        "_wake",
        "index",
        "num_merged",
    )

    def __init__(self, index: int, offset: int, wake: Callable[[], None], coalesce: int = 1) -> None:
        self.index = index
        self.num_merged = 0
        """Tokens that joined a delta nobody had taken yet."""
        self._offset = offset
        self._token_ids: list[int] = []
        self._text: list[str] = []
        self._extra: Extra | None = None
        self._finish: SequenceFinish | None = None
        self._wake = wake
        self._coalesce: float = coalesce or float("inf")
        self._threshold: float = 1 if coalesce else float("inf")

    def __repr__(self) -> str:
        return f"SequenceBuffer({self.index}, offset={self._offset}, pending={len(self._token_ids)})"

    # SequenceSink -----------------------------------------------------------------------------

    def tokens(self, token_ids: list[int], text: str, extra: Extra | None = None) -> None:
        self._token_ids += token_ids
        if text:
            self._text.append(text)
        if extra is not None:
            if self._extra is None:
                self._extra = extra
            else:
                self._extra.extend(extra)
        if len(self._token_ids) >= self._threshold:
            self._wake()

    def finish(self, finish: SequenceFinish) -> None:
        self._finish = finish
        self._wake()

    def skip(self, num_tokens: int) -> None:
        """So many tokens go another way."""
        self._offset += num_tokens

    # The taker --------------------------------------------------------------------------------

    @property
    def is_finishing(self) -> bool:
        """Whether the end is here, and not taken yet."""
        return self._finish is not None

    def take(self) -> Delta | None:
        """What there is, if it is worth a delta."""
        num_tokens = len(self._token_ids)
        if num_tokens < self._threshold and self._finish is None:
            return None
        if self._extra is not None and self._extra.logprobs is not None:
            limit = MAX_CELLS // (2 + 2 * self._extra.logprobs.width)
            if num_tokens > limit:
                return self._take_head(limit, self._extra)
        delta = Delta(self._offset, self._token_ids, "".join(self._text), self._finish, self.index, self._extra)
        self._offset += num_tokens
        if num_tokens > self._threshold:
            self.num_merged += num_tokens - int(self._threshold)
        self._token_ids, self._text, self._extra, self._finish = [], [], None, None
        self._threshold = self._coalesce
        return delta

    def _take_head(self, count: int, extra: Extra) -> Delta:
        """The first tokens alone. Text may lag behind its tokens, never lead them."""
        assert extra.logprobs is not None
        delta = Delta(self._offset, self._token_ids[:count], "", None, self.index, Extra(extra.logprobs.split(count)))
        self._token_ids = self._token_ids[count:]
        self._offset += count
        return delta
