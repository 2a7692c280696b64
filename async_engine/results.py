"""What `LLM` returns: everything a request brought forth."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from async_engine.logprobs import Logprobs
from async_engine.outputs import Delta, PromptLogprobs, SequenceFinish, Summary
from async_engine.request import Prompt

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class ToolCall(msgspec.Struct, frozen=True):
    """A call that was taken out of the text."""

    id: str
    name: str
    arguments: str
    """JSON, as the model wrote it."""


class SequenceOutput(msgspec.Struct, frozen=True):
    """One sequence, whole."""

    text: str
    token_ids: list[int]
    finish: SequenceFinish
    logprobs: Logprobs | None = None
    """Rows parallel to `token_ids`, if asked for."""
    reasoning: str = ""
    tool_calls: list[ToolCall] = []


class RequestOutput(msgspec.Struct, frozen=True):
    """All of one request's output. `text`, `token_ids` and `finish` are those of its first sequence."""

    prompt: Prompt
    sequences: list[SequenceOutput]
    summary: Summary
    prompt_logprobs: Logprobs | None = None
    """Of the prompt's tokens from the second on, if asked for."""

    @property
    def text(self) -> str:
        return self.sequences[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.sequences[0].token_ids

    @property
    def finish(self) -> SequenceFinish:
        return self.sequences[0].finish


class Score(msgspec.Struct, frozen=True):
    """How likely a text is."""

    token_ids: list[int]
    logprobs: list[float]
    """Of each token but the first, given all before it."""

    @property
    def total(self) -> float:
        return math.fsum(self.logprobs)

    @property
    def perplexity(self) -> float:
        """e to the mean negative log-probability; 1 for a text of one token."""
        return math.exp(-self.total / len(self.logprobs)) if self.logprobs else 1.0


class Whole:
    """What a stream's parts add up to."""

    def __init__(self) -> None:
        self.prompt_logprobs: PromptLogprobs | None = None
        self._deltas: dict[int, list[Delta]] = {}

    def add(self, event: Delta | PromptLogprobs) -> None:
        if isinstance(event, Delta):
            self._deltas.setdefault(event.index, []).append(event)
        elif self.prompt_logprobs is None:
            self.prompt_logprobs = event
        else:
            self.prompt_logprobs.logprobs.extend(event.logprobs)

    def sequences(self) -> list[Delta]:
        """One delta for each, in order."""
        return [Delta.join(self._deltas[index]) for index in sorted(self._deltas)]


async def gather(prompt: Prompt, events: AsyncIterator[Delta | PromptLogprobs | Summary]) -> RequestOutput:
    """The whole of a request from its stream."""
    whole = Whole()
    async for event in events:
        if not isinstance(event, Summary):
            whole.add(event)
            continue
        told = whole.prompt_logprobs
        sequences = [_sequence(delta) for delta in whole.sequences()]
        return RequestOutput(prompt, sequences, event, None if told is None else told.logprobs)
    raise AssertionError("a stream ended without its summary")


def _sequence(whole: Delta) -> SequenceOutput:
    assert whole.finish is not None
    if whole.extra is None:
        return SequenceOutput(whole.text, whole.token_ids, whole.finish)
    calls: dict[int, ToolCall] = {}
    for piece in whole.extra.tool_calls:
        call = calls.get(piece.index, ToolCall(piece.id, piece.name, ""))
        calls[piece.index] = ToolCall(call.id, call.name, call.arguments + piece.arguments)
    return SequenceOutput(
        whole.text, whole.token_ids, whole.finish, whole.extra.logprobs, whole.extra.reasoning, list(calls.values())
    )
