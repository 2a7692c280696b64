"""What a request brings forth, and the sinks that take it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

from async_engine.chat_parser import ToolCallDelta
from async_engine.logprobs import Logprobs
from protos.messages import FinishReason

if TYPE_CHECKING:
    from protos.errors import TailraceError


class Started(msgspec.Struct, frozen=True):
    """The scheduler admitted the request."""

    cached_tokens: int | None
    """Prompt tokens from the prefix cache; None if it had to be told before the request was admitted."""


class PromptLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of consecutive tokens of the prompt."""

    offset: int
    """Position of the first, at least 1."""
    logprobs: Logprobs


class SequenceFinish(msgspec.Struct, frozen=True):
    """How a sequence ended."""

    reason: FinishReason
    matched_string: str | None = None
    matched_token_id: int | None = None
    output_tokens: int = 0
    """Tokens the sequence has, resumed ones included."""
    cumulative_logprob: float | None = None
    """Sum over the tokens whose log-probabilities were reported."""


class Extra(msgspec.Struct):
    """What a delta has beside ids and text, where it was asked for."""

    logprobs: Logprobs | None = None
    """Rows parallel to the delta's token ids."""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = []

    @property
    def num_bytes(self) -> int:
        """In a message, by estimate."""
        size = 3 * len(self.reasoning) + sum(64 + 3 * len(call.arguments) for call in self.tool_calls)
        return size if self.logprobs is None else size + self.logprobs.num_bytes

    def extend(self, other: Extra) -> None:
        """Adds what comes behind it."""
        if self.logprobs is None:
            self.logprobs = other.logprobs
        elif other.logprobs is not None:
            self.logprobs.extend(other.logprobs)
        self.reasoning += other.reasoning
        for call in other.tool_calls:
            if self.tool_calls and self.tool_calls[-1].index == call.index:
                before = self.tool_calls[-1]
                self.tool_calls[-1] = msgspec.structs.replace(before, arguments=before.arguments + call.arguments)
            else:
                self.tool_calls.append(call)


class Delta(msgspec.Struct, frozen=True):
    """New output of one sequence."""

    offset: int
    """Position of the first new token in the output."""
    token_ids: list[int]
    text: str
    finish: SequenceFinish | None = None
    index: int = 0
    """Which sequence."""
    extra: Extra | None = None

    @property
    def num_bytes(self) -> int:
        """In a message, by estimate."""
        size = 3 * (len(self.token_ids) + len(self.text))
        return size if self.extra is None else size + self.extra.num_bytes

    @staticmethod
    def join(deltas: list[Delta]) -> Delta:
        """One delta for consecutive ones of a sequence."""
        extra = None
        for delta in deltas:
            if extra is None:
                extra = delta.extra
            elif delta.extra is not None:
                extra.extend(delta.extra)
        return Delta(
            deltas[0].offset,
            [token_id for delta in deltas for token_id in delta.token_ids],
            "".join(delta.text for delta in deltas),
            deltas[-1].finish,
            deltas[0].index,
            extra,
        )


class Progress(msgspec.Struct, frozen=True):
    """Where a request is while it sends nothing."""

    queue_position: int
    prefilled_tokens: int


class Summary(msgspec.Struct, frozen=True):
    """How a request went. Times in seconds."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    """Tokens drawn, of all sequences, those cut off behind a stop included."""
    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float
    preemptions: int


Event = Started | PromptLogprobs | Delta | Progress | Summary


class SequenceSink(Protocol):
    """Where the output processor puts what one sequence brings. Never blocks, never grows beyond the output itself.

    Order: tokens, finish.
    """

    def tokens(self, token_ids: list[int], text: str, extra: Extra | None = None) -> None:
        """`extra` is the sink's from now on."""

    def finish(self, finish: SequenceFinish) -> None: ...


class OutputSink(Protocol):
    """The same for a whole request.

    Order: started, prompt_logprobs, what its sequences bring, summary; or failed at any time, and then nothing more.
    """

    @property
    def num_merged(self) -> int:
        """Tokens that joined a delta nobody had taken yet."""
        ...

    def sequence(self, index: int) -> SequenceSink: ...
    def started(self, cached_tokens: int) -> None: ...
    def prompt_logprobs(self, offset: int, logprobs: Logprobs) -> None:
        """Of consecutive tokens; parts follow one another without a gap. `logprobs` is the sink's from now on."""

    def summary(self, summary: Summary) -> None: ...
    def failed(self, error: TailraceError) -> None: ...
