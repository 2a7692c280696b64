"""KvEvents: what is told of prefix caches, as messages for those who watch."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from protos.tailrace.v1 import admin_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterator

    from async_engine.kv_watch import Told
    from protos.kv_changes import KVChanges


class StoredBlock(NamedTuple):
    """A block that a core holds now."""

    block_hash: int
    parent: int | None
    salt: str
    adapter: str
    token_ids: list[int]
    """If they were asked for."""


def stored_blocks(changes: KVChanges) -> Iterator[StoredBlock]:
    blocks = changes.blocks
    assert blocks is not None, "a watch of hashes alone"
    hashes = np.frombuffer(changes.stored, "<u8").tolist()
    parents = np.frombuffer(blocks.parents, "<u8").tolist()
    token_ids = np.frombuffer(blocks.token_ids, "<i4")
    rows = token_ids.reshape(len(hashes), -1).tolist() if hashes else []
    for block_hash, parent, salt, adapter, row in zip(
        hashes, parents, blocks.salts, blocks.adapters, rows, strict=True
    ):
        yield StoredBlock(block_hash, parent or None, salt, adapter, row)


def removed_hashes(changes: KVChanges) -> list[int]:
    hashes: list[int] = np.frombuffer(changes.removed, "<u8").tolist()
    return hashes


def kv_events_response(told: Told, block_size: int) -> pb.WatchKvEventsResponse:
    changes = told.changes
    response = pb.WatchKvEventsResponse(
        data_parallel_rank=told.core,
        sequence_number=told.sequence,
        cleared=changes.is_all,
        removed_block_hashes=removed_hashes(changes),
        has_more=changes.has_more,
        block_size=block_size,
    )
    if changes.stored:
        for block in stored_blocks(changes):
            response.stored_blocks.add(
                block_hash=block.block_hash,
                parent_block_hash=block.parent,
                cache_salt=block.salt,
                token_ids=block.token_ids,
                adapter=block.adapter,
            )
    return response
