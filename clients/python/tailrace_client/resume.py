"""When and where a request that a server lost is sent again."""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass

from tailrace_client.errors import DuplicateRequestError, OverloadedError, TailraceError, UnavailableError

QUEUE_TIMEOUT = "QUEUE_TIMEOUT"


@dataclass(frozen=True, slots=True)
class ResumePolicy:
    """How hard a client tries once a request was lost. New output begins the count anew. Times are in seconds.

    Another server is tried at once; the same one after a wait that grows, and never before the time it named itself.
    """

    attempts: int = 8
    """Times in a row that each server may fail."""
    initial: float = 0.1
    """The first wait."""
    multiplier: float = 2.0
    """By which each wait is longer than the one before."""
    maximum: float = 5.0
    """The longest wait."""
    total: float = 60.0
    """From the first failure, after which the request is given up."""

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError(f"attempts must be at least 1, not {self.attempts}")
        if not (0 <= self.initial <= self.maximum and self.multiplier >= 1 and self.total >= 0):
            raise ValueError(f"0 <= initial <= maximum, 1 <= multiplier and 0 <= total must hold in {self}")

    def wait(self, failures: int) -> float:
        """Seconds before a server that failed so often in a row is tried again, spread so that clients do not come
        back all at once."""
        try:
            longest = min(self.maximum, self.initial * self.multiplier ** (failures - 1))
        except OverflowError:
            longest = self.maximum
        return longest * random.uniform(0.8, 1.0)


DEFAULT_POLICY = ResumePolicy()


class Route:
    """The servers one request was tried at, and which is next. Moments are those of time.monotonic().

    `policy` None tries once. `timeout` is in seconds from now, for all tries together.
    """

    def __init__(
        self, policy: ResumePolicy | None, num_servers: int = 1, server: int = 0, timeout: float | None = None
    ) -> None:
        self.server = server
        """Which is next, from 0."""
        self.not_before = 0.0
        """The moment it may be tried."""
        self.deadline = math.inf
        self.start(timeout)
        self._policy = policy
        self._failures = [0] * num_servers
        self._ready = [0.0] * num_servers
        self._since: float | None = None

    def __repr__(self) -> str:
        return f"Route(server={self.server}, not_before={self.not_before}, failures={self._failures})"

    @property
    def may_retry(self) -> bool:
        return self._policy is not None

    def start(self, timeout: float | None) -> None:
        """The timeout's clock starts."""
        self.deadline = math.inf if timeout is None else time.monotonic() + timeout

    def wait(self) -> float:
        """Seconds until the next server may be tried."""
        return max(0.0, self.not_before - time.monotonic())

    def time_left(self) -> float | None:
        """Seconds that a call sent now may take; None is no limit."""
        return None if self.deadline == math.inf else max(0.0, self.deadline - time.monotonic())

    def copy(self) -> Route:
        route = Route(self._policy, len(self._failures), self.server)
        route.deadline, route.not_before, route._since = self.deadline, self.not_before, self._since
        route._failures, route._ready = self._failures.copy(), self._ready.copy()
        return route

    def progressed(self) -> None:
        """The server brought something: what failed before is forgotten."""
        if self._since is not None:
            self._since = None
            self._failures = [0] * len(self._failures)

    def failed(self, error: TailraceError) -> None:
        """Chooses where and when to go on. Raises the error where that is not to be."""
        policy = self._policy
        if policy is None or not self._may_go_on(error):
            raise error
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        self._failures[self.server] += 1
        wait = max(policy.wait(self._failures[self.server]), error.retry_after or 0.0)
        self._ready[self.server] = now + wait
        # Behind this one, the first that may be tried at once, else the one that may be tried first.
        count = len(self._failures)
        behind = [(self.server + step) % count for step in range(1, count + 1)]
        self.server = min(behind, key=lambda server: max(now, self._ready[server]))
        self.not_before = max(now, self._ready[self.server])
        exhausted = self._failures[self.server] >= policy.attempts
        if exhausted or self.not_before > min(self._since + policy.total, self.deadline):
            raise error

    def _may_go_on(self, error: TailraceError) -> bool:
        match error:
            case UnavailableError():
                return True
            case OverloadedError():
                # Where a caller limits its time in the queue, that time was all it wanted to wait.
                return error.retry_after is not None and error.reason != QUEUE_TIMEOUT
            case DuplicateRequestError():
                # Our own: a server that has not noticed yet that the connection is lost.
                return self._since is not None
        return False
