"""StatsTable: what several cores tell of themselves, as one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from protos.messages import NO_STATS, TOTALS, CoreStats

if TYPE_CHECKING:
    from collections.abc import Sequence

_FIELDS = CoreStats.__struct_fields__
_USAGE, _QUEUE = _FIELDS.index("kv_usage"), _FIELDS.index("queue_seconds")
_SUMMED = ("running", "waiting", "steps_in_flight", *TOTALS)


class StatsTable:
    """A row for each core. Hundreds of them tell four times a second: nothing here looks at them one by one."""

    def __init__(self, capacities: Sequence[int]) -> None:
        """`capacities` are the tokens that each core's KV cache holds: its usage counts by that."""
        self._weights = np.array(capacities) / sum(capacities)
        self._rows = np.zeros((len(capacities), len(_FIELDS)))
        self._only = NO_STATS

    def put(self, core: int, stats: CoreStats) -> None:
        self._only = stats
        self._rows[core] = msgspec.structs.astuple(stats)

    def sum(self) -> CoreStats:
        """Gauges and totals of all; the queue is the longest one."""
        if len(self._rows) == 1:
            return self._only
        sums = self._rows.sum(0)
        return msgspec.structs.replace(
            self._only,
            kv_usage=float(self._weights @ self._rows[:, _USAGE]),
            queue_seconds=float(self._rows[:, _QUEUE].max()),
            **{name: int(sums[_FIELDS.index(name)]) for name in _SUMMED},
        )
