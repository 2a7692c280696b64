"""Recorded steps: which are, in what order, over which memory; what is padded changes nothing."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from model_runner.device import _records
from model_runner.graph_backend import padded_sizes
from model_runner.graphs import graph_size
from model_runner.kv_cache import allocate_cache
from protos.config import EngineConfig, build
from protos.messages import Sampling
from protos.place import Place
from tests.model_runner.apart import apart
from tests.model_runner.driver import Driver, Generation
from tests.model_runner.recording import RecordingBackend
from tests.model_runner.tiny import make_runner, save_shape

if TYPE_CHECKING:
    from pathlib import Path

    from model_runner.device import DevicePolicy
    from model_runner.forward_batch import ForwardBatch, KVCaches
    from model_runner.graph_backend import GraphBackend
    from model_runner.runner import ModelRunner

NUM_BLOCKS, NUM_ROWS = 64, 12
GPT2_SHAPE = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    **{"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512, "vocab_size": 199},
}
SAMPLINGS = [Sampling(1.0, seed=row) if row % 2 else Sampling() for row in range(NUM_ROWS)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shape")
    save_shape(path)
    return path


def make(directory: Path, backend: GraphBackend | None, has_own_memory: bool = False) -> ModelRunner:
    """Not loaded yet."""
    given = {"model": str(directory), "load_format": "dummy", "max_num_seqs": NUM_ROWS, "num_kv_blocks": NUM_BLOCKS}
    config = build(EngineConfig, **given, dtype="float32", device="cpu")

    def change(policy: DevicePolicy) -> DevicePolicy:
        return replace(apart(policy) if has_own_memory else policy, graphs=None if backend is None else lambda: backend)

    return make_runner(directory, config, change=change)


def load(directory: Path, backend: GraphBackend | None, has_own_memory: bool = False) -> ModelRunner:
    runner = make(directory, backend, has_own_memory)
    runner.load(directory, lambda done, total: None)
    return runner


def generate(runner: ModelRunner, num_rows: int = NUM_ROWS, **sampling: Any) -> list[Generation]:
    """Some end sooner than others, so that batches of many sizes decode, and one comes late: a mixed step."""
    driver = Driver(runner, NUM_BLOCKS, NUM_ROWS)
    prompts = [[row, 9, 8, 7] * (1 + row % 3) for row in range(num_rows)]
    generations = [
        driver.add(prompt, 5 + 3 * row, replace_sampling(SAMPLINGS[row], sampling))
        for row, prompt in enumerate(prompts)
    ]
    driver.run(generations[:-1], num_steps=3)
    driver.run(generations)
    return generations


def replace_sampling(sampling: Sampling, changes: dict[str, Any]) -> Sampling:
    return Sampling(sampling.temperature, seed=sampling.seed, **changes)


def outputs(runner: ModelRunner, **options: Any) -> list[list[int]]:
    return [generation.output for generation in generate(runner, **options)]


@pytest.fixture(scope="module")
def eager(directory: Path) -> list[list[int]]:
    return outputs(load(directory, None))


def test_sizes_are_few_where_padding_costs_much_and_the_last_is_for_all_rows():
    assert padded_sizes(256) == [1, 2, 4, *range(8, 257, 8)]
    assert padded_sizes(300) == [1, 2, 4, *range(8, 257, 8), 272, 288, 300]
    assert padded_sizes(4096)[-3:] == [480, 496, 512]
    assert padded_sizes(1) == [1]
    assert padded_sizes(3) == [1, 2, 3]
    assert padded_sizes(12) == [1, 2, 4, 8, 12]
    for max_rows in range(1, 600):
        sizes = padded_sizes(max_rows)
        assert sizes == sorted(set(sizes))
        assert all(
            graph_size(sizes, rows, rows, rows, False) == min(s for s in sizes if s >= rows) for rows in (1, sizes[-1])
        )


@pytest.mark.parametrize(
    ("step", "size"),
    [
        ((1, 1, 1), 1),
        ((3, 3, 3), 4),
        ((4, 4, 4), 4),
        ((5, 5, 5), 8),
        ((8, 8, 8), 8),
        ((9, 9, 9), None),
        ((3, 4, 3), None),
        ((3, 3, 2), None),
    ],
    ids=["one", "padded", "whole", "padded more", "largest", "too many", "a prompt", "a chunk"],
)
def test_dispatch(step: tuple[int, int, int], size: int | None):
    assert graph_size([1, 2, 4, 8], *step, False) == size
    assert graph_size([1, 2, 4, 8], *step, True) is None
    assert graph_size((), *step, False) is None


@pytest.mark.parametrize("has_own_memory", [False, True], ids=["shared", "apart"])
def test_53_tokens_are_the_same_recorded_and_not(directory: Path, eager: list[list[int]], has_own_memory: bool):
    backend = RecordingBackend()
    runner = load(directory, backend, has_own_memory)
    assert backend.captured == [12, 8, 4, 2, 1], "largest first"
    assert outputs(runner) == eager
    assert backend.captured == [12, 8, 4, 2, 1]
    assert set(backend.replayed) == {12, 8, 4, 2, 1}
    assert len({tuple(output) for output in eager}) == NUM_ROWS


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4},
        {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32},
        GPT2_SHAPE,
    ],
    ids=lambda changes: changes["model_type"],
)
def test_57_padding_changes_nobody_in_models_of_other_kinds(changes: dict[str, Any], tmp_path: Path):
    """Attention leaves padding as it finds it, here not a number; experts and norms of heads get to see that."""
    save_shape(tmp_path, **changes)
    backend = RecordingBackend()
    recorded, alone = outputs(load(tmp_path, backend)), outputs(load(tmp_path, None))
    assert recorded == alone
    assert {8, 12} <= set(backend.replayed)
    assert len({tuple(output) for output in alone}) == NUM_ROWS


def unwritten_cache(*arguments: Any) -> KVCaches:
    """Full of what spoils whatever it gets into."""
    caches = allocate_cache(*arguments)
    for keys, values in caches.values():
        keys.fill_(torch.nan)
        values.fill_(torch.nan)
    return caches


def test_57_padding_writes_nothing_and_every_step_lies_in_the_same_memory(
    directory: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("model_runner.runner.allocate_cache", unwritten_cache)
    backend = RecordingBackend()
    runner = make(directory, backend)
    seen: dict[int, set[tuple[int, ...]]] = {}
    forward = runner.model.forward

    def watched(batch: ForwardBatch) -> torch.Tensor:
        size = len(batch.seq_lens)
        if len(batch.input_ids) == size:
            tensors = (batch.input_ids, batch.positions, batch.slots, batch.query_starts, batch.seq_lens)
            places = *(tensor.data_ptr() for tensor in tensors), batch.block_tables.data_ptr()
            seen.setdefault(size, set()).add(places)
            real = int((batch.seq_lens > 0).sum())
            assert batch.query_starts.tolist() == list(range(size + 1))
            assert (batch.slots[:real] >= 0).all()
            assert batch.slots[real:].tolist() == [-1] * (size - real)
            assert not batch.seq_lens[real:].any()
            assert not batch.input_ids[real:].any()
            assert not batch.positions[real:].any()
        return forward(batch)

    runner.model.forward = watched  # type: ignore[method-assign]
    runner.load(directory, lambda done, total: None)
    assert set(seen) == {1, 2, 4, 8, 12}, "padding alone"
    driver = Driver(runner, NUM_BLOCKS, NUM_ROWS)
    generations = [driver.add([row, 9, 8, 7], 4 if row > 2 else 20) for row in range(7)]
    driver.run(generations)
    assert {8, 4} <= set(backend.replayed)
    assert all(len(places) == 1 for places in seen.values())
    assert len(set.union(*seen.values())) == 1
    owned = {block for generation in generations for block in generation.block_ids}
    others = torch.tensor([block for block in range(NUM_BLOCKS) if block not in owned])
    written = torch.tensor(sorted(owned))
    for keys, values in runner._kv_caches.values():
        assert keys[others].isnan().all()
        assert values[others].isnan().all()
        for generation in generations:
            length = len(generation.token_ids) - 1
            assert values[generation.block_ids].transpose(1, 2).flatten(0, 1)[length:].isnan().all()
        assert not values[written, :, 0].isnan().any()


@pytest.mark.parametrize("num_capturable", [0, 1])
def test_what_cannot_be_recorded_runs_operation_by_operation(
    directory: Path, eager: list[list[int]], num_capturable: int, caplog: pytest.LogCaptureFixture
):
    backend = RecordingBackend(num_capturable)
    with caplog.at_level(logging.WARNING):
        runner = load(directory, backend)
        assert outputs(runner) == eager
    assert len(backend.captured) == num_capturable
    assert [record.getMessage() for record in caplog.records] == ["steps run operation by operation: the test said so"]


def test_steps_that_tell_of_prompts_are_not_replayed(directory: Path):
    backend = RecordingBackend()
    runner = load(directory, backend)
    driver = Driver(runner, NUM_BLOCKS, NUM_ROWS)
    alone = driver.add([5], 2, Sampling(prompt_logprobs=1))
    asking = driver.add([5, 6, 7, 8], 3, Sampling(prompt_logprobs=1))
    driver.run([alone])
    assert backend.replayed == [1, 1], "a prompt of one token has none to tell of"
    driver.step([asking], budget=1)
    assert backend.replayed == [1, 1]
    driver.run([asking])
    assert backend.replayed == [1] * 4
    assert [len(told.logprobs.logprobs) for told in asking.prompt_logprobs] == [1, 2]


@pytest.mark.parametrize(
    ("options", "place", "records"),
    [
        ({}, Place(), True),
        ({}, Place(tensor_size=2), True),
        ({}, Place(pipeline_size=2), False),
        ({"graphs": "off"}, Place(), False),
    ],
    ids=["one", "several", "stages", "off"],
)
def test_who_records_steps(options: dict[str, Any], place: Place, records: bool):
    assert _records(build(EngineConfig, **options), place) == records
