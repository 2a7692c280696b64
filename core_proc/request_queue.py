"""RequestQueue: requests that wait, in order of service."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from core_proc.request import Request


class RequestQueue:
    """A heap by (priority, arrival). Whoever was preempted arrived before those never admitted,
    so among equals it comes back to the front. Removed entries stay in the heap until they surface.

    A request that is held back has its place by arrival, but is not served before it is released.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Request]] = []
        self._waiting: set[Request] = set()
        self._held: set[Request] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        """In no particular order."""
        return iter(self._waiting)

    def __contains__(self, request: Request) -> bool:
        return request in self._waiting

    @property
    def num_ready(self) -> int:
        """Of those that wait, how many are not held back."""
        return len(self._waiting) - len(self._held)

    def push(self, request: Request) -> None:
        assert request not in self._waiting
        self._waiting.add(request)
        heapq.heappush(self._heap, (request.key, request))

    def hold(self, request: Request) -> None:
        """Queues a request that is not to be served yet, or not in its turn."""
        assert request not in self._waiting
        self._waiting.add(request)
        self._held.add(request)

    def release(self, request: Request) -> None:
        """Lets a held request be served; others are left alone."""
        if request in self._held:
            self._held.remove(request)
            heapq.heappush(self._heap, (request.key, request))

    def peek(self) -> Request | None:
        while self._heap:
            request = self._heap[0][1]
            if request in self._waiting and request not in self._held:
                return request
            heapq.heappop(self._heap)
        return None

    def remove(self, request: Request) -> None:
        """Takes a request out, wherever it is."""
        self._waiting.remove(request)
        if request in self._held:
            self._held.remove(request)
        elif self._heap[0][1] is request:
            heapq.heappop(self._heap)
        elif len(self._heap) > 2 * len(self._waiting) + 64:
            self._heap = [entry for entry in self._heap if entry[1] in self._waiting]
            heapq.heapify(self._heap)

    def position(self, request: Request) -> int:
        """How many are served before it."""
        return sum(other.key < request.key for other in self._waiting)
