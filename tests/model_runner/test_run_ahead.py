"""A real model with steps in flight, on a thread: what comes out is what one step at a time brings."""

from __future__ import annotations

import random
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from core_proc.request import State
from protos.config import EngineConfig, build
from protos.messages import FinishReason
from tests.fakes import VOCAB_SIZE, ScriptedMatcher
from tests.model_runner.apart import apart
from tests.model_runner.recording import RecordingBackend
from tests.model_runner.staged import Engine
from tests.model_runner.tiny import make_runner, save_shape
from tests.model_runner.watched import WatchedExecutor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from core_proc.request import Request
    from kernels.ops import Ops
    from protos.step import WorkerInfo

    MakeEngine = Callable[..., Engine]

NUM_REQUESTS = 14
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shape")
    save_shape(path, vocab_size=VOCAB_SIZE, num_hidden_layers=2)
    return path


class OneWorker:
    """A runner; if the test says so on a device with memory of its own, with graphs, and with `ops`."""

    def __init__(self, directory: Path, config: EngineConfig, like_gpu: bool, ops: Ops | None) -> None:
        self._directory = directory

        def change(policy: Any) -> Any:
            if not like_gpu:
                return policy
            # The interpreter takes seconds for all sizes.
            backend = RecordingBackend(num_sizes=1 if ops else 8)
            return replace(apart(policy), ops=ops or policy.ops, graphs=lambda: backend)

        self._runner = make_runner(directory, config, change=change)
        self.execute, self.sample = self._runner.execute, self._runner.sample

    def load(self, report: Callable[[int, int], None]) -> WorkerInfo:
        return self._runner.load(self._directory, report)


@pytest.fixture
def make(directory: Path) -> Iterator[MakeEngine]:
    started: list[Engine] = []

    def make(depth: int, like_gpu: bool = False, ops: Ops | None = None) -> Engine:
        started.append(make_engine(directory, depth, like_gpu, ops))
        return started[-1]

    yield make
    for engine in started:
        engine.core.shutdown()


def make_engine(directory: Path, depth: int, like_gpu: bool = False, ops: Ops | None = None) -> Engine:
    config = build(
        EngineConfig,
        model=str(directory),
        load_format="dummy",
        device="cpu",
        dtype="float32",
        num_threads=1,
        max_num_seqs=6,
        num_kv_blocks=24,
        max_num_batched_tokens=32,
        max_model_len=128,
        max_steps_in_flight=depth,
        # Pieces of prompts whose sizes depend on no clock: what befalls whom is the same in each run.
        max_inter_token_gap=3600,
    )
    return Engine(directory, config, executor=WatchedExecutor(config, OneWorker(directory, config, like_gpu, ops)))


def add(engine: Engine, number: int) -> int:
    """The number-th request: greedy, seeded or with a grammar; some share a prefix of whole blocks."""
    shared = list(range(40, 72)) if number % 3 == 0 else []
    prompt = [*shared, *(10 + (number * 7 + place) % 90 for place in range(1 + 9 * (number % 4)))]
    matcher = ScriptedMatcher(number, 15) if number % 5 == 4 else None
    sampling = {"temperature": 1.0, "seed": number} if number % 2 else {"frequency_penalty": 0.5}
    return engine.add(prompt, MAX_TOKENS - number, matcher, **sampling)


@pytest.fixture(scope="module")
def expected(directory: Path) -> list[list[int]]:
    """Of each request, alone in its engine."""
    engine = make_engine(directory, 1)
    for number in range(NUM_REQUESTS):
        add(engine, number)
        engine.run()
    assert len({tuple(tokens) for tokens in engine.tokens.values()}) == NUM_REQUESTS
    return list(engine.tokens.values())


def test_what_is_reported_waits_with_the_tokens_and_is_the_same(make: MakeEngine):
    told = []
    for depth, like_gpu in ((1, False), (2, True), (3, True)):
        engine = make(depth, like_gpu)
        for number in range(6):
            engine.add(
                range(10 + number, 30 + 3 * number), 12, logprobs=number, prompt_logprobs=number, temperature=0.5
            )
        engine.run()
        told.append(engine.tokens)
        logprobs = np.concatenate([np.frombuffer(part, "<f4") for part in sorted(engine.logprobs)])
        assert len(logprobs) == sum(19 + 2 * number + 12 for number in range(6))
        told.append(np.sort(logprobs).round(3).tolist())
    assert told[0] == told[2] == told[4]
    assert told[1] == told[3] == told[5]


def running(engine: Engine) -> list[Request]:
    return engine.scheduler.table.running()


@pytest.mark.parametrize("like_gpu", [False, True], ids=["in place", "like a GPU"])
@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("seed", range(6))
def test_25_27_tokens_come_once_and_in_order_whatever_befalls_the_others(
    seed: int, depth: int, like_gpu: bool, make: MakeEngine, expected: list[list[int]]
):
    engine, chance = make(depth, like_gpu), random.Random(seed)
    given_up: set[int] = set()
    befell = {"preempt": 0, "abort": 0, "reset": 0}
    while engine.core.has_work or len(engine.tokens) < NUM_REQUESTS:
        if len(engine.tokens) < NUM_REQUESTS and chance.random() < 0.3:
            add(engine, len(engine.tokens))
        engine.step()
        what = chance.choices([None, "preempt", "abort", "reset"], [20, 3, 1, 1])[0]
        rows = running(engine)
        if what is None or not rows:
            continue
        chosen = chance.choice(rows)
        befell[what] += 1
        if what == "preempt":
            engine.scheduler.table.preempt(chosen)
        elif what == "reset":
            assert engine.scheduler.reset_prefix_cache(preempt_running=True)
        elif len(given_up) < 4:
            given_up.add(chosen.handle)
            engine.scheduler.abort(0, [chosen.handle])
    engine.step()  # the last one may have been given up: its end is still to be taken
    engine.scheduler.table.audit()
    assert engine.executor.most_in_flight == depth
    assert all(befell.values())
    for handle, tokens in engine.tokens.items():
        if handle in given_up:
            assert tokens == expected[handle][: len(tokens)]
            assert engine.ends[handle] is FinishReason.ABORTED
        else:
            assert tokens == expected[handle]


@pytest.mark.skipif(find_spec("triton") is None, reason="its kernels are Triton's")
def test_25_with_the_kernels_of_gpus_too(make: MakeEngine, expected: list[list[int]]):
    """In the interpreter: one of them starts when another decodes, and one is preempted with a step in flight."""
    from tests.kernels.interpreted import Gpu, cuda_ops

    engine = make(2, True, cuda_ops(Gpu(capability=90, num_sms=4)))
    first = add(engine, 2)
    while len(engine.tokens[first]) < 2:
        engine.step()
    second = add(engine, 1)
    engine.scheduler.table.preempt(running(engine)[0])
    while len(engine.tokens[second]) < 3:
        engine.step()
    assert engine.tokens == {first: expected[2][: len(engine.tokens[first])], second: expected[1][:3]}
    assert len(engine.tokens[first]) > 2


def test_26_no_step_is_issued_for_a_request_that_is_certain_to_end(make: MakeEngine, expected: list[list[int]]):
    engine = make(2)
    for number in (1, 2, 5, 7):
        add(engine, number)
    engine.run()
    prompts = sum(1 + 9 * (number % 4) for number in (1, 2, 5, 7))
    assert engine.executor.num_computed == prompts + sum(MAX_TOKENS - number - 1 for number in (1, 2, 5, 7))
    assert list(engine.tokens.values()) == [expected[number] for number in (1, 2, 5, 7)]


def test_28_a_token_in_flight_is_delivered_after_a_preemption_and_counted_once(
    make: MakeEngine, expected: list[list[int]]
):
    engine = make(2)
    handle = add(engine, 0)
    while len(engine.tokens[handle]) < 3:
        engine.step()
    (request,) = running(engine)
    assert engine.core.num_steps_in_flight == 1
    engine.scheduler.table.preempt(request)
    assert request.state is State.WAITING
    engine.step()
    assert engine.tokens[handle] == expected[0][:4]
    engine.run()
    assert engine.tokens[handle] == expected[0]


def test_29_tokens_in_flight_at_a_reset_are_dropped_and_drawn_again(make: MakeEngine, expected: list[list[int]]):
    engine = make(2)
    handle = add(engine, 0)
    while len(engine.tokens[handle]) < 3:
        engine.step()
    assert engine.scheduler.reset_prefix_cache(preempt_running=True)
    engine.step()
    assert engine.tokens[handle] == expected[0][:3]
    assert not engine.scheduler.kv_cache.pool._block_of
    engine.run()
    assert engine.tokens[handle] == expected[0]
    assert engine.scheduler.stats(0).prefix_hits == 0


def test_30_a_result_that_is_out_of_place_ends_its_request_alone(make: MakeEngine, expected: list[list[int]]):
    engine = make(2)
    handles = [add(engine, number) for number in range(3)]
    while not all(engine.tokens[handle] for handle in handles):
        engine.step()
    assert engine.core.num_steps_in_flight == 1
    bad = next(request for request in running(engine) if request.handle == handles[1])
    engine.scheduler.table.rows.known[bad.row] += 1
    engine.run()
    assert engine.ends[handles[1]] is FinishReason.ERROR
    assert [engine.tokens[handle] for handle in (0, 2)] == [expected[0], expected[2]]


def test_31_a_grammar_sees_each_token_before_the_next_is_drawn_and_its_mates_do_not_wait(
    make: MakeEngine, expected: list[list[int]]
):
    """Those are in every step, it is in every other one."""
    engine = make(2)
    constrained, mate = add(engine, 4), add(engine, 1)
    engine.run()
    assert engine.tokens == {constrained: expected[4], mate: expected[1]}
    assert len(expected[4]) == 15
    matcher = ScriptedMatcher(4, 15)
    assert all(matcher.accept(token_id) for token_id in engine.tokens[constrained])
    assert engine.executor.most_in_flight == 2
