"""Router: which core a request goes to. Pure: no I/O, no clock, the same for the same calls.

A core's load is what it was given and has not done, in tokens of prompts: those of prompts on their way to their
first token that are not cached, and for each sequence what its output is likely to take. A request goes where what
would have to be computed of its prompt and a part of the load are least together: sequences that run share their
steps, so one more delays the others little, while a prefix computed twice is work for all of them, and a place in
the cache. But it never goes to a core that has many more sequences than another, whatever it holds: the prefix is
then computed once more, and one that many want comes to be in several cores.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from async_engine.prefix_map import PrefixMap

if TYPE_CHECKING:
    from collections.abc import Sequence

    from protos.kv_changes import KVChanges
    from protos.messages import CoreStats

OUTPUT_COST = 2.0
"""Of a token drawn, in tokens of prompts: what the core's scheduler takes it for."""
FIRST_OUTPUT_TOKENS = 64.0
"""An output's likely length before any has ended."""
OUTPUT_FADE = 0.02
"""Weight of the latest output in the mean of them."""
LOAD_WEIGHT = 0.25
"""Of load against tokens to compute."""
SLACK = 0.25
"""Part of the mean number of sequences by which a core may have more than the one with fewest, and be chosen."""
SLACK_SEQUENCES, SLACK_ROWS = 12, 0.5
"""At little load: as many sequences, but at most that part of what the core runs at once."""
WORK_FADE = 1 / 64
"""Weight of the latest request, per core, in the work given of late."""


@dataclass(slots=True, eq=False)
class Ticket:
    """A request's place in a core, from when it is given to it until it ends or leaves."""

    core: int
    life: int
    num_sequences: int
    cached_tokens: int
    """Of its prompt, those that the core was taken to hold."""
    pending_tokens: int
    """Of its prompt, those to be computed before the first token; 0 from then on."""
    expected: list[int] = field(default_factory=list)
    """Blocks that the core does not hold yet."""


class Router:
    """Knows of each core what it holds and what it has to do. Cores are numbers, at first all up; `num_rows` of each
    are the sequences it runs at once."""

    def __init__(self, num_rows: Sequence[int], block_size: int) -> None:
        num_cores = len(num_rows)
        self.map = PrefixMap(num_cores)
        self._rows = np.array(num_rows, np.float64)
        self._block_size = block_size
        self._up = np.ones(num_cores, np.bool_)
        self._life = [0] * num_cores
        self._pending = np.zeros(num_cores)
        self._sequences = np.zeros(num_cores)
        """Given by us."""
        self._others = np.zeros(num_cores)
        """Sequences that others gave it, by its statistics."""
        self._work = np.zeros(num_cores)
        """Given of late."""
        self._output_tokens = FIRST_OUTPUT_TOKENS

    @property
    def sequence_cost(self) -> float:
        """Of a sequence, beside its prompt's."""
        return OUTPUT_COST * self._output_tokens

    def route(self, hashes: Sequence[int], num_tokens: int, num_sequences: int = 1) -> Ticket | None:
        """A place for a request of so many tokens, whose blocks have these hashes; None while no core is up."""
        if not self._up.any():
            return None
        held = self.map.lookup(hashes)
        todo = num_tokens - held * self._block_size
        sequences = self._sequences + self._others
        load = self._pending + self.sequence_cost * sequences
        most = sequences[self._up].min() + np.maximum(
            SLACK * sequences[self._up].mean(), np.minimum(SLACK_SEQUENCES, SLACK_ROWS * self._rows)
        )
        may_take = self._up & (sequences <= most)
        cost = np.where(may_take, todo + LOAD_WEIGHT * load, np.inf)
        # Of equals the one with the least load, of those the one that was given least.
        best = int(np.lexsort((self._work, load, cost))[0])
        return self._enter(best, hashes, int(held[best]), int(todo[best]), num_sequences)

    def _enter(self, core: int, hashes: Sequence[int], num_held: int, todo: int, num_sequences: int) -> Ticket:
        ticket = Ticket(
            core, self._life[core], num_sequences, num_held * self._block_size, todo, list(hashes[num_held:])
        )
        self.map.expect(core, ticket.expected)
        self._pending[core] += todo
        self._sequences[core] += num_sequences
        self._work *= 1 - WORK_FADE / len(self._work)
        self._work[core] += todo + num_sequences * self.sequence_cost
        return ticket

    def computed(self, ticket: Ticket) -> None:
        """The first token came: the prompt is in the cache. Idempotent."""
        if ticket.life == self._life[ticket.core]:
            self.map.settle(ticket.core, ticket.expected)
            self._pending[ticket.core] -= ticket.pending_tokens
        ticket.expected, ticket.pending_tokens = [], 0

    def ended(self, ticket: Ticket, num_output_tokens: int | None = None) -> None:
        """The request is over, with outputs of so many tokens together, or leaves the core (None). Once."""
        self.computed(ticket)
        if ticket.life == self._life[ticket.core]:
            self._sequences[ticket.core] -= ticket.num_sequences
        if num_output_tokens is not None:
            self._output_tokens += OUTPUT_FADE * (num_output_tokens / ticket.num_sequences - self._output_tokens)

    def observe(self, core: int, stats: CoreStats) -> None:
        """What a core tells of itself: others may use it, too."""
        self._others[core] = max(0.0, stats.running + stats.waiting - self._sequences[core])

    def update(self, core: int, changes: KVChanges) -> None:
        """What a core tells of its prefix cache."""
        self.map.update(core, changes)

    def lost(self, core: int) -> None:
        """A core died: it holds nothing, and has nothing to do. Tickets for it count no more."""
        self._up[core] = False
        self._life[core] += 1
        self.map.forget(core)
        self._pending[core] = self._sequences[core] = self._others[core] = 0.0

    def found(self, core: int) -> None:
        """There is a core again."""
        self._up[core] = True
        self._work[core] = self._work[self._up].mean()
