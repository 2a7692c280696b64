"""What a core tells of its prefix cache: exactly what can be found, whenever it is asked."""

import random

from tests.core_proc.harness import Harness


def short(hashes):
    return {block_hash[:8] for block_hash in hashes}


def pieces(column):
    assert len(column) % 8 == 0
    return {column[start : start + 8] for start in range(0, len(column), 8)}


def test_nothing_is_told_unless_asked():
    harness = Harness()
    harness.add(range(40), 4)
    harness.run_to_end()
    assert harness.kv_cache.changes.take(1) is None


def test_the_first_time_all_is_told():
    harness = Harness()
    harness.add(range(40), 4)
    harness.run_to_end()
    harness.kv_cache.changes.begin(1)
    changes = harness.kv_cache.changes.take(1)
    assert pieces(changes.stored) == short(harness.pool.cached_hashes) != set()
    assert changes.is_all
    assert not changes.removed
    assert harness.kv_cache.changes.take(1) is None


def test_what_is_told_adds_up_to_what_can_be_found_through_evictions_failures_and_resets():
    chance = random.Random(1)
    harness = Harness(num_blocks=24, max_num_seqs=4)
    harness.kv_cache.changes.begin(1)
    told = set()
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
        if chance.random() < 0.5 and (changes := harness.kv_cache.changes.take(1)) is not None:
            stored, removed = pieces(changes.stored), pieces(changes.removed)
            assert not stored & removed
            told = stored if changes.is_all else (told | stored) - removed
            assert told == short(harness.pool.cached_hashes)
    assert told


def test_each_front_end_is_told_at_its_own_pace_and_who_left_is_not():
    harness = Harness()
    changes = harness.kv_cache.changes
    changes.begin(1)
    harness.add(range(40), 4)
    harness.run_to_end()
    changes.begin(2)
    first = changes.take(1)
    assert pieces(first.stored) == pieces(changes.take(2).stored)
    harness.reset()
    assert pieces(changes.take(2).removed) == pieces(first.stored)
    changes.forget(2)
    assert changes.take(2) is None
    assert pieces(changes.take(1).removed) == pieces(first.stored)
    changes.forget(1)
    assert harness.pool.on_change is None


def test_for_one_that_takes_nothing_no_more_is_kept_than_that_it_needs_all():
    harness = Harness(num_blocks=12)
    changes = harness.kv_cache.changes
    changes.begin(1)
    changes.take(1)
    for number in range(40):
        harness.add([number] * 20, 1)
        harness.run_to_end()
        untold = changes._untold[1]
        assert untold is None or len(untold) <= 2 * 12
    told = changes.take(1)
    assert told.is_all
    assert pieces(told.stored) == short(harness.pool.cached_hashes)
