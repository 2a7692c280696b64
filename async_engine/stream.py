"""RequestStream: one request's events for one reader, merged while nobody reads."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from async_engine.outputs import Delta, Progress, Started, Summary

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from async_engine.outputs import Event, SequenceFinish
    from protos.errors import TailraceError


class RequestStream:
    """A single slot: a reader that falls behind finds one larger delta, not a queue of small ones.

    `offset` is the position in the output of the first token to come. `coalesce` gathers that many
    tokens into each delta after the first. With `progress_interval` (seconds) and `poll_progress` a
    Progress comes whenever there was nothing else for so long.

    Readers iterate, or, where every token counts, alternate `take` and `await ready()`.
    """

    def __init__(self, offset: int = 0, coalesce: int = 1, progress_interval: float | None = None) -> None:
        self._offset = offset
        self._coalesce = coalesce
        self._threshold = 1
        self._progress_interval = progress_interval
        self.poll_progress: Callable[[], Awaitable[Progress]] | None = None
        self._started: Started | None = None
        self._told_started = False
        self._token_ids: list[int] = []
        self._text: list[str] = []
        self._finish: SequenceFinish | None = None
        self._summary: Summary | None = None
        self._progress: Progress | None = None
        self._error: TailraceError | None = None
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self.ended = False
        """The summary was taken: nothing more comes."""
        self.num_merged = 0
        """Tokens that joined a delta nobody had read yet."""

    def __repr__(self) -> str:
        return f"RequestStream(offset={self._offset}, pending={len(self._token_ids)}, ended={self.ended})"

    # OutputSink -------------------------------------------------------------------------------

    def started(self, cached_tokens: int) -> None:
        self._started = Started(cached_tokens)
        self._wake()

    def tokens(self, token_ids: list[int], text: str) -> None:
        self._token_ids += token_ids
        if text:
            self._text.append(text)
        if len(self._token_ids) >= self._threshold:
            self._wake()

    def finish(self, finish: SequenceFinish) -> None:
        self._finish = finish
        self._wake()

    def summary(self, summary: Summary) -> None:
        self._summary = summary
        self._wake()

    def failed(self, error: TailraceError) -> None:
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # The reader -------------------------------------------------------------------------------

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> Event:
        """The next event; StopAsyncIteration after the summary. Raises what the request failed with."""
        while not self.ended:
            event = self.take()
            if event is not None:
                return event
            await self.ready()
        raise StopAsyncIteration

    def take(self) -> Event | None:
        """The next event if it is there. Raises what the request failed with."""
        if self._error is not None:
            raise self._error
        if not self._told_started:
            # Nothing comes before `started`, not even the end of a request that ended in the queue.
            if self._started is None and self._progress is None and self._finish is None:
                return None
            self._told_started = True
            return self._started or Started(None)
        num_tokens = len(self._token_ids)
        if num_tokens >= self._threshold or self._finish is not None:
            delta = Delta(self._offset, self._token_ids, "".join(self._text), self._finish)
            self._offset += num_tokens
            self.num_merged += max(0, num_tokens - self._threshold)
            self._token_ids, self._text, self._finish = [], [], None
            self._threshold = self._coalesce
            return delta
        if self._summary is not None:
            self.ended = True
            return self._summary
        progress, self._progress = self._progress, None
        return progress

    def ready(self) -> Awaitable[None]:
        """To be awaited when `take` had nothing: until it may have something."""
        self._waiter = self._loop.create_future()
        return self._waiter if self._progress_interval is None else self._ready_or_progress(self._waiter)

    async def _ready_or_progress(self, waiter: asyncio.Future[None]) -> None:
        await asyncio.wait([waiter], timeout=self._progress_interval)
        if not waiter.done() and self.poll_progress is not None:
            self._progress = await self.poll_progress()
