"""Stages without a model, in time that passes only when somebody waits: how busy the core keeps them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from core_proc.engine_core import EngineCore
from core_proc.request import make_request
from gpu_executor.factory import make_executor
from gpu_executor.null_pipeline import NullPipeline
from protos.config import EngineConfig, build
from protos.messages import EngineCoreRequest, Sampling
from tests.core_proc.harness import ManualClock, columns, encode_ids

if TYPE_CHECKING:
    from collections.abc import Sequence

MODEL_SECONDS = 60.0
"""Of a step through all stages; nobody could wait so long in earnest."""


class Pipeline:
    """An EngineCore over stages that share MODEL_SECONDS evenly."""

    def __init__(self, num_stages: int, **options: int) -> None:
        config = build(
            EngineConfig,
            model="null",
            num_kv_blocks=2000,
            max_model_len=1024,
            pipeline_parallel_size=num_stages,
            null_step_ms=MODEL_SECONDS / num_stages * 1e3,
            **options,
        )
        self.clock = ManualClock()
        self.executor = NullPipeline(config, self.clock, self._sleep)
        self.core = EngineCore(config, (), executor=self.executor)
        self.tokens: dict[int, list[int]] = {}

    def _sleep(self, seconds: float) -> None:
        self.clock.now += seconds

    def add(self, handle: int, prompt: Sequence[int], max_tokens: int) -> None:
        self.tokens[handle] = []
        message = EngineCoreRequest(handle, encode_ids(prompt), Sampling(ignore_eos=True), max_tokens)
        self.core.scheduler.add(make_request(message, 0, 16, 1024, 0.0))

    def step(self) -> int:
        """The number of tokens it brought."""
        self.core.step()
        drawn = [pair for outputs in self.core.scheduler.events.take().values() for pair in columns(outputs)]
        for handle, token_id in drawn:
            self.tokens[handle].append(token_id)
        return len(drawn)

    def tokens_per_second(self, rounds: int = 20) -> float:
        """After a while, over so many times that a step takes through all stages."""
        until, tokens = self.clock.now + 2 * MODEL_SECONDS, 0
        while self.clock.now < until:
            self.step()
        start, until = self.clock.now, self.clock.now + rounds * MODEL_SECONDS
        while self.clock.now < until:
            tokens += self.step()
        return tokens / (self.clock.now - start)


@pytest.mark.parametrize("num_stages", [2, 4])
def test_stages_of_equal_time_do_the_work_of_as_many_devices(num_stages: int) -> None:
    """As many requests at once per stage as one device that holds all of the model has."""
    rates = []
    for stages in (1, num_stages):
        pipeline = Pipeline(stages, max_num_seqs=8 * stages)
        for handle in range(8 * stages):
            pipeline.add(handle, [handle] * 8, 200)
        rates.append(pipeline.tokens_per_second())
    assert rates[1] / rates[0] > 0.9 * num_stages


def test_so_do_they_where_requests_come_and_go() -> None:
    rates = []
    for stages in (1, 2):
        pipeline = Pipeline(stages, max_num_seqs=8 * stages)
        for handle in range(300):
            pipeline.add(handle, [handle] * (1 + handle % 40), 1 + handle % 17)
        rates.append(pipeline.tokens_per_second())
    assert rates[1] / rates[0] > 1.8


def test_chunks_of_a_long_prompt_are_in_all_stages_at_once() -> None:
    """Of a device that holds all the stages, a step takes the budget; of four, each has its chunk."""
    seconds = []
    for stages in (1, 4):
        pipeline = Pipeline(stages, max_num_batched_tokens=100)
        pipeline.add(1, [1] * 1000, 1)
        while not pipeline.step():
            pass
        seconds.append(pipeline.clock.now)
    assert seconds[0] == pytest.approx(10 * MODEL_SECONDS)
    assert seconds[1] == pytest.approx(13 / 4 * MODEL_SECONDS)


def test_a_token_takes_as_long_as_through_one_device() -> None:
    pipeline = Pipeline(4)
    pipeline.add(1, [1, 2, 3], 5)
    while pipeline.core.has_work:
        pipeline.step()
    assert pipeline.clock.now == pytest.approx(5 * MODEL_SECONDS)


def test_tokens_are_those_of_one_stage() -> None:
    outputs = []
    for stages in (1, 3):
        pipeline = Pipeline(stages, max_num_seqs=7)
        for handle in range(12):
            pipeline.add(handle, range(handle, 2 * handle + 1), 9)
        while pipeline.core.has_work:
            pipeline.step()
        outputs.append(pipeline.tokens)
    assert outputs[0] == outputs[1]
    assert {len(tokens) for tokens in outputs[0].values()} == {9}


def test_fewer_steps_in_flight_can_be_asked_for() -> None:
    pipeline = Pipeline(4, max_steps_in_flight=2)
    for handle in range(8):
        pipeline.add(handle, [handle], 50)
    in_flight = set()
    for _ in range(40):
        pipeline.step()
        in_flight.add(pipeline.core.num_steps_in_flight)
    assert max(in_flight) <= 2


def test_the_null_model_has_its_stages_in_the_core() -> None:
    executor = make_executor(build(EngineConfig, model="null", pipeline_parallel_size=3), ())
    assert isinstance(executor, NullPipeline)
    info = executor.start(lambda done, total: None, lambda error: None)
    assert (info.num_stages, info.max_steps_in_flight) == (3, 3)
    executor.shutdown()
