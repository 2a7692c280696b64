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
        self._error: TailraceError | None = None
        self._ended = False
        self._waiter: asyncio.Future[None] | None = None
        self.num_merged = 0
        """Tokens that joined a delta nobody had read yet."""

    def __repr__(self) -> str:
        return f"RequestStream(offset={self._offset}, pending={len(self._token_ids)}, ended={self._ended})"

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

    # The reader -------------------------------------------------------------------------------

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> Event:
        """The next event; StopAsyncIteration after the summary. Raises what the request failed with."""
        while True:
            event = self._take()
            if event is not None:
                return event
            if self._error is not None:
                raise self._error
            if self._ended:
                raise StopAsyncIteration
            progress = await self._wait()
            if progress is not None:
                return progress

    def _take(self) -> Event | None:
        if self._started is not None:
            started, self._started = self._started, None
            if not self._told_started:
                self._told_started = True
                return started
        if self._error is not None:
            return None
        if len(self._token_ids) >= self._threshold or self._finish is not None:
            delta = Delta(self._offset, self._token_ids, "".join(self._text), self._finish)
            self._offset += len(self._token_ids)
            self.num_merged += max(0, len(self._token_ids) - self._threshold)
            self._token_ids, self._text, self._finish = [], [], None
            self._threshold = self._coalesce
            return delta
        if self._summary is not None:
            summary, self._summary = self._summary, None
            self._ended = True
            return summary
        return None

    async def _wait(self) -> Event | None:
        """Until something is there; with a progress interval at most that long, and then tells where it is."""
        self._waiter = asyncio.get_running_loop().create_future()
        if self._progress_interval is None or self.poll_progress is None:
            await self._waiter
            return None
        await asyncio.wait([self._waiter], timeout=self._progress_interval)
        if self._waiter.done():
            return None
        if not self._told_started:
            self._told_started = True
            return Started(None)
        return await self.poll_progress()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
