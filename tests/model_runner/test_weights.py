"""Loading safetensors: single, sharded, tied, streamed; faults in one line that names file and tensor."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from model_runner.runner import ModelRunner
from model_runner.weights import load_weights
from protos.config import EngineConfig, build
from protos.errors import StartupError
from protos.model_files import read_model_spec
from tests.model_runner.test_tiny_models import ENDS, TOKENS
from tests.model_runner.tiny import chunk_logits, load_tiny, reference_logits, save_tiny

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SINGLE = "model.safetensors"


@pytest.fixture
def model(tmp_path: Path) -> Any:
    return save_tiny(tmp_path, "LlamaForCausalLM")


def refused(directory: Path) -> str:
    with pytest.raises(StartupError) as caught:
        load_tiny(directory)
    message = str(caught.value)
    assert "\n" not in message
    return message.removeprefix(f"{directory}/").removeprefix(f"{directory}: ")


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(directory / SINGLE)
    change(tensors)
    save_file(tensors, directory / SINGLE)


def test_sharded_weights_equal_single_ones(tmp_path: Path):
    model = save_tiny(tmp_path, "LlamaForCausalLM", max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    ours = chunk_logits(load_tiny(tmp_path), TOKENS, ENDS)
    torch.testing.assert_close(ours, reference_logits(model, TOKENS, ENDS), atol=2e-4, rtol=0)


def test_every_slice_of_a_merged_weight_is_filled(tmp_path: Path, model: Any):
    runner = load_tiny(tmp_path)
    ours = runner.model.weights()
    theirs = model.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name
    layer = runner.model.layers[1]
    names = ("q_proj", "k_proj", "v_proj")
    merged = torch.cat([theirs[f"model.layers.1.self_attn.{name}.weight"] for name in names])
    assert torch.equal(layer.attention.qkv.weight, merged)


def test_a_tied_head_is_the_embedding_and_its_copy_in_the_file_is_ignored(tmp_path: Path):
    save_tiny(tmp_path, "LlamaForCausalLM", tie_word_embeddings=True)
    rewrite(tmp_path, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(199, 64)}))
    runner = load_tiny(tmp_path)
    assert "lm_head.weight" not in runner.model.weights()
    assert chunk_logits(runner, TOKENS, [5]).abs().max() > 1


def test_old_checkpoints_computed_tensors_are_ignored(tmp_path: Path, model: Any):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(tmp_path, lambda tensors: tensors.update({name: torch.ones(8)}))
    load_tiny(tmp_path)


def test_progress_counts_the_bytes_of_the_files(tmp_path: Path):
    save_tiny(tmp_path, "LlamaForCausalLM", max_shard_size="60KB")
    spec = read_model_spec(tmp_path)
    runner = ModelRunner(build(EngineConfig, num_kv_blocks=64), spec, ())
    reports: list[tuple[int, int]] = []
    threads = torch.get_num_threads()
    load_weights(tmp_path, spec, runner.model.weights(), lambda done, total: reports.append((done, total)))
    assert torch.get_num_threads() == threads
    index = json.loads((tmp_path / "model.safetensors.index.json").read_bytes())
    assert {total for _, total in reports} == {index["metadata"]["total_size"]}
    assert reports[0][0] == 0
    assert reports[-1][0] == reports[-1][1]
    assert sorted(reports) == reports


def test_a_missing_tensor_is_named(tmp_path: Path, model: Any):
    rewrite(tmp_path, lambda tensors: tensors.pop("model.layers.2.mlp.up_proj.weight"))
    assert refused(tmp_path) == "has no tensor model.layers.2.mlp.up_proj.weight"


def test_an_unexpected_tensor_is_named(tmp_path: Path, model: Any):
    rewrite(tmp_path, lambda tensors: tensors.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(16)}))
    message = "tensor model.layers.0.self_attn.q_norm.weight has no place in this architecture"
    assert refused(tmp_path) == f"{SINGLE}: {message}"


def test_a_wrong_shape_is_named(tmp_path: Path, model: Any):
    rewrite(tmp_path, lambda tensors: tensors.update({"model.norm.weight": torch.ones(65)}))
    assert refused(tmp_path) == f"{SINGLE}: tensor model.norm.weight has shape [65], the config says [64]"


def test_integers_are_not_taken_for_weights(tmp_path: Path, model: Any):
    rewrite(tmp_path, lambda tensors: tensors.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}))
    assert refused(tmp_path).startswith(f"{SINGLE}: tensor model.norm.weight has type I8")


@pytest.mark.parametrize("size", [0, 5, 100, -1])
def test_a_truncated_file_is_named(size: int, tmp_path: Path, model: Any):
    file = tmp_path / SINGLE
    file.write_bytes(file.read_bytes()[:size])
    assert refused(tmp_path).startswith(f"{SINGLE}: is cut short or no safetensors file")


def test_a_missing_shard_is_named(tmp_path: Path):
    save_tiny(tmp_path, "LlamaForCausalLM", max_shard_size="60KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    assert refused(tmp_path) == f"{shard.name}: no such file, but model.safetensors.index.json names it"
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    assert refused(tmp_path) == "model.safetensors.index.json: is not a JSON object"


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a/b", "", "..", "x\0y", 7])
def test_a_shard_elsewhere_is_refused(name: Any, tmp_path: Path, model: Any):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    assert "which is no file beside it" in refused(tmp_path)


def test_no_weights_at_all(tmp_path: Path, model: Any):
    (tmp_path / SINGLE).unlink()
    assert refused(tmp_path).startswith("has no .safetensors files")
