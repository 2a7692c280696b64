"""Adapters in the core: slots, who holds one, what requests share, and what becomes of those without one."""

from __future__ import annotations

import pytest

from core_proc.adapters import AdapterTable
from core_proc.engine_core import EngineCore
from core_proc.request import make_request
from gpu_executor.executor import WorkersDiedError
from gpu_executor.uniproc import UniprocExecutor
from protos.adapter import Adapter
from protos.adapter_config import AdapterOptions
from protos.config import CacheOptions, EngineConfig, SchedulerOptions
from protos.errors import AdapterError, AdapterExistsError, AdapterLeavingError, AdapterLimitError
from protos.messages import Adapters, EngineCoreRequest, FinishReason, Sampling, Sibling
from tests.core_proc.harness import Harness, encode_ids
from tests.fakes import PagedFakeWorker, make_adapter

PROMPT = range(12)
"""Three blocks."""


def cached(harness: Harness, **fields: object) -> int:
    """Tokens of the prompt that a request finds."""
    stream = harness.add(PROMPT, 1, **fields)
    harness.run_to_end()
    return stream.admitted[0].cached_tokens


# The table ------------------------------------------------------------------------------------


def put_into(slots: dict[int, str]):
    def put(slot: int, adapter: Adapter) -> None:
        assert slot not in slots
        slots[slot] = adapter.name

    return put


def test_each_adapter_has_a_slot_of_its_own_until_all_are_full() -> None:
    table, slots = AdapterTable(2), {}
    assert table.load(make_adapter("a", 1), put_into(slots))
    assert table.load(make_adapter("b", 2), put_into(slots))
    assert slots == {1: "a", 2: "b"}
    with pytest.raises(AdapterLimitError, match="2 adapters"):
        table.load(make_adapter("c", 3), put_into(slots))
    assert table.close("a", lambda: None)
    (gone,) = table.take_out(-1)
    del slots[gone.slot]
    assert table.load(make_adapter("c", 3), put_into(slots))
    assert slots == {1: "c", 2: "b"}
    assert [adapter.name for adapter in table.told.loaded] == ["b", "c"]


def test_the_same_content_is_there_already_and_other_content_is_refused() -> None:
    table = AdapterTable(2)
    assert table.load(make_adapter("a", 1), put_into({}))
    assert not table.load(Adapter("a", "/elsewhere", make_adapter("a", 1).digest, 8, 1000), put_into({}))
    with pytest.raises(AdapterExistsError, match="adapter a with other weights"):
        table.load(make_adapter("a", 2), put_into({}))


def test_what_cannot_be_loaded_takes_no_slot() -> None:
    def put(slot: int, adapter: Adapter) -> None:
        raise AdapterError("no memory")

    table, slots = AdapterTable(1), {}
    with pytest.raises(AdapterError):
        table.load(make_adapter("a", 1), put)
    assert table.get("a") is None
    assert table.load(make_adapter("b", 2), put_into(slots))
    assert slots == {1: "b"}


def test_one_that_leaves_is_told_and_cannot_be_loaded_again() -> None:
    harness = Harness()
    harness.load_adapter("a", 1)
    harness.add(PROMPT, 20, adapter="a")
    harness.close_adapter("a")
    assert harness.adapters.told.leaving == ["a"]
    with pytest.raises(AdapterLeavingError):
        harness.load_adapter("a", 1)
    harness.run_to_end()
    assert harness.adapters.told == Adapters()


def test_nothing_is_closed_that_is_not_there() -> None:
    assert not AdapterTable(1).close("a", lambda: None)


# Who holds one --------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_an_adapter_goes_when_running_and_waiting_requests_and_steps_in_flight_are_over(depth: int) -> None:
    harness = Harness(max_num_seqs=1, depth=depth)
    harness.load_adapter("a", 1)
    running, waiting = (harness.add(PROMPT, 5, adapter="a") for _ in range(2))
    other = harness.add(PROMPT, 30)
    while not running.token_ids:
        harness.step()
    gone = harness.close_adapter("a")
    while waiting.finished is None:
        assert not gone
        harness.step()
    assert running.reason is FinishReason.MAX_TOKENS
    while other.finished is None:
        harness.step()
    assert gone == ["a"]
    harness.run_to_end()


def test_a_request_that_is_aborted_holds_it_until_its_steps_are_back() -> None:
    harness = Harness(depth=2)
    harness.load_adapter("a", 1)
    stream = harness.add(PROMPT, 20, adapter="a")
    harness.issue()
    harness.issue()
    gone = harness.close_adapter("a")
    harness.abort(stream)
    assert not gone
    harness.land()
    assert not gone, "a step of it is in flight"
    harness.land()
    assert gone == ["a"]


def test_siblings_hold_it_too() -> None:
    harness = Harness(max_num_seqs=2)
    harness.load_adapter("a", 1)
    stream = harness.add(PROMPT, 3, adapter="a", num_sequences=3)
    gone = harness.close_adapter("a")
    while stream.finished is None:
        harness.step()
    assert not gone
    harness.run_to_end()
    assert gone == ["a"]


def test_a_request_that_is_preempted_comes_back_with_it() -> None:
    harness = Harness()
    harness.load_adapter("a", 7)
    stream = harness.add(PROMPT, 6, adapter="a")
    harness.step()
    harness.preempt(stream)
    assert not harness.close_adapter("a")
    harness.run_to_end()
    assert stream.token_ids == stream.expected(6)


# What is shared -------------------------------------------------------------------------------


def test_another_adapter_shares_nothing() -> None:
    harness = Harness()
    harness.load_adapter("a", 1)
    harness.load_adapter("b", 2)
    for name in ("", "a", "b"):
        assert cached(harness, adapter=name) == 0
        assert cached(harness, adapter=name) == 8


def test_an_adapter_that_is_named_like_a_salt_does_not_collide() -> None:
    harness = Harness()
    digest = make_adapter("a", 1).digest
    harness.load_adapter(digest, 1)
    assert cached(harness, cache_salt=digest) == 0
    assert cached(harness, adapter=digest) == 0
    assert cached(harness, cache_salt=digest, adapter=digest) == 0
    assert cached(harness, cache_salt=digest, adapter=digest) == 8


def test_other_weights_under_the_same_name_find_nothing_and_the_same_ones_do() -> None:
    harness = Harness()
    harness.load_adapter("a", 1)
    assert cached(harness, adapter="a") == 0
    assert harness.close_adapter("a") == ["a"]
    harness.load_adapter("a", 2)
    assert cached(harness, adapter="a") == 0
    assert harness.close_adapter("a") == ["a"]
    harness.load_adapter("a", 1)
    assert cached(harness, adapter="a") == 8


def test_without_an_adapter_hashes_are_what_they_were() -> None:
    message = EngineCoreRequest(1, encode_ids(range(16)), Sampling(), 1, cache_salt="s")
    assert make_request(message, 0, 16, 64, 0.0).block_hashes[0].hex() == "e4921894f4841f50e3def05ed1e20d8c"


# The engine -----------------------------------------------------------------------------------

CONFIG = EngineConfig(
    cache=CacheOptions(block_size=4),
    scheduler=SchedulerOptions(max_num_batched_tokens=16),
    adapters=AdapterOptions(max_adapters=3, max_adapter_rank=16),
)


class Engine:
    def __init__(self, worker: PagedFakeWorker | None = None) -> None:
        self.worker = worker or PagedFakeWorker(num_blocks=17, max_model_len=64, budget=16)
        self.core = EngineCore(CONFIG, (), executor=UniprocExecutor(CONFIG, (), self.worker))

    def add(self, handle: int, adapter: str, found_at: str | None = None, **fields: object) -> None:
        """`found_at`: the name that stood for it when it was looked up, if that was before."""
        message = EngineCoreRequest(handle, encode_ids(range(6)), Sampling(), 5, adapter=adapter, **fields)
        held = self.core.adapters.get(adapter)
        self.core.add(make_request(message, 0, 4, 64, 0.0, held))

    def ends(self) -> dict[int, tuple[FinishReason, str]]:
        told = self.core.scheduler.events.take().values()
        return {each.handle: (each.reason, each.field) for outputs in told for each in outputs.finished}


def test_a_request_for_an_adapter_that_is_not_there_fails_with_its_siblings() -> None:
    engine = Engine()
    engine.add(1, "a", siblings=[Sibling(2, 5)])
    assert engine.ends() == dict.fromkeys((1, 2), (FinishReason.NO_ADAPTER, "adapter"))
    assert not engine.core.has_work


def test_a_request_that_comes_behind_the_unloading_fails_though_its_name_is_there_again() -> None:
    engine = Engine()
    engine.core.load_adapter(make_adapter("a", 1))
    message = EngineCoreRequest(1, encode_ids(range(6)), Sampling(), 5, adapter="a")
    late = make_request(message, 0, 4, 64, 0.0, engine.core.adapters.get("a"))
    engine.core.adapters.close("a", lambda: None)
    engine.core.free_adapters()
    engine.core.load_adapter(make_adapter("a", 2))
    engine.core.add(late)
    assert engine.ends() == {1: (FinishReason.NO_ADAPTER, "adapter")}
    engine.add(2, "a")
    while engine.core.step():
        pass
    assert engine.ends() == {2: (FinishReason.MAX_TOKENS, "")}


def test_what_another_core_held_is_loaded_again_as_far_as_it_can_be(caplog: pytest.LogCaptureFixture) -> None:
    class Forgetful(PagedFakeWorker):
        def load_adapter(self, slot: int, adapter: Adapter) -> None:
            if adapter.name == "b":
                raise AdapterError("/adapters/b: no such file")
            super().load_adapter(slot, adapter)

    engine = Engine(Forgetful(num_blocks=17, max_model_len=64, budget=16))
    before = Adapters([make_adapter(name, number) for number, name in enumerate("abc", 1)], ["c"])
    engine.core.load_again(before)
    told = engine.core.adapters.told
    assert [adapter.name for adapter in told.loaded] == ["a", "c"]
    assert told.leaving == ["c"]
    assert "no such file" in caplog.text
    engine.add(1, "c")
    while engine.core.step():
        pass
    assert engine.ends()[1][0] is FinishReason.MAX_TOKENS, "requests of the last core may come back"
    assert not engine.core.free_adapters(), "until it is asked for again"


def test_an_error_of_the_worker_is_the_adapters_but_its_death_is_the_engines() -> None:
    class Broken(PagedFakeWorker):
        error: Exception = MemoryError()

        def load_adapter(self, slot: int, adapter: Adapter) -> None:
            super().load_adapter(slot, adapter)
            raise self.error

    engine = Engine(worker := Broken(num_blocks=17, max_model_len=64, budget=16))
    with pytest.raises(AdapterError, match=r"/adapters/a: .* MemoryError"):
        engine.core.load_adapter(make_adapter("a", 1))
    assert not worker.adapters, "half of it may be there"
    worker.error = WorkersDiedError("gone")
    with pytest.raises(WorkersDiedError):
        engine.core.load_adapter(make_adapter("a", 1))


def test_ready_tells_how_many_there_may_be() -> None:
    ready = Engine().core.ready
    assert (ready.max_adapters, ready.max_adapter_rank) == (3, 16)
