"""BlockPool: who holds which KV block, and which block is given away next.

Every block is in one of three states: held (reference count > 0), free and cached (count 0, its
content still findable by hash), or free and empty. The free list is a queue: empty blocks are put
at its front, cached ones at its back, so that what is cached is evicted last and in LRU order.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from protos.step import NULL_BLOCK

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class BlockContent(NamedTuple):
    """What a block that can be found holds: for those who watch, whenever they come. About 200 bytes."""

    parent: bytes | None
    """Hash of the block before; None for the first of a sequence."""
    salt: str
    token_ids: bytes
    """Little-endian int32."""
    adapter: str = ""
    """Name of the adapter it was computed with; empty is none."""


class BlockPool:
    """Reference counts, the free queue and the map from content hash to block.

    Block 0 is the null block: never handed out, never counted. A hash names at most one block;
    publishing a second block under it is refused, and that block stays uncached.

    `on_change(hash, is_stored)` is told every change of the map.
    """

    def __init__(self, num_blocks: int, on_change: Callable[[bytes, bool], None] | None = None) -> None:
        assert num_blocks >= 2, "a pool needs the null block and one more"
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._content: list[BlockContent | None] = [None] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(NULL_BLOCK + 1, num_blocks))
        self.on_change = on_change

    def __repr__(self) -> str:
        return f"BlockPool(free={self.num_free}, cached={self.num_cached}, total={self.num_blocks})"

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def usage(self) -> float:
        """Fraction of the blocks that is held, in [0, 1]."""
        return 1.0 - self.num_free / (self.num_blocks - 1)

    @property
    def num_cached(self) -> int:
        """Blocks that can be found."""
        return len(self._block_of)

    @property
    def cached_hashes(self) -> list[bytes]:
        """Of all blocks that can be found."""
        return list(self._block_of)

    def content(self, block_hash: bytes) -> BlockContent:
        """Of a block that can be found."""
        content = self._content[self._block_of[block_hash]]
        assert content is not None
        return content

    def is_held(self, block: int) -> bool:
        return self._ref_counts[block] > 0

    def cached(self, block_hash: bytes) -> int | None:
        """The block with this content, held or free."""
        return self._block_of.get(block_hash)

    def take(self) -> int:
        """Hands out the block at the front of the free queue; its old content can no longer be found.

        Raises KeyError when none is free: callers check `num_free` first.
        """
        block, _ = self._free.popitem(last=False)
        self._forget(block)
        self._ref_counts[block] = 1
        return block

    def hold(self, block: int) -> None:
        """One more holder of a cached block."""
        if self._ref_counts[block] == 0:
            del self._free[block]
        self._ref_counts[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One holder less of each block, in the order given: the last one released is evicted last."""
        for block in blocks:
            count = self._ref_counts[block] = self._ref_counts[block] - 1
            assert count >= 0, f"block {block} released more often than held"
            if count == 0:
                self._free[block] = None
                if self._hash_of[block] is None:
                    self._free.move_to_end(block, last=False)

    def publish(self, block: int, block_hash: bytes, content: BlockContent) -> bool:
        """Makes a held block findable; False if another block already has this content."""
        if block_hash in self._block_of:
            return False
        assert self._hash_of[block] is None, f"block {block} is already published"
        self._hash_of[block] = block_hash
        self._block_of[block_hash] = block
        self._content[block] = content
        if self.on_change:
            self.on_change(block_hash, True)
        return True

    def withdraw(self, block: int) -> None:
        """Undoes `publish`: the block was never filled, or its content is no longer true."""
        self._forget(block)
        if block in self._free:
            self._free.move_to_end(block, last=False)

    def reset(self) -> bool:
        """Forgets all content. Refused, with False, while any block is held."""
        if self.num_free != self.num_blocks - 1:
            return False
        self.forget_all()
        return True

    def forget_all(self) -> None:
        """Forgets all content, of held blocks too: their holders keep them, nobody else finds them."""
        for block in list(self._block_of.values()):
            self._forget(block)

    def _forget(self, block: int) -> None:
        block_hash = self._hash_of[block]
        if block_hash is not None:
            self._hash_of[block] = self._content[block] = None
            del self._block_of[block_hash]
            if self.on_change:
                self.on_change(block_hash, False)

    def audit(self, holders: dict[int, int]) -> None:
        """Asserts that the counts equal the given number of holders of each block, and the books balance."""
        for block in range(NULL_BLOCK + 1, self.num_blocks):
            count = self._ref_counts[block]
            assert count == holders.get(block, 0), f"block {block}: count {count}, holders {holders.get(block, 0)}"
            assert (count == 0) == (block in self._free), f"block {block} with count {count} is misfiled"
        assert NULL_BLOCK not in self._free
        assert NULL_BLOCK not in holders
        for block_hash, block in self._block_of.items():
            assert self._hash_of[block] == block_hash
