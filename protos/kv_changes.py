"""What a core tells of its prefix cache, to front ends that ask: routers and those who watch."""

from __future__ import annotations

from typing import Literal

import msgspec

ROUTER_WATCH = 0
"""Number of the router's own watch; a front end gives others to those it serves."""

KVDetail = Literal["hashes", "blocks", "tokens"]
"""How much of each block: its hash; what comes before it and whom it is for, too; its tokens, too."""


class WatchKV(msgspec.Struct, frozen=True, tag="watch_kv", array_like=True):
    """Front end to core: from now on outputs carry KVChanges of this watch, as more are asked for, or as they come.

    The first comes at once, and begins with all that is cached, or with nothing.
    """

    watch: int
    detail: KVDetail = "hashes"
    with_all: bool = True
    on_demand: bool = False
    """Only as much as one message holds, then nothing until MoreKV. What happens meanwhile becomes one."""


class MoreKV(msgspec.Struct, frozen=True, tag="more_kv", array_like=True):
    """Front end to core: the next KVChanges of a watch on demand, once there are any."""

    watch: int


class UnwatchKV(msgspec.Struct, frozen=True, tag="unwatch_kv", array_like=True):
    """Front end to core: no more of a watch. Unknown ones do no harm."""

    watch: int


class CachedBlocks(msgspec.Struct, frozen=True, array_like=True):
    """What `KVChanges.stored` are, in columns parallel to it."""

    parents: bytes
    """8 bytes of the hash of the block before, end to end; zeros for the first of a sequence."""
    salts: list[str]
    """Cache salts they were computed under."""
    token_ids: bytes
    """Little-endian int32 of all tokens, end to end; empty unless asked for."""
    adapters: list[str]
    """Names of the adapters they were computed with; empty where that is none."""


class KVChanges(msgspec.Struct, frozen=True, array_like=True):
    """Core to front end: blocks that a prefix cache holds now and did not, and the other way round: the first 8 bytes
    of each one's hash, end to end. A block is in one of the two at most."""

    stored: bytes
    removed: bytes
    is_all: bool = False
    """Whatever was told before counts no more: the cache holds `stored`, and what comes behind it."""
    watch: int = ROUTER_WATCH
    blocks: CachedBlocks | None = None
    has_more: bool = False
    """What is told here is a part, and the rest is there to be asked for."""
