"""What a request brings forth, and the sink that takes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

from protos.messages import FinishReason

if TYPE_CHECKING:
    from protos.errors import TailraceError


class Started(msgspec.Struct, frozen=True):
    """The scheduler admitted the request."""

    cached_tokens: int | None
    """Prompt tokens from the prefix cache; None if it had to be told before the request was admitted."""


class SequenceFinish(msgspec.Struct, frozen=True):
    """How a sequence ended."""

    reason: FinishReason
    matched_string: str | None = None
    matched_token_id: int | None = None
    output_tokens: int = 0
    """Tokens the sequence has, resumed ones included."""


class Delta(msgspec.Struct, frozen=True):
    """New output of the sequence."""

    offset: int
    """Position of the first new token in the output."""
    token_ids: list[int]
    text: str
    finish: SequenceFinish | None = None

    @staticmethod
    def join(deltas: list[Delta]) -> Delta:
        """One delta for consecutive ones."""
        token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
        return Delta(deltas[0].offset, token_ids, "".join(delta.text for delta in deltas), deltas[-1].finish)


class Progress(msgspec.Struct, frozen=True):
    """Where a request is while it sends nothing."""

    queue_position: int
    prefilled_tokens: int


class Summary(msgspec.Struct, frozen=True):
    """How a request went. Times in seconds."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    """Tokens drawn, those cut off behind a stop included."""
    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float
    preemptions: int


Event = Started | Delta | Progress | Summary


class OutputSink(Protocol):
    """Where the output processor puts a request's events. Never blocks, never grows beyond the output itself.

    Order: started, tokens, finish, summary; or failed at any time, and then nothing more.
    """

    def started(self, cached_tokens: int) -> None: ...
    def tokens(self, token_ids: list[int], text: str) -> None: ...
    def finish(self, finish: SequenceFinish) -> None: ...
    def summary(self, summary: Summary) -> None: ...
    def failed(self, error: TailraceError) -> None: ...
