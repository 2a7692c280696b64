"""What a core tells of its prefix cache: exactly what can be found, whenever it is asked."""

import random

import numpy as np
import pytest

from core_proc import kv_change_log
from core_proc.block_hash import chain_root, extend_chain
from protos.kv_changes import ROUTER_WATCH, WatchKV
from tests.core_proc.harness import Harness

ROUTER = WatchKV(ROUTER_WATCH)


def short(hashes):
    return {block_hash[:8] for block_hash in hashes}


def pieces(column):
    assert len(column) % 8 == 0
    return {column[start : start + 8] for start in range(0, len(column), 8)}


def take(changes, client=1):
    """Of the only watch; None if it is told nothing."""
    told = changes.take(client)
    assert len(told) < 2
    return told[0] if told else None


class Follower:
    """What one who watches takes to be in the cache."""

    def __init__(self):
        self.held = set()

    def hear(self, told):
        stored, removed = pieces(told.stored), pieces(told.removed)
        assert not stored & removed
        self.held = (set() if told.is_all else self.held - removed) | stored


def test_nothing_is_told_unless_asked():
    harness = Harness()
    harness.add(range(40), 4)
    harness.run_to_end()
    assert harness.kv_cache.changes.take(1) == []
    assert harness.pool.on_change is None


def test_the_first_time_all_is_told():
    harness = Harness()
    harness.add(range(40), 4)
    harness.run_to_end()
    harness.kv_cache.changes.begin(1, ROUTER)
    changes = take(harness.kv_cache.changes)
    assert pieces(changes.stored) == short(harness.pool.cached_hashes) != set()
    assert changes.is_all
    assert not changes.removed
    assert changes.blocks is None
    assert take(harness.kv_cache.changes) is None


def test_or_nothing_at_once_and_what_comes_from_then_on():
    harness = Harness()
    harness.add(range(40), 4)
    harness.run_to_end()
    harness.kv_cache.changes.begin(1, WatchKV(5, with_all=False))
    first = take(harness.kv_cache.changes)
    assert (first.stored, first.removed, first.is_all, first.watch) == (b"", b"", False, 5)
    before = short(harness.pool.cached_hashes)
    harness.add(range(50, 90), 4)
    harness.run_to_end()
    assert pieces(take(harness.kv_cache.changes).stored) == short(harness.pool.cached_hashes) - before != set()


@pytest.mark.parametrize("on_demand", [False, True])
def test_what_is_told_adds_up_to_what_can_be_found_through_evictions_failures_and_resets(on_demand, monkeypatch):
    monkeypatch.setattr(kv_change_log, "MAX_TOLD_BLOCKS", 3)
    chance = random.Random(1)
    harness = Harness(num_blocks=24, max_num_seqs=4)
    changes, follower = harness.kv_cache.changes, Follower()
    changes.begin(1, WatchKV(7, "tokens", on_demand=on_demand))
    num_told = num_parts = 0
    for turn in range(150):
        if len(harness.live) < 6:
            start = chance.randrange(4)
            harness.add([start] * chance.randrange(1, 30) + [turn], chance.randrange(1, 6))
        if not harness.in_flight:
            harness.issue()
        if harness.in_flight:
            harness.land(fail=chance.random() < 0.05)
        if turn % 40 == 39:
            harness.scheduler.reset_prefix_cache(preempt_running=True)
        has_more = chance.random() < 0.5
        while has_more and (told := take(changes)) is not None:
            assert told.watch == 7
            follower.hear(told)
            num_told += 1
            num_parts += told.has_more
            has_more = told.has_more
            if on_demand:
                assert len(told.stored) + len(told.removed) <= 3 * 8
                assert take(changes) is None, "it was not asked for"
                changes.more(1, 7)
            if not has_more:
                assert follower.held == short(harness.pool.cached_hashes)
    assert num_told > 30
    assert (num_parts > 0) is on_demand


def test_each_front_end_is_told_at_its_own_pace_and_who_left_is_not():
    harness = Harness()
    changes = harness.kv_cache.changes
    changes.begin(1, ROUTER)
    harness.add(range(40), 4)
    harness.run_to_end()
    changes.begin(2, ROUTER)
    changes.begin(2, WatchKV(1))
    first = take(changes)
    assert [pieces(told.stored) for told in changes.take(2)] == [pieces(first.stored)] * 2
    harness.add(range(50, 90), 4)
    harness.run_to_end()
    assert [told.watch for told in changes.take(2)] == [ROUTER_WATCH, 1]
    changes.end(2, 1)
    changes.end(2, 1)
    harness.reset()
    assert [told.watch for told in changes.take(2)] == [ROUTER_WATCH]
    changes.forget(2)
    assert changes.take(2) == []
    assert take(changes).is_all
    changes.forget(1)
    assert harness.pool.on_change is None


def test_a_cache_that_was_reset_is_told_so_in_one_word():
    harness = Harness()
    changes = harness.kv_cache.changes
    changes.begin(1, ROUTER)
    harness.add(range(40), 4)
    harness.run_to_end()
    take(changes)
    harness.reset()
    told = take(changes)
    assert (told.is_all, told.stored, told.removed) == (True, b"", b"")
    assert take(changes) is None


def test_for_one_that_takes_nothing_no_more_is_kept_than_that_it_needs_all():
    harness = Harness(num_blocks=12)
    changes = harness.kv_cache.changes
    changes.begin(1, WatchKV(3, on_demand=True))
    take(changes)
    for number in range(40):
        harness.add([number] * 20, 1)
        harness.run_to_end()
        assert take(changes) is None
        (watch,) = changes._watches.values()
        assert len(watch.untold) <= 2 * 12
    changes.more(1, 3)
    told = take(changes)
    assert told.is_all
    assert pieces(told.stored) == short(harness.pool.cached_hashes)
    assert not told.removed


@pytest.mark.parametrize("detail", ["blocks", "tokens"])
def test_blocks_tell_what_they_hold_also_to_who_comes_later(detail):
    harness = Harness()
    size = harness.kv_cache.block_size
    prompts = {"": [3] * (3 * size + 1), "tenant": list(range(2 * size + 1))}
    for salt, prompt in prompts.items():
        harness.add(prompt, 1, cache_salt=salt)
    harness.run_to_end()
    harness.kv_cache.changes.begin(1, WatchKV(1, detail))
    told = take(harness.kv_cache.changes)
    hashes = [told.stored[start : start + 8] for start in range(0, len(told.stored), 8)]
    parents = [told.blocks.parents[start : start + 8] for start in range(0, len(told.blocks.parents), 8)]
    tokens = np.frombuffer(told.blocks.token_ids, "<i4").reshape(-1, size).tolist() or [None] * len(hashes)
    expected = {}
    for salt, prompt in prompts.items():
        chain = []
        extend_chain(chain, chain_root([("salt", salt)]), np.array(prompt, np.int32), size)
        for index, block_hash in enumerate(chain):
            held = prompt[index * size : (index + 1) * size] if detail == "tokens" else None
            expected[block_hash[:8]] = (chain[index - 1][:8] if index else bytes(8), salt, held)
    assert dict(zip(hashes, zip(parents, told.blocks.salts, tokens, strict=True), strict=True)) == expected
    assert len(expected) == 5
