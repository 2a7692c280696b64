"""FairQueue: requests not yet admitted, by priority, and among equals first those of whoever was served least.

Each caller has a line of its own in each priority, and an account of the tokens it was served there. The next
request is the first in line of the caller with the smallest account. Who comes, or comes back, starts at the
account that was served last: nobody saves up by staying away. When a priority has no more requests waiting its
accounts are forgotten: nobody was kept from anything.

This is virtual token counting (Sheng et al., Fairness in Serving Large Language Models, 2024), but that a request
is charged on admission with what it is expected to cost, and the difference when it ends.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from core_proc.request import Request


class FairQueue:
    """The priorities with requests waiting. A request is charged by its caller; see `Request.cost`."""

    def __init__(self) -> None:
        self._tiers: dict[int, _Tier] = {}

    def push(self, request: Request, was_aside: bool = False) -> None:
        """A request that comes, or comes back: one that was merely set aside costs its caller nothing."""
        self._tiers.setdefault(request.params.priority, _Tier()).push(request, was_aside)

    def first(self) -> Request | None:
        return self._tiers[min(self._tiers)].first() if self._tiers else None

    def remove(self, request: Request) -> None:
        """Takes a request out, wherever it is."""
        tier = self._tiers[request.params.priority]
        tier.remove(request)
        if not tier.num_waiting:
            del self._tiers[request.params.priority]

    def admitted(self, request: Request, cost: float) -> None:
        """A request that was removed is served, and charged."""
        if tier := self._tiers.get(request.params.priority):
            tier.admitted(request.params.caller, cost)

    def settle(self, request: Request, difference: float) -> None:
        """A request that was served cost more, or less, than it was charged with."""
        if tier := self._tiers.get(request.params.priority):
            tier.charge(request.params.caller, difference)

    def cost_before(self, request: Request) -> float:
        """Of what will be served before a request that waits, or would be if it did."""
        priority = request.params.priority
        better = sum(tier.cost for other, tier in self._tiers.items() if other < priority)
        tier = self._tiers.get(priority)
        return better if tier is None else better + tier.cost_before(request)


class _Tier:
    """The callers with requests of one priority."""

    def __init__(self) -> None:
        self.num_waiting = 0
        self._lines: dict[str, _Line] = {}
        self._order: list[tuple[float, int, _Line]] = []
        """A heap by (account, arrival of the first in line); entries that are behind the times are put right as they
        surface, and are never too late."""
        self._level = 0.0
        """The account of whoever was served last."""

    @property
    def cost(self) -> float:
        return sum(line.cost for line in self._lines.values())

    def push(self, request: Request, was_aside: bool) -> None:
        line = self._lines.get(request.params.caller)
        if line is None:
            if len(self._lines) > 2 * self.num_waiting + 64:
                # Accounts of callers that left. What they owe is forgotten rather than kept for ever.
                self._lines = {caller: line for caller, line in self._lines.items() if len(line)}
            line = self._lines[request.params.caller] = _Line()
        if not len(line) and not was_aside:
            line.served = max(line.served, self._level)
        line.push(request)
        self.num_waiting += 1
        if line.first() is request:
            self._enter(line)

    def remove(self, request: Request) -> None:
        self._lines[request.params.caller].remove(request)
        self.num_waiting -= 1

    def first(self) -> Request:
        while True:
            served, arrival, line = self._order[0]
            if not len(line):
                heapq.heappop(self._order)
                continue
            request = line.first()
            if (served, arrival) == (line.served, request.arrival):
                return request
            heapq.heapreplace(self._order, (line.served, request.arrival, line))

    def admitted(self, caller: str, cost: float) -> None:
        line = self._lines.get(caller)
        if line is not None:
            self._level = max(self._level, line.served)
            self.charge(caller, cost)

    def charge(self, caller: str, cost: float) -> None:
        line = self._lines.get(caller)
        if line is not None:
            line.served += cost
            if cost < 0 and len(line):
                self._enter(line)

    def cost_before(self, request: Request) -> float:
        """The others are served until their accounts reach what this caller's will be by then."""
        own = self._lines.get(request.params.caller)
        served = max(own.served, self._level) if own is not None and not len(own) else self._level
        before = 0.0
        if own is not None and len(own):
            served, before = own.served, own.cost_before(request)
        level = served + before
        return before + sum(
            min(line.cost, max(0.0, level - line.served)) for line in self._lines.values() if line is not own
        )

    def _enter(self, line: _Line) -> None:
        if len(self._order) > 2 * len(self._lines) + 64:
            self._order = [(line.served, line.first().arrival, line) for line in self._lines.values() if len(line)]
            heapq.heapify(self._order)
        heapq.heappush(self._order, (line.served, line.first().arrival, line))


class _Line:
    """One caller's requests of one priority, by arrival."""

    def __init__(self) -> None:
        self.served = 0.0
        """The account."""
        self.cost = 0.0
        """Of those in line."""
        self._requests: set[Request] = set()
        self._heap: list[tuple[int, Request]] = []
        """Entries of requests that left stay until they surface."""

    def __len__(self) -> int:
        return len(self._requests)

    def push(self, request: Request) -> None:
        self._requests.add(request)
        self.cost += request.cost
        heapq.heappush(self._heap, (request.arrival, request))

    def remove(self, request: Request) -> None:
        self._requests.remove(request)
        self.cost = self.cost - request.cost if self._requests else 0.0
        if len(self._heap) > 2 * len(self._requests) + 64:
            self._heap = [entry for entry in self._heap if entry[1] in self._requests]
            heapq.heapify(self._heap)

    def first(self) -> Request:
        while self._heap[0][1] not in self._requests:
            heapq.heappop(self._heap)
        return self._heap[0][1]

    def cost_before(self, request: Request) -> float:
        return sum(other.cost for other in self._requests if other.arrival < request.arrival)
