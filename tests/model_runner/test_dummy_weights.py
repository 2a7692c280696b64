"""Random weights: no file but config.json is read, and the model behaves like one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from gpu_executor.worker import Worker
from protos.config import EngineConfig, build
from tests.model_runner.driver import Driver
from tests.model_runner.gguf_files import write_gguf
from tests.model_runner.test_tiny_models import GPT2, QWEN3_MOE, TOKENS
from tests.model_runner.tiny import VOCAB, chunk_logits, make_runner, save_tiny, tensors

if TYPE_CHECKING:
    from pathlib import Path

    from model_runner.runner import ModelRunner

MODELS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"attention_bias": True},
    "Gemma3ForCausalLM": {"head_dim": 32},
    "GPT2LMHeadModel": GPT2,
    "Qwen3MoeForCausalLM": QWEN3_MOE,
}


@pytest.fixture(params=MODELS)
def directory(request: Any, tmp_path: Path) -> Path:
    save_tiny(tmp_path, request.param, **MODELS[request.param])
    (tmp_path / "model.safetensors").unlink()
    return tmp_path


def config(path: Path) -> EngineConfig:
    return build(EngineConfig, model=str(path), load_format="dummy", num_kv_blocks=64, max_num_seqs=8)


def load(path: Path) -> ModelRunner:
    runner = make_runner(path, config(path))
    runner.load(path, lambda done, total: None)
    return runner


def test_logits_are_those_of_a_model_that_knows_nothing(directory: Path):
    logits = chunk_logits(load(directory), TOKENS, [1, 40, 150])
    assert logits.isfinite().all()
    assert 0.5 < logits.std() < 2
    assert len(logits.argmax(-1).unique()) > 1


def test_weights_are_the_same_each_time_and_differ_from_each_other(directory: Path):
    first, second = (tensors(load(directory)) for _ in range(2))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    matrices = [weight.flatten()[:64] for weight in first.values() if weight.ndim > 1]
    assert len({tuple(weight.tolist()) for weight in matrices}) == len(matrices)
    for name, weight in first.items():
        if weight.ndim == 1:
            assert set(weight.tolist()) == {0.0 if name.endswith("bias") else 1.0}


def test_a_worker_loads_and_draws_without_files_of_weights(directory: Path):
    worker, reports = Worker(config(directory), ()), []
    info = worker.load(lambda done, total: reports.append((done, total)))
    assert reports[0] == (0, info.weight_bytes)
    assert reports[-1] == (info.weight_bytes, info.weight_bytes)
    driver = Driver(worker, 64, 8)
    generations = [driver.add(TOKENS[:size], 8) for size in (1, 30)]
    driver.run(generations)
    assert all(0 <= token < VOCAB for generation in generations for token in generation.output)


def test_of_a_gguf_file_the_header_is_enough(tmp_path: Path):
    path = tmp_path / "tiny.gguf"
    write_gguf(path, save_tiny(tmp_path, "LlamaForCausalLM"), "llama")
    weights = tensors(load(path))["model.layers.0.mlp.down_proj.weight"]
    assert 0.8 < weights.std() * 96**0.5 < 1.2
