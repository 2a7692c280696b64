"""What a stream brings, as plain values. Times are in seconds."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tailrace_client.errors import ProtocolError

if TYPE_CHECKING:
    from protos.tailrace.v1 import generation_pb2 as pb


class FinishReason(enum.IntEnum):
    """Why a sequence ended. A failure is an exception, never a reason."""

    UNSPECIFIED = 0
    EOS = 1
    STOP_TOKEN = 2
    STOP_STRING = 3
    MAX_TOKENS = 4
    CONTEXT_FULL = 5
    TIME_LIMIT = 6
    ABORTED = 7
    CONSTRAINT_DONE = 8
    REPETITION = 9

    @classmethod
    def _missing_(cls, value: object) -> FinishReason:
        """Of a server newer than this library."""
        return cls.UNSPECIFIED


@dataclass(frozen=True, slots=True)
class Finish:
    """How a sequence ended."""

    reason: FinishReason
    matched: str | int | None
    """The stop string, or the id of the stop or end-of-sequence token."""
    output_tokens: int
    """Tokens the sequence has, resumed ones included."""
    cumulative_logprob: float | None = None
    """Sum of the log-probabilities that were reported; None if none were."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of consecutive tokens, in columns."""

    offset: int
    """Position of the first."""
    logprobs: list[float]
    ranks: list[int]
    """Rank of each token, from 1."""
    top_ids: list[list[int]]
    """Of each position the likeliest ids, most likely first, then the ids asked for."""
    top_logprobs: list[list[float]]


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a tool call."""

    index: int
    """Which call of the sequence, from 0."""
    id: str
    """With the call's first piece, else empty."""
    name: str
    """With the call's first piece, else empty."""
    arguments: str
    """The next piece of the arguments' JSON."""


@dataclass(frozen=True, slots=True)
class Delta:
    """New output of one sequence."""

    text: str
    token_ids: list[int]
    offset: int
    """Position of the first new token in the sequence's output."""
    index: int
    """Which sequence, from 0."""
    logprobs: TokenLogprobs | None
    finish: Finish | None
    """On the sequence's last delta."""
    reasoning: str = ""
    """New text of the reasoning, if it is taken out of the text."""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    """New pieces of tool calls, if they are taken out of the text."""


@dataclass(frozen=True, slots=True)
class Started:
    """What the server made of the request."""

    request_id: str
    prompt_tokens: int
    cached_tokens: int | None
    """Prompt tokens from the prefix cache; None where it is not known yet: the summary has it."""
    effective: pb.GenerationSpec
    """The options in force, with every default and the seed drawn."""
    prompt_logprobs: list[TokenLogprobs]
    """In one or more pieces, each with its offset; empty unless asked for."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a request is that sends nothing."""

    queue_position: int
    """Requests ahead of it; 0 once admitted."""
    prefilled_tokens: int


@dataclass(frozen=True, slots=True)
class Summary:
    """How the request went."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    """Tokens drawn, all sequences."""
    queue_time: float
    prefill_time: float
    decode_time: float
    preemptions: int


@dataclass(frozen=True, slots=True)
class Completion:
    """A request's whole answer."""

    started: Started
    sequences: list[Delta]
    summary: Summary

    @property
    def text(self) -> str:
        """The first sequence's."""
        return self.sequences[0].text

    @property
    def token_ids(self) -> list[int]:
        """The first sequence's."""
        return self.sequences[0].token_ids

    @property
    def finish(self) -> Finish | None:
        """The first sequence's."""
        return self.sequences[0].finish


# From messages --------------------------------------------------------------------------------


def to_started(message: pb.RequestStarted) -> Started:
    return Started(
        request_id=message.request_id,
        prompt_tokens=message.prompt_tokens,
        cached_tokens=message.cached_tokens if message.HasField("cached_tokens") else None,
        effective=message.effective,
        prompt_logprobs=[_to_logprobs(message.prompt_logprobs)] if message.HasField("prompt_logprobs") else [],
    )


def to_delta(message: pb.SequenceDelta) -> Delta:
    return Delta(
        text=message.text,
        token_ids=list(message.token_ids),
        offset=message.offset,
        index=message.index,
        logprobs=_to_logprobs(message.logprobs) if message.HasField("logprobs") else None,
        finish=_to_finish(message.finish) if message.HasField("finish") else None,
        reasoning=message.reasoning,
        tool_calls=tuple(ToolCallDelta(call.index, call.id, call.name, call.arguments) for call in message.tool_calls),
    )


def to_progress(message: pb.Progress) -> Progress:
    return Progress(queue_position=message.queue_position, prefilled_tokens=message.prefilled_tokens)


def to_summary(message: pb.RequestSummary) -> Summary:
    return Summary(
        prompt_tokens=message.prompt_tokens,
        cached_tokens=message.cached_tokens,
        output_tokens=message.output_tokens,
        queue_time=message.queue_time.ToNanoseconds() / 1e9,
        prefill_time=message.prefill_time.ToNanoseconds() / 1e9,
        decode_time=message.decode_time.ToNanoseconds() / 1e9,
        preemptions=message.preemptions,
    )


def to_completion(message: pb.GenerateResponse, request_id: str) -> Completion:
    """Raises ProtocolError for an answer with a part missing."""
    if not (message.HasField("started") and message.output.sequences and message.HasField("summary")):
        raise ProtocolError("the answer is not whole", request_id)
    return Completion(
        started=to_started(message.started),
        sequences=[to_delta(sequence) for sequence in message.output.sequences],
        summary=to_summary(message.summary),
    )


def _to_finish(message: pb.SequenceFinish) -> Finish:
    matched: str | int | None = None
    match message.WhichOneof("matched"):
        case "matched_string":
            matched = message.matched_string
        case "matched_token_id":
            matched = message.matched_token_id
    cumulative = message.cumulative_logprob if message.HasField("cumulative_logprob") else None
    return Finish(FinishReason(message.reason), matched, message.output_tokens, cumulative)


def _to_logprobs(message: pb.TokenLogprobs) -> TokenLogprobs:
    width = message.top_width
    rows = range(0, len(message.top_ids), width) if width else range(0)
    return TokenLogprobs(
        offset=message.offset,
        logprobs=list(message.logprobs),
        ranks=list(message.ranks),
        top_ids=[list(message.top_ids[row : row + width]) for row in rows],
        top_logprobs=[list(message.top_logprobs[row : row + width]) for row in rows],
    )
