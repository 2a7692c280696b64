"""The free queue, the map of what is cached, and the changes it tells."""

from __future__ import annotations

import random

import pytest

from core_proc.block_pool import BlockContent, BlockPool

CONTENT = BlockContent(None, "", b"")


def take_all(pool: BlockPool) -> list[int]:
    return [pool.take() for _ in range(pool.num_free)]


def published(pool: BlockPool, *names: str) -> list[int]:
    """Blocks that were published under these names, held."""
    blocks = [pool.take() for _ in names]
    for block, name in zip(blocks, names, strict=True):
        assert pool.publish(block, name.encode(), CONTENT)
    return blocks


def test_null_block_is_never_handed_out() -> None:
    pool = BlockPool(5)
    assert sorted(take_all(pool)) == [1, 2, 3, 4]
    assert (pool.num_free, pool.usage) == (0, 1.0)
    with pytest.raises(KeyError):
        pool.take()


def test_empty_blocks_are_taken_first_then_the_least_recently_released() -> None:
    pool = BlockPool(8)
    a, b, c = published(pool, "a", "b", "c")
    empty = pool.take()
    pool.release([b])
    pool.release([c, a])
    pool.release([empty])
    untouched = [5, 6, 7]
    assert take_all(pool) == [empty, *untouched, b, c, a]


def test_block_released_earlier_in_one_call_is_evicted_earlier() -> None:
    pool = BlockPool(4)
    head, middle, tail = published(pool, "head", "middle", "tail")
    pool.release([tail, middle, head])
    assert take_all(pool) == [tail, middle, head]


def test_holding_a_cached_block_takes_it_out_of_the_free_queue() -> None:
    pool = BlockPool(3)
    a, b = published(pool, "a", "b")
    pool.release([a, b])
    pool.hold(a)
    assert take_all(pool) == [b]
    pool.release([a])
    assert pool.cached(b"a") == a, "released, it is cached again"


def test_block_stays_held_until_its_last_holder_lets_go() -> None:
    pool = BlockPool(2)
    (a,) = published(pool, "a")
    pool.hold(a)
    pool.release([a])
    assert pool.is_held(a)
    pool.release([a])
    assert not pool.is_held(a)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release([a])


def test_taken_block_is_no_longer_found() -> None:
    pool = BlockPool(2)
    (a,) = published(pool, "a")
    pool.release([a])
    assert pool.take() == a
    assert pool.cached(b"a") is None


def test_second_block_with_the_same_content_stays_uncached() -> None:
    pool = BlockPool(4)
    (first,) = published(pool, "a")
    second = pool.take()
    assert not pool.publish(second, b"a", CONTENT)
    pool.release([first, second])
    assert pool.cached(b"a") == first
    assert take_all(pool) == [second, 3, first]


def test_withdrawn_block_is_not_found_and_goes_to_the_front_once_free() -> None:
    pool = BlockPool(5)
    a, b = published(pool, "a", "b")
    pool.withdraw(a)
    assert pool.cached(b"a") is None
    pool.release([b, a])
    assert next(iter(pool._free)) == a
    pool.withdraw(b)
    assert next(iter(pool._free)) == b


def test_reset_is_refused_while_a_block_is_held() -> None:
    pool = BlockPool(3)
    a, b = published(pool, "a", "b")
    pool.release([a])
    assert not pool.reset()
    assert pool.cached(b"a") == a
    pool.release([b])
    assert pool.reset()
    assert pool.cached(b"a") is pool.cached(b"b") is None


def test_forgetting_all_leaves_held_blocks_to_their_holders() -> None:
    pool = BlockPool(3)
    a, b = published(pool, "a", "b")
    pool.release([b])
    pool.forget_all()
    assert pool.cached(b"a") is None
    pool.audit({a: 1})


@pytest.mark.parametrize("holders", [{}, {1: 2}, {1: 1, 2: 1}], ids=["too few", "too many", "another block"])
def test_audit_finds_a_wrong_count(holders: dict[int, int]) -> None:
    pool = BlockPool(4)
    pool.take()
    with pytest.raises(AssertionError):
        pool.audit(holders)


@pytest.mark.parametrize("seed", range(5))
def test_replayed_changes_give_exactly_the_live_map(seed: int) -> None:
    live: set[bytes] = set()

    def replay(block_hash: bytes, is_stored: bool) -> None:
        if is_stored:
            assert block_hash not in live
            live.add(block_hash)
        else:
            live.remove(block_hash)

    rng = random.Random(seed)
    pool = BlockPool(12, on_change=replay)
    held: list[int] = []
    names = [bytes([n]) for n in range(20)]
    for _ in range(2000):
        match rng.randrange(20):
            case 0 | 1 | 2 | 3 | 4 | 5 if pool.num_free:
                held.append(pool.take())
            case 6 | 7 | 8 | 9 if held:
                block = rng.choice(held)
                if pool._hash_of[block] is None:
                    pool.publish(block, rng.choice(names), CONTENT)
            case 10 | 11 | 12 if (hit := pool.cached(rng.choice(names))) is not None:
                pool.hold(hit)
                held.append(hit)
            case 13 | 14 | 15 | 16 | 17 if held:
                pool.release([held.pop(rng.randrange(len(held)))])
            case 18 if (hit := pool.cached(rng.choice(names))) is not None:
                pool.withdraw(hit)
            case 19 if rng.random() < 0.2 and not pool.reset():
                pool.forget_all()
        assert live == {name for name in names if pool.cached(name) is not None}, f"seed {seed}"
        pool.audit({block: held.count(block) for block in held})
