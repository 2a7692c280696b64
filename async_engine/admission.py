"""Admission: how much may run and wait at once; what is over it is refused at the door."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from protos.errors import OverloadedError

if TYPE_CHECKING:
    from async_engine.request_state import RequestState
    from protos.messages import CoreStats
    from protos.server_config import AdmissionOptions

MIN_RETRY_SECONDS = 1.0
MAX_RETRY_SECONDS = 60.0
RESERVE = 8
"""One part in so many of the queue is for callers that have nothing else here: no caller fills it alone."""


class Admission:
    """Counts the sequences that are live and the tokens that wait. `max_running` is in sequences.

    Front ends that share cores count each its own tokens; of the others' sequences they know what the cores told last.
    """

    def __init__(self, options: AdmissionOptions, max_running: int) -> None:
        self._options = options
        self._capacity = max_running + options.max_queued_requests
        self._num_sequences = 0
        self._queued_tokens = 0
        self._of_caller: Counter[str] = Counter()
        """Live sequences."""
        self._queue_seconds = 0.0
        self.is_shared = False
        """Whether other front ends have the cores, too."""
        self._num_elsewhere = 0

    def enter(self, caller: str, num_sequences: int, num_in_core: int) -> None:
        """A request comes; each of its sequences counts as a request of its own does. Raises OverloadedError."""
        reserve = self._options.max_queued_requests // RESERVE if self._of_caller[caller] else 0
        # Those whose caller left count until the core has ended them: a hung core must not gather them.
        num_there = max(self._num_sequences, num_in_core) + self._num_elsewhere
        if num_there + num_sequences > self._capacity - reserve:
            raise self._overloaded(f"{self._capacity - reserve} sequences at most run or wait at once")
        self._num_sequences += num_sequences
        self._of_caller[caller] += num_sequences

    def queue(self, state: RequestState, num_tokens: int) -> None:
        """A request waits, with so many tokens to compute. Raises OverloadedError, unless it is the only one."""
        has_others = self._of_caller[state.caller] > len(state.sequences)
        limit = self._options.max_queued_tokens
        limit -= limit // RESERVE if has_others else 0
        if self._queued_tokens and self._queued_tokens + num_tokens > limit:
            raise self._overloaded(f"{limit} tokens at most wait at once")
        self._queued_tokens += num_tokens
        state.queued_tokens = num_tokens

    def unqueue(self, state: RequestState) -> None:
        """It does not wait any more. Idempotent."""
        self._queued_tokens -= state.queued_tokens
        state.queued_tokens = 0

    def leave(self, state: RequestState) -> None:
        """It is over."""
        self._num_sequences -= len(state.sequences)
        self._of_caller[state.caller] -= len(state.sequences)
        if not self._of_caller[state.caller]:
            del self._of_caller[state.caller]
        self.unqueue(state)

    def observe(self, stats: CoreStats, num_in_core: int) -> None:
        """What the cores hold, `num_in_core` sequences of ours among it."""
        self._queue_seconds = stats.queue_seconds
        if self.is_shared:
            self._num_elsewhere = max(0, stats.running + stats.waiting - num_in_core)

    def _overloaded(self, message: str) -> OverloadedError:
        # Half the queue: then there is room, if others stay away too.
        seconds = min(max(MIN_RETRY_SECONDS, self._queue_seconds / 2), MAX_RETRY_SECONDS)
        return OverloadedError(message, seconds)
