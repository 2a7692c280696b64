"""Which models can be shared out to how many workers, and what a worker takes of its node; refusals in one line."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch

from gpu_executor.worker import Worker
from model_runner.device import CPU_CACHE_LIMIT, make_device
from model_runner.shard import Shard, check_sizes, kv_heads, vocabulary
from protos.config import EngineConfig, build
from protos.errors import StartupError
from protos.model_spec import BasicSpec, MoESpec
from protos.place import Place
from tests.model_runner.test_kv_cache import SPEC
from tests.model_runner.tiny import save_tiny

if TYPE_CHECKING:
    from pathlib import Path

SPEC = msgspec.structs.replace(SPEC, intermediate_size=96)
MOE = MoESpec(num_experts=4, num_experts_per_token=2, intermediate_size=20, norm_weights=True)


@pytest.mark.parametrize(
    ("changes", "size", "problem"),
    [
        ({}, 3, "8 attention heads; it can be 1, 2, 4, 8"),
        ({"intermediate_size": 36}, 8, "36 places inside an MLP; it can be 1, 2, 4"),
        ({"num_heads": 12, "num_kv_heads": 6}, 4, "6 KV heads, nor do they divide it; it can be 1, 2, 3, 6, 12"),
        ({"moe": MOE}, 8, "20 places inside an expert; it can be 1, 2, 4"),
        ({"moe": msgspec.structs.replace(MOE, dense_layers=(2,)), "intermediate_size": 98}, 4, "98 places inside an"),
    ],
)
def test_a_size_that_does_not_divide_a_model(changes: dict[str, Any], size: int, problem: str):
    with pytest.raises(StartupError, match=f"^--tensor-parallel-size {size} does not divide the model's {problem}"):
        check_sizes(msgspec.structs.replace(SPEC, **changes), Place(tensor_size=size))


def test_sizes_that_do():
    for size in (1, 2, 4, 8):
        check_sizes(SPEC, Place(tensor_size=size))
    # No layer has the plain MLP.
    check_sizes(msgspec.structs.replace(SPEC, moe=MOE, intermediate_size=97), Place(tensor_size=4))


def test_the_generic_backend_is_for_one_worker():
    spec = BasicSpec(architecture="GPTNeoXForCausalLM", vocab_size=9)
    check_sizes(spec, Place(pipeline_size=2))
    with pytest.raises(StartupError, match=r"^--tensor-parallel-size 2: architecture GPTNeoXForCausalLM is computed"):
        check_sizes(spec, Place(tensor_size=2))


def test_a_worker_checks_before_it_meets_others_or_takes_memory(tmp_path: Path):
    save_tiny(tmp_path, "LlamaForCausalLM")
    place = Place(tensor_size=3, rendezvous="nowhere://x")
    with pytest.raises(StartupError, match=r"does not divide the model's 4 attention heads; it can be 1, 2, 4$"):
        Worker(build(EngineConfig, model=str(tmp_path)), (), place).load(lambda done, total: None)


def test_parts():
    places = [Place(rank=rank, tensor_size=4) for rank in range(4)]
    assert [kv_heads(8, place)[1:] for place in places] == [(0, 2), (2, 2), (4, 2), (6, 2)]
    assert [kv_heads(2, place)[1:] for place in places] == [(0, 1), (0, 1), (1, 1), (1, 1)]
    assert [vocabulary(9, place)[1:] for place in places] == [(0, 3), (3, 3), (6, 3), (9, 0)]
    assert [vocabulary(5, place)[1:] for place in places] == [(0, 2), (2, 2), (4, 1), (5, 0)]
    assert Shard(8, 2, 2).times(16) == (128, 32, 32)
    # Of the second of two stages, too.
    assert kv_heads(4, Place(rank=3, tensor_size=2, pipeline_size=2)) == (4, 2, 2)


def test_workers_of_a_node_share_its_cores_and_memory(monkeypatch: pytest.MonkeyPatch):
    threads = torch.get_num_threads()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    place = Place(rank=1, tensor_size=3, local_rank=1, local_size=3)
    try:
        config = build(EngineConfig, device="cpu")
        alone, shared = make_device(config, SPEC), make_device(config, SPEC, place)
        assert torch.get_num_threads() == 2
        assert (alone.cache_limit, shared.cache_limit) == (CPU_CACHE_LIMIT, CPU_CACHE_LIMIT // 3)
        assert shared.free_memory() < alone.free_memory() / 2
        crowd = msgspec.structs.replace(place, tensor_size=9, local_size=9)
        with pytest.raises(StartupError, match=r"^this node has 8 cores for 9 workers; .*set --num-threads 1 to let"):
            make_device(config, SPEC, crowd)
        make_device(build(EngineConfig, device="cpu", num_threads=1), SPEC, crowd)
    finally:
        torch.set_num_threads(threads)


def test_a_worker_takes_the_gpu_of_its_number(monkeypatch: pytest.MonkeyPatch):
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr("model_runner.device.make_ops", lambda *_: SimpleNamespace(keeps_integers=False))
    monkeypatch.setattr("model_runner.device.CudaCopier", lambda device: device)
    try:
        for rank in range(2):
            place = Place(rank=rank, tensor_size=2, local_rank=rank, local_size=2)
            policy = make_device(build(EngineConfig), SPEC, place)
            assert policy.device == policy.to_host == torch.device("cuda", rank)
            assert (policy.max_steps_in_flight, policy.shares_memory) == (2, False)
            assert policy.graphs is not None
            assert policy.memory is not None
        with pytest.raises(StartupError, match=r"^this node has 2 GPUs for 4 workers; lower --tensor-parallel-size"):
            make_device(build(EngineConfig), SPEC, Place(tensor_size=2, pipeline_size=2, local_size=4))
    finally:
        torch.set_num_threads(threads)
