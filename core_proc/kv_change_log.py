"""KVChangeLog: what front ends that ask for it are told of the prefix cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from core_proc.block_hash import SHORT_SIZE
from protos.kv_changes import CachedBlocks, KVChanges

if TYPE_CHECKING:
    from collections.abc import Iterable

    from core_proc.block_pool import BlockPool
    from protos.kv_changes import WatchKV

MAX_TOLD_BLOCKS = 512
"""In one message on demand: 0.15 ms here, and 3 ms of a front end's event loop."""
_NO_PARENT = bytes(SHORT_SIZE)


@dataclass(slots=True)
class _Watch:
    asked: WatchKV
    untold: dict[bytes, bool] = field(default_factory=dict)
    """Whether each of these hashes can be found now. Those that changed last are last."""
    starts_over: bool = False
    """Whatever was told counts no more; `untold` is all that can be found."""
    is_due: bool = True
    """Whether the next message is wanted, if there is something to tell."""
    is_new: bool = True


class KVChangeLog:
    """Of each watch, the hashes whose state it has not been told of since: so what it does not take becomes less, not
    more. Costs nothing while nobody asks."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._watches: dict[tuple[int, int], _Watch] = {}
        """By front end and its number."""

    def begin(self, client: int, asked: WatchKV) -> None:
        """From now on `take` has the changes for this front end's watch."""
        watch = self._watches[client, asked.watch] = _Watch(asked)
        if asked.with_all:
            self._start_over(watch)
        self._pool.on_change = self._changed

    def more(self, client: int, number: int) -> None:
        """The next message of a watch on demand is wanted; nothing if there is no such watch."""
        if (watch := self._watches.get((client, number))) is not None:
            watch.is_due = True

    def end(self, client: int, number: int) -> None:
        """Idempotent."""
        self._watches.pop((client, number), None)
        if not self._watches:
            self._pool.on_change = None

    def forget(self, client: int) -> None:
        """A front end that left."""
        for owner, number in list(self._watches):
            if owner == client:
                self.end(owner, number)

    def take(self, client: int) -> list[KVChanges]:
        """Of each watch, what there is to tell since the last call, if it wants it now."""
        return [
            self._tell(watch)
            for (owner, _), watch in self._watches.items()
            if owner == client and watch.is_due and (watch.is_new or watch.starts_over or watch.untold)
        ]

    def _tell(self, watch: _Watch) -> KVChanges:
        asked = watch.asked
        watch.is_due = not asked.on_demand
        if not self._pool.num_cached:
            watch.untold, watch.starts_over = {}, True
        is_all, watch.starts_over, watch.is_new = watch.starts_over, False, False
        told = watch.untold
        if asked.on_demand and len(told) > MAX_TOLD_BLOCKS:
            told = dict(islice(told.items(), MAX_TOLD_BLOCKS))
            for block_hash in told:
                del watch.untold[block_hash]
        else:
            watch.untold = {}
        stored = [block_hash for block_hash, is_stored in told.items() if is_stored]
        removed = (block_hash for block_hash, is_stored in told.items() if not is_stored)
        return KVChanges(
            _short(stored),
            _short(removed),
            is_all,
            asked.watch,
            None if asked.detail == "hashes" else self._describe(stored, with_tokens=asked.detail == "tokens"),
            has_more=bool(watch.untold),
        )

    def _describe(self, stored: list[bytes], with_tokens: bool) -> CachedBlocks:
        contents = list(map(self._pool.content, stored))
        return CachedBlocks(
            b"".join(_NO_PARENT if content.parent is None else content.parent[:SHORT_SIZE] for content in contents),
            [content.salt for content in contents],
            b"".join(content.token_ids for content in contents) if with_tokens else b"",
            [content.adapter for content in contents],
        )

    def _start_over(self, watch: _Watch) -> None:
        watch.untold = dict.fromkeys(self._pool.cached_hashes, True)
        watch.starts_over = True

    def _changed(self, block_hash: bytes, is_stored: bool) -> None:
        for watch in self._watches.values():
            untold = watch.untold
            untold.pop(block_hash, None)  # to the end
            if is_stored or not watch.starts_over:
                untold[block_hash] = is_stored
            if len(untold) > 2 * self._pool.num_blocks:  # it takes nothing: more than all is not kept for it
                self._start_over(watch)


def _short(hashes: Iterable[bytes]) -> bytes:
    return b"".join(block_hash[:SHORT_SIZE] for block_hash in hashes)
