"""PrefixMap: who holds which blocks, by what cores tell and what is on its way to them."""

import random

import numpy as np
import pytest

from async_engine.prefix_map import PrefixMap, prefix_hashes
from core_proc.adapters import HeldAdapter
from core_proc.block_hash import request_root
from core_proc.request import make_request
from protos.adapter import Adapter
from protos.kv_changes import KVChanges
from protos.messages import EngineCoreRequest, Sampling


def packed(hashes):
    return np.array(list(hashes), "<u8").tobytes()


def changes(stored=(), removed=()):
    return KVChanges(packed(stored), packed(removed))


@pytest.mark.parametrize("digest", ["", "5a" * 16])
def test_hashes_are_the_cores_own(digest):
    token_ids = np.arange(50, dtype=np.int32)
    message = EngineCoreRequest(1, token_ids.astype("<i4").tobytes(), Sampling(), 8, cache_salt="tenant")
    adapter = HeldAdapter(Adapter("a", "/", digest, 8, 1), 1) if digest else None
    own = make_request(message, 0, 16, 512, 0.0, adapter).block_hashes
    found = prefix_hashes(token_ids, 16, request_root("tenant", digest))
    assert found == [int.from_bytes(each[:8], "little") for each in own]
    assert found != prefix_hashes(token_ids, 16, request_root("other", digest))
    assert found != prefix_hashes(token_ids, 16, request_root("tenant", "a5" * 16))


@pytest.mark.parametrize(("length", "blocks"), [(1, 0), (16, 0), (17, 1), (32, 1), (33, 2)])
def test_the_block_of_the_last_token_is_not_looked_for(length, blocks):
    assert len(prefix_hashes(np.zeros(length, np.int32), 16, b"")) == blocks


def test_a_prompt_is_held_as_far_as_its_first_blocks_are():
    held = PrefixMap(3)
    held.update(0, changes([1, 2, 3]))
    held.update(1, changes([1, 3]))
    assert held.lookup([1, 2, 3, 4]).tolist() == [3, 1, 0]
    held.update(0, changes(removed=[2]))
    assert held.lookup([1, 2, 3]).tolist() == [1, 1, 0]
    held.audit()


def test_what_is_on_its_way_counts_until_it_is_settled_and_what_was_stored_stays():
    held = PrefixMap(2)
    held.expect(1, [1, 2])
    held.expect(1, [1])
    assert held.lookup([1, 2]).tolist() == [0, 2]
    held.update(1, changes([1]))
    held.settle(1, [1, 2])
    assert held.lookup([1, 2]).tolist() == [0, 1]
    held.update(1, changes(removed=[1]))
    assert held.lookup([1]).tolist() == [0, 1], "another request still brings it"
    held.settle(1, [1])
    assert len(held) == 0
    held.audit()


def test_a_core_that_is_gone_holds_nothing():
    held = PrefixMap(2)
    held.update(0, changes([1, 2]))
    held.update(1, changes([1]))
    held.expect(0, [3])
    held.forget(0)
    assert held.lookup([1, 2]).tolist() == [0, 1]
    assert len(held) == 1
    held.audit()


def test_a_core_that_tells_all_it_holds_holds_nothing_else():
    held = PrefixMap(2)
    held.update(0, changes([1, 2]))
    held.update(1, changes([1]))
    held.expect(0, [2])
    held.update(0, KVChanges(packed([3]), b"", is_all=True))
    assert held._stored == [{3}, {1}]
    assert held.lookup([1]).tolist() == [0, 1]
    assert held.lookup([2]).tolist() == [1, 0], "still on its way"
    held.audit()


def test_what_came_and_went_unheard_of_is_no_matter():
    held = PrefixMap(1)
    held.update(0, changes(removed=[5]))
    assert len(held) == 0


@pytest.mark.parametrize("num_cores", [1, 3, 70])
def test_any_calls_leave_what_plain_sets_would(num_cores):
    chance = random.Random(num_cores)
    held = PrefixMap(num_cores)
    stored = [set() for _ in range(num_cores)]
    coming = [[] for _ in range(num_cores)]
    for _ in range(2000):
        core, hashes = chance.randrange(num_cores), [chance.randrange(12) for _ in range(chance.randrange(4))]
        match chance.randrange(8):
            case 0 | 1:
                gone = {chance.randrange(12)} - set(hashes)
                held.update(core, changes(set(hashes), gone))
                stored[core] = (stored[core] | set(hashes)) - gone
            case 2 | 3:
                held.expect(core, hashes)
                coming[core].append(hashes)
            case 4 | 5 | 6 if coming[core]:
                held.settle(core, coming[core].pop(chance.randrange(len(coming[core]))))
            case 7 if chance.random() < 0.1:
                held.forget(core)
                stored[core].clear()
                coming[core].clear()
        held.audit()
        prompt = chance.sample(range(12), 5)
        for number, depth in enumerate(held.lookup(prompt).tolist()):
            known = stored[number].union(*coming[number])
            expected = next((i for i, each in enumerate(prompt) if each not in known), len(prompt))
            assert depth == expected
