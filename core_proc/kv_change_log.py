"""KVChangeLog: what front ends that ask for it are told of the prefix cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from core_proc.block_hash import SHORT_SIZE
from protos.messages import KVChanges

if TYPE_CHECKING:
    from collections.abc import Iterable

    from core_proc.block_pool import BlockPool


class KVChangeLog:
    """By front end, the hashes whose state it has not been told of since. Costs nothing while nobody asks."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._untold: dict[int, dict[bytes, bool] | None] = {}
        """Whether each of the hashes can be found; None: the front end is to be told all that can."""

    def begin(self, client: int) -> None:
        """From now on `take` has the changes for this front end, at first all that can be found."""
        self._untold[client] = None
        self._pool.on_change = self._changed

    def take(self, client: int) -> KVChanges | None:
        """Since the last call; None if there were none."""
        if client not in self._untold:
            return None
        untold = self._untold[client]
        self._untold[client] = {}
        if untold is None:
            return KVChanges(_short(self._pool.cached_hashes), b"", is_all=True)
        if not untold:
            return None
        stored = _short(block_hash for block_hash, is_stored in untold.items() if is_stored)
        return KVChanges(stored, _short(block_hash for block_hash, is_stored in untold.items() if not is_stored))

    def forget(self, client: int) -> None:
        """A front end that left."""
        self._untold.pop(client, None)
        if not self._untold:
            self._pool.on_change = None

    def _changed(self, block_hash: bytes, is_stored: bool) -> None:
        for client, untold in self._untold.items():
            if untold is not None:
                untold[block_hash] = is_stored
                if len(untold) > 2 * self._pool.num_blocks:  # it takes nothing: more than all is not kept for it
                    self._untold[client] = None


def _short(hashes: Iterable[bytes]) -> bytes:
    return b"".join(block_hash[:SHORT_SIZE] for block_hash in hashes)
