"""Followers: requests that wait while another one computes what both begin with, instead of computing it too.

A follower shares what its leader has published by then, and comes back to its place in the queue when the last block
they have in common is, or when the leader computes no more. So it loses nothing: the leader was ahead of it.
"""

from __future__ import annotations

import heapq
from itertools import count
from typing import TYPE_CHECKING

from core_proc.request import Request, State

if TYPE_CHECKING:
    from collections.abc import Container

    from core_proc.kv_cache import KVCache
    from core_proc.request_queue import RequestQueue


class Followers:
    """Running requests with blocks of their prompt still to come, and those that wait for them."""

    def __init__(self, queue: RequestQueue, kv_cache: KVCache) -> None:
        self._queue = queue
        self._kv_cache = kv_cache
        self._followers: dict[Request, list[tuple[int, int, Request]]] = {}
        """Of each leader, a heap by the number of blocks that they have in common. Who has ended stays until it
        surfaces."""
        self._numbers = count()

    def __bool__(self) -> bool:
        """Whether somebody may have to be released."""
        return any(self._followers.values())

    def lead(self, request: Request) -> None:
        """A request was admitted: others may wait for what it will compute."""
        if _is_leading(request):
            self._followers.setdefault(request, [])

    def follow(self, request: Request, num_hits: int) -> bool:
        """Sets the next of the queue aside if the first block that it does not find, behind so many, is about to be
        computed for a request that is served before it."""
        num_blocks = self._kv_cache.num_shareable(request)
        if request.is_suspect or num_hits >= num_blocks:
            return False
        for leader, followers in self._followers.items():
            hashes, num_common = leader.block_hashes, num_hits
            if leader.num_published > num_hits or leader.params.priority > request.params.priority:
                continue
            end = min(num_blocks, len(hashes))
            while num_common < end:  # equal hashes have equal ones before them
                middle = (num_common + end) // 2
                if hashes[middle] == request.block_hashes[middle]:
                    num_common = middle + 1
                else:
                    end = middle
            if num_common > num_hits:
                heapq.heappush(followers, (num_common, next(self._numbers), request))
                self._queue.set_aside(request)
                return True
        return False

    def release(self, held_back: Container[int]) -> None:
        """Lets those go on whose leader is as far as they go with it, or gets no further: it has left its row, or its
        front end is held back."""
        for leader, followers in list(self._followers.items()):
            goes_on = leader.state is State.RUNNING and leader.client not in held_back and _is_leading(leader)
            while followers and not (goes_on and leader.num_published < followers[0][0]):
                self._queue.take_back(heapq.heappop(followers)[-1])
            if not goes_on:
                del self._followers[leader]

    def claims(self, request: Request) -> tuple[int, int]:
        """(rows, tokens in whole blocks) that those will need that were to be served before a request."""
        num_rows = num_tokens = 0
        size = self._kv_cache.block_size
        for followers in self._followers.values():
            for num_common, _, follower in followers:
                if follower.state is State.WAITING and not request.is_suspect and _order(follower) <= _order(request):
                    num_rows += 1
                    num_tokens += -(-(follower.num_waiting_tokens - num_common * size) // size) * size
        return num_rows, num_tokens


def _is_leading(request: Request) -> bool:
    return request.num_published < len(request.block_hashes)


def _order(request: Request) -> tuple[int, bool]:
    return (request.params.priority, request.is_new)
