"""Timers: the moments at which requests run out of time."""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING

from core_proc.request import Request, State
from protos.messages import FinishReason

if TYPE_CHECKING:
    from collections.abc import Iterator


MAX_WAIT = 3600.0
"""Seconds after which whoever waits looks again: locks refuse timeouts of centuries."""


class Timers:
    """A heap of (time, arrival, reason, request). Entries of requests that ended surface and are skipped."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, FinishReason, Request]] = []
        self._sweep_at = 64

    def __len__(self) -> int:
        """Entries, of ended requests too."""
        return len(self._heap)

    def add(self, request: Request) -> None:
        """Starts the timers a request asks for; their times are in seconds from its arrival."""
        for seconds, reason in (
            (request.params.deadline, FinishReason.DEADLINE),
            (request.params.time_limit, FinishReason.TIME_LIMIT),
            (request.params.queue_timeout, FinishReason.QUEUE_TIMEOUT),
        ):
            if seconds is not None:
                heapq.heappush(self._heap, (request.arrival_time + seconds, request.arrival, reason, request))
        if len(self._heap) > self._sweep_at:
            # Requests that ended long before their time would be kept until then.
            self._heap = [entry for entry in self._heap if _applies(entry[3], entry[2])]
            heapq.heapify(self._heap)
            self._sweep_at = 2 * len(self._heap) + 64

    def due(self, now: float) -> Iterator[tuple[Request, FinishReason]]:
        """Requests whose time is up, and why."""
        while self._heap and self._heap[0][0] <= now:
            _, _, reason, request = heapq.heappop(self._heap)
            if _applies(request, reason):
                yield request, reason

    def seconds_left(self, now: float) -> float | None:
        """Until the next timer that still applies; None if there is none."""
        while self._heap and not _applies(self._heap[0][3], self._heap[0][2]):
            heapq.heappop(self._heap)
        return min(max(0.0, self._heap[0][0] - now), MAX_WAIT) if self._heap else None


def _applies(request: Request, reason: FinishReason) -> bool:
    if request.state is State.FINISHED:
        return False
    return reason is not FinishReason.QUEUE_TIMEOUT or request.admitted_time == -math.inf
