"""Recent: how the requests of late went."""

from __future__ import annotations

import time
from collections import Counter, deque
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from async_engine.request_state import RequestState
    from protos.messages import Finished

WINDOW = 1000
PERCENTILES = (50.0, 90.0, 99.0)


class Recent:
    """An observer of ends: counts them by reason, and keeps the latencies of the last ones that had a token."""

    def __init__(self) -> None:
        self.finished: Counter[str] = Counter()
        """Requests, by the name of their reason in lower case."""
        self.time_to_first_token: deque[float] = deque(maxlen=WINDOW)
        self.inter_token: deque[float] = deque(maxlen=WINDOW)
        self.end_to_end: deque[float] = deque(maxlen=WINDOW)

    def __call__(self, state: RequestState, finished: Finished) -> None:
        self.finished[finished.reason.name.lower()] += 1
        if (ttft := state.time_to_first_token) is None:
            return
        self.time_to_first_token.append(ttft)
        self.end_to_end.append(time.monotonic() - state.arrival_time)
        if (gap := state.inter_token_seconds(finished)) is not None:
            self.inter_token.append(gap)


def percentiles(seconds: Sequence[float]) -> list[float] | None:
    """The PERCENTILES of some times; None of none."""
    return np.percentile(list(seconds), PERCENTILES).tolist() if seconds else None
