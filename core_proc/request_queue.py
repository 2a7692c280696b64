"""RequestQueue: requests that wait, in order of service."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from core_proc.fair_queue import FairQueue

if TYPE_CHECKING:
    from collections.abc import Iterator

    from core_proc.request import Request


class RequestQueue:
    """By priority; among equals first those that were admitted before, in that order, then the new ones, in fairness
    between callers.

    A request that is held back has its place, but is not served before it is released.
    """

    def __init__(self) -> None:
        self._waiting: set[Request] = set()
        self._held: set[Request] = set()
        self._returning: list[tuple[tuple[int, int], Request]] = []
        """A heap. Removed entries stay until they surface."""
        self._new = FairQueue()

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

    def num_ready_tokens(self, limit: int) -> int:
        """Of those that are not held back, the tokens to compute; not counted on where they reach the limit."""
        num_tokens = 0
        for request in self._waiting:
            if request not in self._held:
                num_tokens += request.num_waiting_tokens
                if num_tokens >= limit:
                    break
        return num_tokens

    @property
    def cost(self) -> float:
        """Of all that wait."""
        return sum(request.cost for request in self._waiting)

    def push(self, request: Request) -> None:
        assert request not in self._waiting
        self._waiting.add(request)
        self._enqueue(request)

    def hold(self, request: Request) -> None:
        """Queues a request that is not to be served yet, or not in its turn."""
        assert request not in self._waiting
        self._waiting.add(request)
        self._held.add(request)

    def release(self, request: Request) -> None:
        """Lets a held request be served; others are left alone."""
        if request in self._held:
            self._held.remove(request)
            self._enqueue(request)

    def set_aside(self, request: Request) -> None:
        """Holds back one that could be served."""
        self.remove(request)
        self.hold(request)

    def take_back(self, request: Request) -> None:
        """Releases one that was set aside, to the place that it had."""
        if request in self._held:
            self._held.remove(request)
            self._enqueue(request, was_aside=True)

    def _enqueue(self, request: Request, was_aside: bool = False) -> None:
        if request.is_new:
            self._new.push(request, was_aside)
        else:
            heapq.heappush(self._returning, (request.key, request))

    def peek(self) -> Request | None:
        returning = self.peek_returning()
        new = self._new.first()
        if new is None or (returning is not None and returning.params.priority <= new.params.priority):
            return returning
        return new

    def peek_returning(self) -> Request | None:
        """The first of those that are not new."""
        while self._returning:
            request = self._returning[0][1]
            if request in self._waiting and request not in self._held:
                return request
            heapq.heappop(self._returning)
        return None

    def remove(self, request: Request) -> None:
        """Takes a request out, wherever it is."""
        self._waiting.remove(request)
        if request in self._held:
            self._held.remove(request)
        elif request.is_new:
            self._new.remove(request)
        elif self._returning[0][1] is request:
            heapq.heappop(self._returning)
        elif len(self._returning) > 2 * len(self._waiting) + 64:
            self._returning = [entry for entry in self._returning if entry[1] in self._waiting]
            heapq.heapify(self._returning)

    def admitted(self, request: Request, cost: float) -> None:
        """A request that was removed is served for the first time, and its caller charged."""
        self._new.admitted(request, cost)

    def settle(self, request: Request, difference: float) -> None:
        """A request that was served cost more, or less, than its caller was charged with."""
        self._new.settle(request, difference)

    def position(self, request: Request) -> int:
        """How many are served before it, if all cost the same."""
        before = in_line = 0
        of_others: dict[str, int] = {}
        priority, caller = request.params.priority, request.params.caller
        for other in self._waiting:
            if other.params.priority != priority or other.is_new is not request.is_new:
                before += (other.params.priority, other.is_new) < (priority, request.is_new)
            elif not request.is_new or other.params.caller == caller:
                in_line += other.arrival < request.arrival
            else:
                of_others[other.params.caller] = of_others.get(other.params.caller, 0) + 1
        return before + in_line + sum(min(count, in_line + 1) for count in of_others.values())

    def cost_before(self, request: Request) -> float:
        """Of what is served before a new request, in the unit of `Request.cost`."""
        priority = request.params.priority
        returning = sum(r.cost for _, r in self._returning if r in self._waiting and r.params.priority <= priority)
        return returning + self._new.cost_before(request)
