"""Rows: the running requests as columns.

A row is a place in the worker's persistent batch. Scheduling and updating a row that only decodes
touches the columns, all rows at once, and no object of its own.

Three lengths say where a row is. With n steps in flight that draw a token for it:

    known      tokens whose ids are here: prompt and output
    expected   known + n: the length once those steps are back
    computed   tokens whose keys and values are in the cache or will be when those steps are back

A row has `expected - computed` tokens to compute; the step that computes the last of them draws.
Every length is absolute, none is a running difference: there is nothing that could underflow.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from core_proc.request import Request

Int32s = npt.NDArray[np.int32]


class Rows:
    """Columns of `num_rows` rows, and the order in which the rows in use are served."""

    def __init__(self, num_rows: int, max_model_len: int, block_size: int) -> None:
        self._block_size = block_size
        self.lengths: Int32s = np.zeros((5, num_rows), np.int32)
        """[5, rows]: what a step looks at of each row, in the order of the next line."""
        self.computed, self.known, self.expected, self.max_len, self.capacity = self.lengths
        """`max_len`: tokens at which it ends; `capacity`: those that the row's blocks can hold."""
        self.cached: Int32s = np.zeros(num_rows, np.int32)
        """Tokens that were computed already when the request entered."""
        self.epoch: npt.NDArray[np.int64] = np.zeros(num_rows, np.int64)
        """Changes whenever a request leaves the row: a result of an older epoch is not this request's."""
        self.last_step: npt.NDArray[np.int64] = np.zeros(num_rows, np.int64)
        self.handle: npt.NDArray[np.int64] = np.zeros(num_rows, np.int64)
        self.client: Int32s = np.zeros(num_rows, np.int32)
        self.ignore_eos: npt.NDArray[np.bool_] = np.zeros(num_rows, np.bool_)
        self.looks_at_tokens: npt.NDArray[np.bool_] = np.zeros(num_rows, np.bool_)
        """Whether each token may end the request in a way of its own: a stop id, a grammar, a repetition."""
        self.has_grammar: npt.NDArray[np.bool_] = np.zeros(num_rows, np.bool_)
        self.has_siblings: npt.NDArray[np.bool_] = np.zeros(num_rows, np.bool_)
        """Whether sequences of the same prompt wait for it to be computed."""
        self.awaits_first: npt.NDArray[np.bool_] = np.zeros(num_rows, np.bool_)
        """Whether the request has not had a token yet."""
        self.token_ids: Int32s = np.zeros((num_rows, max_model_len), np.int32)
        """zeros, not filled: pages that no sequence reaches are never resident."""
        self.requests: npt.NDArray[np.object_] = np.full(num_rows, None, np.object_)
        self._free = list(range(num_rows))
        self._order: list[tuple[tuple[int, int], int]] = []
        self._order_rows: Int32s | None = None

    def __len__(self) -> int:
        """Rows in use."""
        return len(self._order)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def in_order(self) -> Int32s:
        """Rows in use, first served first."""
        if self._order_rows is None:
            self._order_rows = np.array([row for _, row in self._order], np.int32)
        return self._order_rows

    def last(self) -> Request:
        """The request served last: the one to preempt."""
        request: Request = self.requests[self._order[-1][1]]
        return request

    def enter(self, request: Request, num_computed: int) -> int:
        """Gives a request the lowest free row, so that the worker's batch stays dense."""
        row = heapq.heappop(self._free)
        known = len(request.token_ids)
        self.computed[row] = self.cached[row] = num_computed
        self.expected[row] = self.known[row] = known
        self.max_len[row] = request.max_len
        self.token_ids[row, :known] = request.token_ids
        self.capacity[row] = len(request.block_ids) * self._block_size
        self.last_step[row] = request.last_step
        self.handle[row] = request.handle
        self.client[row] = request.client
        self.ignore_eos[row] = request.params.sampling.ignore_eos
        params = request.params
        self.has_grammar[row] = request.matcher is not None
        self.has_siblings[row] = bool(request.siblings)
        self.looks_at_tokens[row] = (
            bool(params.sampling.stop_token_ids) or request.matcher is not None or params.repetition is not None
        )
        self.awaits_first[row] = request.first_token_time == -math.inf
        self.requests[row] = request
        insort(self._order, (request.key, row))
        self._order_rows = None
        request.row = row
        return row

    def leave(self, request: Request) -> None:
        """Takes a request out of its row; its tokens and last step go back to the object."""
        row = request.row
        request.token_ids = self.token_ids[row, : self.known[row]].copy()
        request.last_step = int(self.last_step[row])
        request.row = -1
        self.epoch[row] += 1
        self.requests[row] = None
        heapq.heappush(self._free, row)
        del self._order[bisect_left(self._order, (request.key, row))]
        self._order_rows = None
