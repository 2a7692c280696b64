"""RequestStream: one request's events for one reader, merged while nobody reads."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from async_engine.outputs import Delta, Progress, PromptLogprobs, Started, Summary
from async_engine.sequence_buffer import MAX_CELLS, SequenceBuffer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from async_engine.logprobs import Logprobs
    from async_engine.outputs import Event
    from protos.errors import TailraceError


class RequestStream:
    """A single slot: a reader that falls behind finds one larger delta, not a queue of small ones.

    `offset` is the position in the output of the first token to come. `coalesce` gathers that many
    tokens into each delta after the first. With `progress_interval` (seconds) and `poll_progress` a
    Progress comes whenever there was nothing else for so long.

    Readers iterate, or, where every token counts, `take`, and `await ready()` before that while it `is_drained`.
    """

    __slots__ = (
        "_error", "_lone", "_loop", "_progress", "_progress_interval", "_prompt_logprobs", "_prompt_offset",
        "_sequences", "_started", "_summary", "_told_started", "_waiter", "ended", "is_drained", "poll_progress",
    )  # fmt: skip

    def __init__(
        self,
        offset: int = 0,
        coalesce: int = 1,
        progress_interval: float | None = None,
        num_sequences: int = 1,
    ) -> None:
        self._progress_interval = progress_interval
        self.poll_progress: Callable[[], Awaitable[Progress]] | None = None
        self._sequences = [SequenceBuffer(index, offset, self._wake, coalesce) for index in range(num_sequences)]
        self._started: Started | None = None
        self._told_started = False
        self._prompt_offset = 1
        self._prompt_logprobs: Logprobs | None = None
        self._summary: Summary | None = None
        self._progress: Progress | None = None
        self._error: TailraceError | None = None
        self._lone: SequenceBuffer | None = None
        """The only sequence, where nothing is there but what it brings."""
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self.is_drained = False
        """Nothing was put in since all was taken."""
        self.ended = False
        """The summary was taken: nothing more comes."""

    def __repr__(self) -> str:
        return f"RequestStream({self._sequences}, ended={self.ended})"

    # OutputSink -------------------------------------------------------------------------------

    @property
    def num_merged(self) -> int:
        return sum(sequence.num_merged for sequence in self._sequences)

    def sequence(self, index: int) -> SequenceBuffer:
        return self._sequences[index]

    def started(self, cached_tokens: int) -> None:
        self._started = Started(cached_tokens)
        self._wake_for_other()

    def prompt_logprobs(self, offset: int, logprobs: Logprobs) -> None:
        if self._prompt_logprobs is None:
            self._prompt_offset, self._prompt_logprobs = offset, logprobs
        else:
            self._prompt_logprobs.extend(logprobs)
        self._wake_for_other()

    def summary(self, summary: Summary) -> None:
        self._summary = summary
        self._wake_for_other()

    def failed(self, error: TailraceError) -> None:
        self._error = error
        self._wake_for_other()

    def _wake_for_other(self) -> None:
        self._lone = None
        self._wake()

    def _wake(self) -> None:
        self.is_drained = False
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # The reader -------------------------------------------------------------------------------

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> Event:
        """The next event; StopAsyncIteration after the summary. Raises what the request failed with."""
        while not self.ended:
            if self.is_drained:
                await self.ready()
            event = self.take()
            if event is not None:
                return event
        raise StopAsyncIteration

    def take(self) -> Event | None:
        """The next event if it is there. Raises what the request failed with."""
        lone = self._lone
        if lone is None:
            return self._take_any()
        delta = lone.take()
        # Where it has tokens alone it has all of them: to look again would cost as much.
        self.is_drained = delta is None or (delta.finish is None and delta.extra is None)
        return delta

    def _take_any(self) -> Event | None:
        self.is_drained = False
        if self._error is not None:
            raise self._error
        if not self._told_started:
            # Nothing comes before `started`, not even the end of a request that ended in the queue.
            is_ending = any(sequence.is_finishing for sequence in self._sequences)
            if self._started is None and self._progress is None and not is_ending:
                self.is_drained = True
                return None
            self._told_started = True
            return self._started or Started(None)
        if self._prompt_logprobs is not None:
            return self._take_prompt_logprobs(self._prompt_logprobs)
        delta = self.take_delta()
        if delta is not None:
            return delta
        if self._summary is not None:
            self.ended = True
            return self._summary
        self.is_drained = True
        self._lone = self._sequences[0] if len(self._sequences) == 1 else None
        progress, self._progress = self._progress, None
        return progress

    def take_delta(self) -> Delta | None:
        """The next sequence's delta: several may go into one message."""
        for sequence in self._sequences:
            delta = sequence.take()
            if delta is not None:
                return delta
        return None

    def _take_prompt_logprobs(self, pending: Logprobs) -> PromptLogprobs:
        count = max(1, MAX_CELLS // (2 + 2 * pending.width))
        event = PromptLogprobs(self._prompt_offset, pending.split(count))
        self._prompt_offset += len(event.logprobs)
        if not len(pending):
            self._prompt_logprobs = None
        return event

    def ready(self) -> Awaitable[None]:
        """To be awaited when all was taken: until there may be something."""
        self._waiter = self._loop.create_future()
        return self._waiter if self._progress_interval is None else self._ready_or_progress(self._waiter)

    async def _ready_or_progress(self, waiter: asyncio.Future[None]) -> None:
        await asyncio.wait([waiter], timeout=self._progress_interval)
        if not waiter.done() and self.poll_progress is not None:
            self._progress = await self.poll_progress()
            self._lone = None
