"""What several cores hold and do, told as one."""

import msgspec
import pytest

from async_engine.core_group import _together
from async_engine.stats_table import StatsTable
from protos.messages import NO_STATS, CoreReady


def test_statistics_are_sums_and_kv_use_counts_by_what_each_core_holds():
    first = msgspec.structs.replace(NO_STATS, running=3, waiting=1, kv_usage=0.5, output_tokens=10, queue_seconds=2.0)
    second = msgspec.structs.replace(NO_STATS, running=4, waiting=0, kv_usage=0.1, output_tokens=5, queue_seconds=1.0)
    table = StatsTable([100, 300])
    table.put(0, second)
    table.put(0, first)
    table.put(1, second)
    both = table.sum()
    assert (both.running, both.waiting, both.output_tokens, both.queue_seconds) == (7, 1, 15, 2.0)
    assert both.kv_usage == pytest.approx(0.2)
    alone = StatsTable([100])
    alone.put(0, first)
    assert alone.sum() is first


def test_what_cores_hold_adds_up_but_for_the_context():
    ready = CoreReady(1024, 5000, 16, 8, "float32", "cpu", 100, 200, 5, 8)
    other = msgspec.structs.replace(ready, max_adapters=3, max_adapter_rank=64)
    assert _together([ready, other]) == CoreReady(1024, 10_000, 16, 16, "float32", "cpu", 200, 400, 3, 8)
