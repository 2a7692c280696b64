"""Suspects: the requests of a failed step, tried in ever smaller groups until whoever makes steps fail is alone.

failed step ──► groups ──trial──► a token is drawn: cleared, a request like any other
                  ▲         └───► the step fails: two halves, or the end of a request that is alone
                  └───────────────────┘

A trial is a step of suspects of one group and of nobody else. One is in flight at a time, and steps of
the others go on between two of them. Groups take turns, so large ones, which clear many, come first.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from core_proc.request import State

if TYPE_CHECKING:
    from core_proc.intake import StepInFlight
    from core_proc.request import Request


class Suspects:
    """Groups of requests. The first is on trial: only of its members some may run.

    In a group the shortest come first, so that halving parts short prompts, cleared by one step, from long ones.
    """

    def __init__(self) -> None:
        self.last_trial = -1
        """Number of the last step that was a trial."""
        self._groups: deque[list[Request]] = deque()

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._groups) and bool(self._on_trial())

    def is_trial(self, step: StepInFlight) -> bool:
        """Asked when a step is back: no later trial can have been issued."""
        return step.output.step_id == self.last_trial

    def next_waiting(self) -> Request | None:
        """Of the group on trial, who is to start next."""
        return next((request for request in self._on_trial() if request.state is State.WAITING), None)

    def reserved(self, block_size: int) -> tuple[int, int]:
        """(rows, tokens in whole blocks) that those who wait will need: what they gave up is not for others."""
        lengths = [r.num_waiting_tokens for group in self._groups for r in group if r.state is State.WAITING]
        return len(lengths), sum(-(-length // block_size) * block_size for length in lengths)

    def accuse(self, step: StepInFlight, requests: list[Request]) -> None:
        """Some requests of a failed step, waiting by now, are to be tried: those that were new in it apart from the
        others, if it was a step like any other, else in two halves."""
        self._remove(requests)
        new_rows = set() if self.is_trial(step) else {new.row for new in step.output.new_rows}
        new = {r for r, row in zip(step.all_requests, step.output.rows.tolist(), strict=True) if row in new_rows}
        ordered = sorted(requests, key=lambda r: (r in new, r.num_waiting_tokens, r.key))
        middle = sum(request not in new for request in ordered)
        if middle in (0, len(ordered)):
            middle = len(ordered) // 2
        self._groups += filter(None, (ordered[:middle], ordered[middle:]))

    def clear(self, step: StepInFlight) -> None:
        """A trial went well: whoever drew a token in it, and still has its row, is no suspect any more."""
        cleared = [request for request in step.requests if request.state is State.RUNNING]
        for request in cleared:
            request.is_suspect = False
        self._remove(cleared)

    def _remove(self, requests: list[Request]) -> None:
        gone = set(requests)
        groups = ([request for request in group if request not in gone] for group in self._groups)
        self._groups = deque(filter(None, groups))

    def _on_trial(self) -> list[Request]:
        while self._groups and all(request.state is State.FINISHED for request in self._groups[0]):
            self._groups.popleft()
        return self._groups[0] if self._groups else []
