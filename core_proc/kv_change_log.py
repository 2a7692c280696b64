"""KVChangeLog: what front ends that ask for it are told of the prefix cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from core_proc.block_hash import SHORT_SIZE
from protos.messages import KVChanges

if TYPE_CHECKING:
    from core_proc.block_pool import BlockPool


class KVChangeLog:
    """By front end, the hashes whose state it has not been told of since. Costs nothing while nobody asks."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._untold: dict[int, dict[bytes, bool]] = {}
        """Whether each of the hashes can be found."""

    def begin(self, client: int) -> None:
        """From now on `take` has the changes for this front end, at first all that can be found."""
        self._untold[client] = dict.fromkeys(self._pool.cached_hashes, True)
        self._pool.on_change = self._changed

    def take(self, client: int) -> KVChanges | None:
        """Since the last call; None if there were none."""
        untold = self._untold.get(client)
        if not untold:
            return None
        stored = b"".join(block_hash[:SHORT_SIZE] for block_hash, is_stored in untold.items() if is_stored)
        removed = b"".join(block_hash[:SHORT_SIZE] for block_hash, is_stored in untold.items() if not is_stored)
        untold.clear()
        return KVChanges(stored, removed)

    def forget(self, client: int) -> None:
        """A front end that left."""
        self._untold.pop(client, None)
        if not self._untold:
            self._pool.on_change = None

    def _changed(self, block_hash: bytes, is_stored: bool) -> None:
        for untold in self._untold.values():
            untold[block_hash] = is_stored
