"""KVCache: which blocks a request holds, what of them others may share, when they may be reused.

A step in flight reads and writes the blocks it was scheduled with. So blocks of a request are
returned to the pool only when the last step that used them is back: until then they wait behind
that step's number.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from core_proc.block_hash import extend_chain
from core_proc.block_pool import BlockContent, BlockPool
from core_proc.kv_change_log import KVChangeLog

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from core_proc.request import Request


class KVCache:
    """Blocks of `block_size` tokens for requests, with prefix sharing. Knows no rows and no steps' content."""

    def __init__(self, num_blocks: int, block_size: int, prefix_caching: bool = True) -> None:
        self.pool = BlockPool(num_blocks)
        self.changes = KVChangeLog(self.pool)
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.last_returned_step = -1
        self._deferred: deque[tuple[int, list[int]]] = deque()
        self._unproven: dict[int, list[int]] = {}
        """Blocks published ahead of the step that fills them, by that step's number."""

    @property
    def capacity_tokens(self) -> int:
        return (self.pool.num_blocks - 1) * self.block_size

    @property
    def has_deferred(self) -> bool:
        """Whether blocks will become free when steps in flight return."""
        return bool(self._deferred)

    def num_shareable(self, request: Request) -> int:
        """Leading blocks that it may share with others, while it waits: at most all but its last token."""
        if not self.prefix_caching or not request.reads_cache:
            return 0
        return min(len(request.block_hashes), (request.num_waiting_tokens - 1) // self.block_size)

    def lookup(self, request: Request) -> list[int]:
        """Cached blocks that begin the request's tokens."""
        hits: list[int] = []
        for block_hash in request.block_hashes[: self.num_shareable(request)]:
            block = self.pool.cached(block_hash)
            if block is None:
                break
            hits.append(block)
        return hits

    def fits(self, num_tokens: int, hits: list[int]) -> bool:
        """Whether a sequence of `num_tokens` beginning with `hits` fits whole into what is free now.

        A hit nobody holds counts: holding it takes it from the free queue.
        """
        new = -(-num_tokens // self.block_size) - len(hits)
        idle_hits = sum(not self.pool.is_held(block) for block in hits)
        return new + idle_hits <= self.pool.num_free

    def share(self, request: Request, hits: list[int]) -> None:
        """The request holds these cached blocks as its first."""
        assert not request.block_ids
        for block in hits:
            self.pool.hold(block)
        request.block_ids = list(hits)
        request.num_published = len(hits)

    def grow(self, request: Request, num_tokens: int) -> list[int] | None:
        """Adds the blocks that `num_tokens` tokens need, and returns them; None and no change if too few are free."""
        new = -(-num_tokens // self.block_size) - len(request.block_ids)
        if new > self.pool.num_free:
            return None
        blocks = [self.pool.take() for _ in range(new)]
        request.block_ids += blocks
        return blocks

    def publish(self, request: Request, token_ids: npt.NDArray[np.int32], num_computed: int, step_id: int) -> None:
        """Lets others find the full blocks of the first `num_computed` tokens, which `step_id` completes.

        `token_ids` are the tokens known. Called when the step that fills the blocks is scheduled, not when
        it is back: whoever shares them is computed in the same step or a later one.
        """
        if not self.prefix_caching or request.params.bypass_cache:
            return
        full = min(num_computed, len(token_ids)) // self.block_size
        if full <= request.num_published:
            return
        extend_chain(request.block_hashes, request.hash_root, token_ids[: full * self.block_size], self.block_size)
        first, salt, adapter = request.num_published, request.params.cache_salt, request.params.adapter
        data = token_ids[first * self.block_size : full * self.block_size].tobytes()
        width = token_ids.itemsize * self.block_size
        published = []
        for index in range(first, full):
            parent = request.block_hashes[index - 1] if index else None
            start = (index - first) * width
            content = BlockContent(parent, salt, data[start : start + width], adapter)
            if self.pool.publish(request.block_ids[index], request.block_hashes[index], content):
                published.append(request.block_ids[index])
        request.num_published = full
        if published and step_id > self.last_returned_step:
            self._unproven.setdefault(step_id, []).extend(published)

    def release(self, request: Request) -> None:
        """The request gives its blocks back, once its last step has returned. Tail first: the head of the
        prefix, which most others share, is evicted last."""
        blocks = request.block_ids[::-1]
        request.block_ids = []
        if request.last_step > self.last_returned_step:
            self._deferred.append((request.last_step, blocks))
        else:
            self.pool.release(blocks)

    def step_returned(self, step_id: int) -> None:
        """Steps return in order; blocks that waited for this one are free now."""
        self.last_returned_step = step_id
        self._unproven.pop(step_id, None)
        for _ in range(len(self._deferred)):
            last_step, blocks = self._deferred.popleft()
            if last_step <= step_id:
                self.pool.release(blocks)
            else:
                self._deferred.append((last_step, blocks))

    def step_failed(self, step_id: int) -> set[int]:
        """As `step_returned`, of a step that filled nothing. What was published ahead of steps in flight is
        withdrawn and returned, later steps' too: they may have built on what is not there."""
        false_blocks = {block for blocks in self._unproven.values() for block in blocks}
        self._unproven.clear()
        for block in false_blocks:
            self.pool.withdraw(block)
        self.step_returned(step_id)
        return false_blocks

    def audit(self, requests: list[Request]) -> None:
        """Asserts that the pool's counts are exactly what requests and deferred blocks explain."""
        holders: dict[int, int] = {}
        for blocks in [*(request.block_ids for request in requests), *(blocks for _, blocks in self._deferred)]:
            for block in blocks:
                holders[block] = holders.get(block, 0) + 1
        self.pool.audit(holders)
