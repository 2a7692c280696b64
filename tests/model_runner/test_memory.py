"""What of a GPU's memory the KV cache gets: arithmetic, with made-up numbers; the step and the graphs it is measured
by; and what is told where too little is left."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from model_runner.graph_backend import padded_sizes
from model_runner.largest_step import largest_step
from model_runner.memory import GIB, MemoryPlan
from protos.config import MIB, EngineConfig, build
from protos.errors import InvalidRequestError, StartupError
from tests.model_runner.apart import apart
from tests.model_runner.driver import Driver
from tests.model_runner.recording import RecordingBackend
from tests.model_runner.tiny import make_runner, save_shape

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from model_runner.device import DevicePolicy
    from model_runner.runner import ModelRunner
    from protos.step import WorkerInfo

BLOCK_BYTES = 3 * 2 * 2 * 16 * 16 * 4
"""Layers, keys and values, heads, dimensions, tokens, float32: 12 KiB."""


def test_what_is_left():
    plan = MemoryPlan(80 * GIB, 0.9, used=20 * GIB, step=3 * GIB, graphs=GIB)
    assert plan.cache == 48 * GIB
    assert replace(plan, used=75 * GIB).cache == 0
    assert replace(plan, utilization=1.0).cache == 56 * GIB
    assert str(plan) == (
        "of 80.00 GiB 90% may be used: 20.00 used by weights and others, 3.00 for a step, 1.00 for graphs"
    )


@pytest.mark.parametrize(
    ("num_bytes", "share"),
    [(48 * GIB, 0.9), (48 * GIB + 1, 0.91), (54 * GIB, 0.98), (55 * GIB, None)],
    ids=["as it is", "a little more", "most", "too much"],
)
def test_the_share_that_would_do(num_bytes: int, share: float | None):
    plan = MemoryPlan(80 * GIB, 0.5, used=20 * GIB, step=3 * GIB, graphs=GIB)
    assert plan.utilization_for(num_bytes) == share
    if share is not None:
        assert replace(plan, utilization=share).cache >= num_bytes


@pytest.mark.parametrize(("num_rows", "num_tokens", "max_model_len"), [(8, 100, 512), (8, 5, 512), (3, 2048, 20)])
def test_the_largest_step_has_all_tokens_in_all_rows_and_its_keys_in_no_block(
    num_rows: int, num_tokens: int, max_model_len: int
):
    step = largest_step(num_rows, num_tokens, max_model_len, 16)
    assert step.num_tokens == min(num_tokens, num_rows * max_model_len)
    assert len(step.rows) == min(num_rows, num_tokens)
    assert step.samples.all()
    assert step.counts.max() <= max_model_len
    assert [new_row.sampling.temperature for new_row in step.new_rows] == [0.0, *[1.0] * (len(step.rows) - 1)]
    for new_row, count in zip(step.new_rows, step.counts.tolist(), strict=True):
        assert len(new_row.token_ids) == count
        assert new_row.block_ids == [0] * -(-count // 16)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shape")
    save_shape(path)
    return path


@dataclass
class FakeMemory:
    """A device of `total` bytes, of which `before` are used at first; the model takes `weights`, each recorded step
    `graph` and a step that runs `step`."""

    total: int
    backend: RecordingBackend
    before: int = 0
    weights: int = 0
    graph: int = 0
    step: int = 0
    num_looks: int = 0
    tokens: list[int] = field(default_factory=list)
    """Of each step that ran to be measured."""

    def used(self) -> tuple[int, int]:
        self.num_looks += 1
        weights = self.weights if self.num_looks > 1 else 0
        return self.before + weights + self.graph * len(self.backend.captured), self.total

    def peak(self, run: Callable[[], None]) -> int:
        run()
        return self.step


def make(directory: Path, memory: FakeMemory, **options: Any) -> ModelRunner:
    given: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "dtype": "float32", "device": "cpu"}
    config = build(EngineConfig, model=str(directory), load_format="dummy", **given | options)

    def change(policy: DevicePolicy) -> DevicePolicy:
        return replace(apart(policy), memory=memory, graphs=lambda: memory.backend)

    return make_runner(directory, config, change=change)


def load(directory: Path, memory: FakeMemory, **options: Any) -> tuple[ModelRunner, WorkerInfo]:
    runner = make(directory, memory, **options)
    return runner, runner.load(directory, lambda done, total: None)


def test_the_cache_gets_what_weights_a_step_and_graphs_leave(directory: Path):
    memory = FakeMemory(200 * MIB, RecordingBackend(), before=7 * MIB, weights=20 * MIB, graph=MIB, step=30 * MIB)
    runner, info = load(directory, memory, gpu_memory_utilization=0.4, max_num_seqs=64)
    num_graphs = len(padded_sizes(64))
    # Two were recorded to see what they take, and are counted again: this backend's never leave.
    left = 80 * MIB - 7 * MIB - 20 * MIB - 30 * MIB - (num_graphs + 2) * MIB
    assert info.num_blocks == left // BLOCK_BYTES
    assert info.max_model_len == 512
    assert memory.backend.captured == [64, 56, *padded_sizes(64)[::-1]]
    driver = Driver(runner, info.num_blocks, 8)
    generation = driver.add([1, 2, 3], 4)
    driver.run([generation])
    assert len(generation.output) == 4


def test_the_longest_context_is_what_then_fits(directory: Path):
    memory = FakeMemory(10 * MIB, RecordingBackend(), weights=9 * MIB - 17 * BLOCK_BYTES)
    runner, info = load(directory, memory, max_num_seqs=1)
    assert (info.num_blocks, info.max_model_len) == (17, 256)
    driver = Driver(runner, info.num_blocks, 1)
    generation = driver.add([1] * (info.max_model_len - 1), 1)
    driver.run([generation], budget=64)


def test_what_was_asked_for_is_taken_whatever_was_measured(directory: Path):
    for options in ({"kv_cache_memory": 2}, {"num_kv_blocks": 50}):
        memory = FakeMemory(10 * MIB, RecordingBackend(), step=1 << 60)
        _, info = load(directory, memory, **options)
        assert info.num_blocks == (50 if "num_kv_blocks" in options else 2 * MIB // BLOCK_BYTES)
        assert memory.backend.captured == [8, 4, *padded_sizes(8)[::-1]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"step": 84 * MIB},
            "the KV cache can hold 368 tokens, but a sequence needs 400 (of 0.10 GiB 90% may be used: 0.01 used by "
            "weights and others, 0.08 for a step): lower --max-model-len to 368, or raise --gpu-memory-utilization to "
            "0.91",
        ),
        (
            {"step": 200 * MIB},
            "the KV cache can hold 0 tokens, but a sequence needs 400 (of 0.10 GiB 90% may be used: 0.01 used by "
            "weights and others, 0.20 for a step): lower --max-num-batched-tokens, or spread the model with "
            "--tensor-parallel-size",
        ),
        (
            {"before": 100 * MIB},
            "the KV cache can hold 0 tokens, but a sequence needs 400 (of 0.10 GiB 90% may be used: 0.10 used by "
            "weights and others): lower --max-num-batched-tokens, or spread the model with --tensor-parallel-size",
        ),
    ],
    ids=["nearly", "far from it", "before the weights"],
)
def test_too_little_is_told_with_what_would_do(directory: Path, changes: dict[str, int], message: str):
    memory = FakeMemory(100 * MIB, RecordingBackend(num_capturable=0), **{"weights": 6 * MIB - 300_000} | changes)
    with pytest.raises(StartupError) as caught:
        load(directory, memory, max_model_len=400)
    assert str(caught.value) == message


@pytest.mark.parametrize("share", [0.0, -0.5, 1.01])
def test_shares_are_bounded(share: float):
    with pytest.raises(InvalidRequestError, match="gpu_memory_utilization: must be"):
        build(EngineConfig, gpu_memory_utilization=share)


def test_a_step_that_is_measured_leaves_no_trace(directory: Path):
    """Rows are entered anew."""
    outputs = []
    for memory in (64 * MIB, 0):
        meter = FakeMemory(memory, RecordingBackend())
        runner, info = load(directory, meter, **({} if memory else {"num_kv_blocks": 64}))
        driver = Driver(runner, info.num_blocks, 8)
        generations = [driver.add([row, 9, 8, 7], 10) for row in range(8)]
        driver.run(generations)
        outputs.append(np.array([generation.output for generation in generations]))
    assert np.array_equal(*outputs)
