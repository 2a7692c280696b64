"""Several cores against one that has as much of everything, in simulated time: what routing loses, and gains."""

import pytest

from tests.bench.fleet import Fleet
from tests.bench.fleet_load import Load
from tests.core_proc.harness import ManualClock
from tests.core_proc.plant import Plant

LOAD = Load(rate=180, seconds=10, groups=48)
"""Prefixes of 1024 tokens, 48 of them: half of what four caches hold together, twice what one of them does."""
CORES = 4


def run(num_cores, route=None):
    """The same cache, rows, budget and speed in all, spread over so many cores."""
    share = CORES // num_cores

    def make_plant(clock):
        return Plant(
            num_rows=32 * share,
            budget=512 * share,
            clock=clock,
            step_seconds=lambda step: 2e-3 + 20e-6 / share * (step.num_tokens + len(step.rows)),
            max_model_len=2048,
            num_blocks=1 + 1536 * share,
        )

    fleet = Fleet(num_cores, make_plant, ManualClock(), warm_up=3.0, route=route)
    fleet.run(LOAD.visits())
    assert fleet.times.refused == 0
    return fleet


@pytest.fixture(scope="module")
def single():
    return run(1).results()


def test_four_cores_find_what_one_would_and_share_the_work(single):
    fleet = run(CORES)
    results = fleet.results()
    assert results.hit_rate > 0.95 * single.hit_rate
    assert results.imbalance < 0.1
    assert results.row_imbalance < 0.1
    fleet.router.map.audit()
    assert fleet.router._sequences.tolist() == [0] * CORES
    held = [
        {int.from_bytes(each[:8], "little") for each in core.plant.scheduler.kv_cache.pool.cached_hashes}
        for core in fleet.cores
    ]
    assert fleet.router.map._stored == held


def test_turns_would_lose_half_of_it(single):
    """That the load can tell a router from none."""
    assert run(CORES, route=lambda number: number % CORES).results().hit_rate < 0.6 * single.hit_rate
