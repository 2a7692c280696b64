"""Loading safetensors: single, sharded, tied, renamed, cast; faults in one line that names file and tensor."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from model_runner.target import Target
from model_runner.weights import load_weights
from protos.config import EngineConfig, build
from protos.errors import StartupError
from protos.model_files import read_model_spec
from tests.model_runner.hostile import safetensors_bytes
from tests.model_runner.test_tiny_models import ENDS, GPT2, OPT, TOKENS
from tests.model_runner.tiny import chunk_logits, load_tiny, make_runner, reference_logits, save_tiny, tensors

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
    ours = tensors(runner)
    theirs = model.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name
    layer = runner.model.layers[1]
    names = ("q_proj", "k_proj", "v_proj")
    merged = torch.cat([theirs[f"model.layers.1.self_attn.{name}.weight"] for name in names])
    assert torch.equal(layer.attention.qkv.weight.floats, merged)


def test_a_tied_head_is_the_embedding_and_its_copy_in_the_file_is_ignored(tmp_path: Path):
    save_tiny(tmp_path, "LlamaForCausalLM", tie_word_embeddings=True)
    rewrite(tmp_path, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(199, 64)}))
    runner = load_tiny(tmp_path)
    assert "lm_head.weight" not in tensors(runner)
    assert chunk_logits(runner, TOKENS, [5]).abs().max() > 1


@pytest.mark.parametrize(
    "prefix", ["", "language_model.model.", "model.language_model.", "_orig_mod.model.", "module.model.", "module."]
)
def test_names_may_have_other_modules_around(prefix: str, tmp_path: Path, model: Any):
    """Of the base model alone, of the text half of a larger one, or as training left them."""

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            head = "language_model." if "language" in prefix and name.startswith("lm_head") else ""
            tensors[head + name.replace("model.", prefix)] = tensors.pop(name)

    rewrite(tmp_path, rename)
    theirs = model.state_dict()
    assert f"{prefix}layers.0.mlp.up_proj.weight" in load_file(tmp_path / SINGLE)
    for name, tensor in tensors(load_tiny(tmp_path)).items():
        assert torch.equal(tensor, theirs[name]), name


def test_one_tensor_by_two_names_is_named(tmp_path: Path, model: Any):
    rewrite(tmp_path, lambda tensors: tensors.update({"norm.weight": torch.ones(64)}))
    assert re.fullmatch(rf"{SINGLE}: tensor (model\.)?norm\.weight occurs twice", refused(tmp_path))


def test_experts_that_a_model_holds_stacked_are_not_cut(tmp_path: Path, model: Any):
    name = "mlp.experts.gate_up_proj"
    rewrite(tmp_path, lambda tensors: (tensors.clear(), tensors.update({name: torch.rand(4, 6, 5)})))
    tensor = torch.zeros(4, 6, 5)
    table = {f"model.{name}": Target.whole(tensor)}
    load_weights(tmp_path, read_model_spec(tmp_path), "auto", table, lambda done, total: None)
    assert torch.equal(tensor, load_file(tmp_path / SINGLE)[name])


@pytest.mark.parametrize("ours", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("theirs", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_cast_once(theirs: torch.dtype, ours: torch.dtype, tmp_path: Path, model: Any):
    generator = torch.Generator().manual_seed(0)
    rewrite(
        tmp_path,
        lambda tensors: tensors.update(
            {name: torch.randn(w.shape, generator=generator, dtype=theirs) for name, w in tensors.items()}
        ),
    )
    runner = load_tiny(tmp_path, dtype=str(ours).removeprefix("torch."))
    for name, stored in load_file(tmp_path / SINGLE).items():
        held = tensors(runner)[name]
        assert held.dtype == (torch.float32 if "norm" in name else ours)
        assert torch.equal(held, stored.to(held.dtype)), name


def test_old_checkpoints_computed_tensors_are_ignored(tmp_path: Path, model: Any):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(tmp_path, lambda tensors: tensors.update({name: torch.ones(8)}))
    load_tiny(tmp_path)


def renamed(directory: Path, old: str, new: str) -> None:
    """The checkpoint with a part of each name replaced."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.replace(old, new)] = tensors.pop(name)

    rewrite(directory, change)


@pytest.mark.parametrize(
    ("architecture", "changes", "old", "new"),
    [
        ("LlamaForCausalLM", {}, "model.", ""),
        ("GPT2LMHeadModel", GPT2, "transformer.", ""),
        ("OPTForCausalLM", OPT, "model.decoder.", "decoder."),
    ],
)
def test_a_checkpoint_of_the_model_without_its_head_has_shorter_names(
    architecture: str, changes: dict[str, Any], old: str, new: str, tmp_path: Path
):
    model = save_tiny(tmp_path, architecture, **changes, tie_word_embeddings=True)
    renamed(tmp_path, old, new)
    ours = chunk_logits(load_tiny(tmp_path), TOKENS, ENDS)
    torch.testing.assert_close(ours, reference_logits(model, TOKENS, ENDS), atol=2e-4, rtol=0)


def test_masks_of_old_gpt2_checkpoints_are_ignored(tmp_path: Path):
    save_tiny(tmp_path, "GPT2LMHeadModel", **GPT2)
    renamed(tmp_path, "transformer.", "")
    masks = {"h.0.attn.bias": torch.ones(1, 1, 512, 512), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    rewrite(tmp_path, lambda tensors: tensors.update(masks))
    load_tiny(tmp_path)


def test_a_wrong_shape_of_a_turned_matrix_is_named(tmp_path: Path):
    save_tiny(tmp_path, "GPT2LMHeadModel", **GPT2)
    name = "transformer.h.1.mlp.c_fc.weight"
    rewrite(tmp_path, lambda tensors: tensors.update({name: tensors[name].T.contiguous()}))
    assert refused(tmp_path) == f"{SINGLE}: tensor {name} has shape [96, 64], the config says [64, 96]"


def test_threads_are_as_before_behind_a_load(tmp_path: Path, model: Any):
    runner = make_runner(tmp_path, build(EngineConfig, num_kv_blocks=64))
    threads = torch.get_num_threads()
    runner.load(tmp_path, lambda done, total: None)
    assert torch.get_num_threads() == threads


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


@pytest.mark.parametrize("size", [0, 5, 100, -1])
def test_a_truncated_file_is_named(size: int, tmp_path: Path, model: Any):
    file = tmp_path / SINGLE
    file.write_bytes(file.read_bytes()[:size])
    assert refused(tmp_path).startswith(f"{SINGLE}: is cut short or no safetensors file")


def test_of_several_shards_the_truncated_one_is_named(tmp_path: Path):
    save_tiny(tmp_path, "LlamaForCausalLM", max_shard_size="60KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[2]
    shard.write_bytes(shard.read_bytes()[:-1])
    assert refused(tmp_path).startswith(f"{shard.name}: is cut short or no safetensors file")


@pytest.mark.parametrize("dtype", ["F8_E4M3", "I64", "BOOL"])
def test_a_type_that_is_no_weights_is_named(dtype: str, tmp_path: Path, model: Any):
    size = 8 if dtype == "I64" else 1
    header = {"model.norm.weight": {"dtype": dtype, "shape": [64], "data_offsets": [0, 64 * size]}}
    (tmp_path / SINGLE).write_bytes(safetensors_bytes(json.dumps(header).encode(), bytes(64 * size)))
    expected = f"{SINGLE}: tensor model.norm.weight has type {dtype}; supported are F64, F32, F16, BF16"
    assert refused(tmp_path) == expected


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
