"""KvEventStream: the load and, if it may be told, what the prefix cache holds, for subscribers of VllmEngine."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from typing import TYPE_CHECKING, Any

from async_engine.kv_events import removed_hashes, stored_blocks
from protos.compat import smg_common_pb2 as common
from protos.errors import InvalidRequestError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from async_engine.async_llm import AsyncLLM
    from async_engine.kv_watch import KVWatch, Told
    from protos.kv_changes import KVChanges

LOAD_INTERVAL = 1.0
"""Seconds between two records of the load, and over which tokens per second are counted."""


class KvEventStream:
    """One subscriber's batches. `first` is the number of each core's first one with events; until then it is 0."""

    def __init__(self, llm: AsyncLLM, first: int) -> None:
        """Raises InvalidRequestError for a number behind which there is no room to count."""
        if first >= 1 << 63:
            raise InvalidRequestError("start_sequence_number", f"must be less than 2^63, not {first}")
        self._llm = llm
        self._numbers = [itertools.count(first or 1) for _ in llm.cores.slots]
        """Subscribers look for gaps in those of each core."""
        self._sequence = 0
        self._event_ids = itertools.count(1)
        self._samples = itertools.count()
        self._num_tokens, self._counted_at = llm.stats.output_tokens, time.monotonic()
        self._tokens_per_second = 0.0

    async def write(self, context: Any, with_events: bool) -> None:
        """Until the server drains: the load at once and then every LOAD_INTERVAL, and with each batch of events."""
        with contextlib.ExitStack() as stack, contextlib.suppress(UnavailableError):
            watch = None
            if with_events:
                watch = stack.enter_context(self._llm.cores.kv_watches.open("tokens", with_all=True, for_caller=True))
            told = None
            while not self._llm.drained.is_set():
                await context.write(self._batch(told))
                told = await self._next(watch)

    async def _next(self, watch: KVWatch | None) -> Told | None:
        """None where nothing is told for so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOAD_INTERVAL):
                if watch is not None:
                    return await watch.next()
                await self._llm.drained.wait()
        return None

    def _batch(self, told: Told | None) -> common.KvEventBatch:
        batch = common.KvEventBatch(timestamp=time.time(), load=self._load(is_alone=told is None))
        if told is not None:
            self._sequence = next(self._numbers[told.core])
            if len(self._llm.cores.slots) > 1:
                batch.dp_rank = told.core
            batch.events.extend(self._events(told.changes))
        batch.sequence_number = self._sequence
        return batch

    def _events(self, changes: KVChanges) -> Iterator[common.KvCacheEvent]:
        if changes.is_all:
            yield common.KvCacheEvent(event_id=next(self._event_ids), cleared=common.KvCacheCleared())
        if changes.removed:
            removed = common.KvBlocksRemoved(block_hashes=map(_signed, removed_hashes(changes)))
            yield common.KvCacheEvent(event_id=next(self._event_ids), removed=removed)
        for stored in _chains(changes, self._llm.ready.block_size):
            yield common.KvCacheEvent(event_id=next(self._event_ids), stored=stored)

    def _load(self, is_alone: bool) -> common.EngineLoad:
        stats, core, now = self._llm.stats, self._llm.ready, time.monotonic()
        if now - self._counted_at >= LOAD_INTERVAL:
            self._tokens_per_second = (stats.output_tokens - self._num_tokens) / (now - self._counted_at)
            self._num_tokens, self._counted_at = stats.output_tokens, now
        return common.EngineLoad(
            running_requests=stats.running,
            waiting_requests=stats.waiting,
            token_usage=stats.kv_usage,
            gen_throughput=self._tokens_per_second,
            max_running_requests=core.max_num_seqs,
            sample=next(self._samples),
            load_only=is_alone,
            cache_hit_rate=hit_rate(self._llm),
            num_used_tokens=int(stats.kv_usage * core.kv_capacity_tokens),
            max_total_num_tokens=core.kv_capacity_tokens,
            engine_silence_ms=int(self._llm.cores.silent_seconds * 1000),
        )


def hit_rate(llm: AsyncLLM) -> float:
    """Of prompt tokens, since start."""
    return llm.stats.prefix_hits / llm.stats.prefix_queries if llm.stats.prefix_queries else 0.0


def _chains(changes: KVChanges, block_size: int) -> Iterator[common.KvBlocksStored]:
    """Stored blocks, those together that follow one another."""
    stored, last = common.KvBlocksStored(), None
    for block in stored_blocks(changes) if changes.stored else ():
        if block.parent is None or block.parent != last:
            if stored.blocks:
                yield stored
            stored = common.KvBlocksStored(
                parent_block_hash=None if block.parent is None else _signed(block.parent),
                cache_salt=block.salt or None,
                lora_name=block.adapter or None,
            )
        stored.blocks.add(block_hash=_signed(block.block_hash), token_ids=block.token_ids, block_size=block_size)
        last = block.block_hash
    if stored.blocks:
        yield stored


def _signed(block_hash: int) -> int:
    """The same 64 bits."""
    return block_hash - (1 << 64) if block_hash >> 63 else block_hash
