"""What is read of an adapter's files, and what they are refused for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from protos.adapter import Adapter
from protos.adapter_files import adapter_modules, module_shapes, read_adapter
from protos.errors import AdapterError
from protos.model_spec import BasicSpec, ModelSpec, MoESpec, RopeSpec
from tests.adapter_files import save_adapter, write_adapter

SPEC = ModelSpec(
    architecture="LlamaForCausalLM",
    vocab_size=99,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    rope=RopeSpec(),
)
Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
SHAPES = {Q: (32, 32), DOWN: (32, 48)}


def read(directory: Path, spec: BasicSpec = SPEC, max_rank: int = 8) -> Adapter:
    return read_adapter("one", directory, spec, max_rank)


def refused(directory: Path, spec: BasicSpec = SPEC, max_rank: int = 8) -> str:
    with pytest.raises(AdapterError) as caught:
        read(directory, spec, max_rank)
    assert caught.value.status == "INVALID_ARGUMENT"
    text = str(caught.value)
    assert text.isprintable()
    assert str(directory) in text
    return text


def test_an_adapter_says_where_it_is_what_it_is_and_how_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_adapter(tmp_path / "a", SHAPES)
    monkeypatch.chdir(tmp_path)
    adapter = read(Path("a"))
    assert (adapter.name, adapter.path, adapter.rank) == ("one", str(tmp_path / "a"), 4)
    assert adapter.num_bytes == 4 * 4 * (32 + 32 + 32 + 48)
    assert len(adapter.digest) == 32
    assert int(adapter.digest, 16)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(adapter), type=Adapter) == adapter


def test_equal_files_have_one_digest_and_others_another(tmp_path: Path) -> None:
    for name, options in (("a", {}), ("b", {}), ("c", {"seed": 1}), ("d", {"lora_alpha": 9})):
        save_adapter(tmp_path / name, SHAPES, **options)
    digests = [read(tmp_path / name).digest for name in "abcd"]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_modules_have_our_names_and_the_scale_of_the_config(tmp_path: Path) -> None:
    save_adapter(tmp_path, SHAPES)
    modules = {module.name: module for module in adapter_modules(read(tmp_path), SPEC, 8)}
    assert modules.keys() == {"layers.0.self_attn.q_proj", "layers.1.mlp.down_proj"}
    assert {(module.rank, module.scale) for module in modules.values()} == {(4, 2.0)}
    assert modules["layers.0.self_attn.q_proj"].a == f"base_model.model.{Q}.lora_A.weight"
    assert modules["layers.0.self_attn.q_proj"].b == f"base_model.model.{Q}.lora_B.weight"


def test_scales_by_the_root_of_the_rank_and_by_patterns(tmp_path: Path) -> None:
    tensors = save_adapter(tmp_path, {Q: (32, 32)}) | save_adapter(tmp_path / "two", {DOWN: (32, 48)}, rank=2)
    config = {
        "r": 4,
        "lora_alpha": 12,
        "rank_pattern": {"down_proj": 2},
        "alpha_pattern": {r"layers\.1.mlp.down_proj": 6},
    }

    def scales() -> dict[str, float]:
        return {module.name.rpartition(".")[2]: module.scale for module in adapter_modules(read(tmp_path), SPEC, 8)}

    write_adapter(tmp_path, tensors, config)
    assert scales() == {"q_proj": 3.0, "down_proj": 3.0}
    assert read(tmp_path).rank == 4
    write_adapter(tmp_path, tensors, {**config, "use_rslora": True})
    assert scales() == {"q_proj": 6.0, "down_proj": 6 / 2**0.5}
    # All of the name, and the end of it from a dot on.
    write_adapter(tmp_path, tensors, {**config, "alpha_pattern": {f"^{DOWN}": 6, f"^{Q.removeprefix('model.')}": 8}})
    assert scales() == {"q_proj": 3.0, "down_proj": 3.0}
    write_adapter(tmp_path, tensors, {**config, "alpha_pattern": {"own_proj": 6}})
    assert scales() == {"q_proj": 3.0, "down_proj": 6.0}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3', not LORA"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"use_dora": True}, "use_dora is not supported"),
        ({"lora_bias": True}, "lora_bias is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is not supported"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens is not supported"),
        ({"target_parameters": ["experts.down_proj"]}, "target_parameters is not supported"),
        ({"init_lora_weights": "pissa"}, "changes the model's own weights"),
        ({"use_rslora": 1}, "use_rslora is no boolean"),
        ({"r": 0}, "r: 0 is no rank"),
        ({"r": True}, "r: True is no rank"),
        ({"r": "8"}, "r: '8' is no rank"),
        ({"r": None}, "r: None is no rank"),
        ({"r": 9}, "rank 9 is more than the largest that is taken, 8 (--max-adapter-rank)"),
        ({"rank_pattern": {"q_proj": 9}}, "rank_pattern: rank 9 is more"),
        ({"lora_alpha": None}, "None is no scale"),
        ({"lora_alpha": float("nan")}, "nan is no scale"),
        ({"lora_alpha": 1e7}, "10000000.0 is no scale"),
        ({"lora_alpha": 10**400}, "is no scale"),
        ({"alpha_pattern": {"q_proj": "x"}}, "'x' is no scale"),
        ({"alpha_pattern": [1]}, "alpha_pattern is no object"),
        ({"alpha_pattern": {"(a+)+b": 1}}, "'(a+)+b' is no plain name"),
        ({"rank_pattern": {"a(a+)+b": 1}}, "'a(a+)+b' is no plain name"),
        ({"r": 5}, "has shape [4, 32]; by the model and adapter_config.json it is [5, 32]"),
    ],
)
def test_a_config_is_refused_for(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    save_adapter(tmp_path, SHAPES, **changes)
    assert told in refused(tmp_path)


@pytest.mark.parametrize(
    ("content", "told"),
    [(b"{", "cannot be read"), (b"[1]", "is not a JSON object"), (b"[" * 100_000, "nested too deeply")],
)
def test_a_config_that_is_none(tmp_path: Path, content: bytes, told: str) -> None:
    save_adapter(tmp_path, SHAPES)
    (tmp_path / "adapter_config.json").write_bytes(content)
    assert told in refused(tmp_path)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_file_that_is_not_there(tmp_path: Path, name: str) -> None:
    save_adapter(tmp_path, SHAPES)
    (tmp_path / name).unlink()
    assert f"{name}: no such file" in refused(tmp_path)
    (tmp_path / name).mkdir()
    assert f"{name}: no such file" in refused(tmp_path)


def test_weights_that_are_cut_short_or_of_another_kind(tmp_path: Path) -> None:
    save_adapter(tmp_path, SHAPES)
    file = tmp_path / "adapter_model.safetensors"
    whole = file.read_bytes()
    for content in (b"", whole[:100], whole[:-1], b"\xff" * 64):
        file.write_bytes(content)
        assert "is cut short or no safetensors file" in refused(tmp_path)
    save_adapter(tmp_path, SHAPES, dtype=np.int8)
    assert "has type I8; supported are F32, F16, BF16" in refused(tmp_path)
    write_adapter(tmp_path, {}, {"r": 4, "lora_alpha": 8})
    assert "holds no tensors" in refused(tmp_path)


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["lm_head.lora_A.weight"], "adapters are for the linear modules of layers alone"),
        (["model.embed_tokens.lora_embedding_A"], "is no lora_A or lora_B of a linear module"),
        (["model.layers.0.self_attn.q_proj.lora_magnitude_vector"], "is no lora_A or lora_B of a linear module"),
        (["model.layers.2.self_attn.q_proj.lora_A.weight"], "the model has 2 layers"),
        (["model.layers.0.self_attn.qkv_proj.lora_A.weight"], "these are mlp.down_proj, mlp.gate_proj"),
        (["model.layers.0.input_layernorm.lora_A.weight"], "the model has no such module"),
        (["model.layers.x.self_attn.q_proj.lora_A.weight"], "of layers alone"),
        (["model.layers.0.mlp.up_proj.lora_A.weight"], "has shape"),
    ],
)
def test_tensors_are_refused_that_have_no_place_in_the_model(tmp_path: Path, names: list[str], told: str) -> None:
    both = [names[0], names[0].replace("lora_A", "lora_B")]
    tensors = {f"base_model.model.{name}": np.zeros((4, 4), np.float32) for name in both}
    write_adapter(tmp_path, tensors, {"r": 4, "lora_alpha": 8})
    assert told in refused(tmp_path)


def test_a_tensor_without_the_other_of_its_pair(tmp_path: Path) -> None:
    tensors = save_adapter(tmp_path, SHAPES)
    del tensors[f"base_model.model.{Q}.lora_B.weight"]
    write_adapter(tmp_path, tensors, {"r": 4, "lora_alpha": 8})
    assert f"{Q}.lora_A.weight is there without the other of its pair" in refused(tmp_path)


def test_one_module_by_two_names(tmp_path: Path) -> None:
    save_adapter(tmp_path, {Q: (32, 32), Q.removeprefix("model."): (32, 32)})
    assert "two adapters for one module" in refused(tmp_path)


def test_an_adapter_of_another_model(tmp_path: Path) -> None:
    save_adapter(tmp_path, SHAPES)
    other = msgspec.structs.replace(SPEC, hidden_size=64, head_dim=16)
    assert "has shape [4, 32]; by the model and adapter_config.json it is [4, 64]" in refused(tmp_path, other)


def test_experts_are_refused_and_attention_beside_them_is_not(tmp_path: Path) -> None:
    moe = MoESpec(num_experts=4, num_experts_per_token=2, intermediate_size=16, norm_weights=True, dense_layers=(1,))
    spec = msgspec.structs.replace(SPEC, architecture="Qwen3MoeForCausalLM", moe=moe)
    save_adapter(tmp_path, SHAPES)
    assert read(tmp_path, spec).rank == 4
    for name in ("mlp.experts.0.up_proj", "mlp.gate", "mlp.up_proj"):
        save_adapter(tmp_path, {f"model.layers.0.{name}": (4, 32)})
        assert f"module model.layers.0.{name}: the model has no such module, or none" in refused(tmp_path, spec)


def test_modules_of_a_model_of_transformers_have_to_fit_themselves_alone(tmp_path: Path) -> None:
    spec = BasicSpec(architecture="GPTNeoXForCausalLM", vocab_size=9)
    name = "gpt_neox.layers.0.attention.query_key_value"
    save_adapter(tmp_path, {name: (96, 32)})
    assert [module.name for module in adapter_modules(read(tmp_path, spec), spec, 8)] == [name]
    save_adapter(tmp_path, {name: (96, 32)}, r=3)
    assert "has shape [4, 32]" in refused(tmp_path, spec)


def test_files_that_have_changed_since_are_refused(tmp_path: Path) -> None:
    save_adapter(tmp_path, SHAPES)
    adapter = read(tmp_path)
    save_adapter(tmp_path, SHAPES, seed=1)
    with pytest.raises(AdapterError, match="have changed since adapter one was read"):
        adapter_modules(adapter, SPEC, 8)


def test_a_damaged_name_is_told_in_one_short_line(tmp_path: Path) -> None:
    name = "a\nb" * 1000
    write_adapter(tmp_path, {name: np.zeros(1, np.float32)}, {"r": 4, "lora_alpha": 8})
    assert len(refused(tmp_path)) < 1100


@pytest.mark.parametrize(
    ("architecture", "name", "ours"),
    [
        ("GPT2LMHeadModel", "transformer.h.1.attn.c_attn", "layers.1.self_attn.qkv_proj"),
        ("GPT2LMHeadModel", "transformer.h.1.attn.c_proj", "layers.1.self_attn.o_proj"),
        ("GPT2LMHeadModel", "h.1.mlp.c_proj", "layers.1.mlp.down_proj"),
        ("OPTForCausalLM", "model.decoder.layers.1.fc1", "layers.1.mlp.up_proj"),
        ("OPTForCausalLM", "model.decoder.layers.1.self_attn.out_proj", "layers.1.self_attn.o_proj"),
        ("Phi3ForCausalLM", "model.layers.1.mlp.gate_up_proj", "layers.1.mlp.gate_up_proj"),
    ],
)
def test_names_of_other_architectures(tmp_path: Path, architecture: str, name: str, ours: str) -> None:
    merged = architecture != "OPTForCausalLM"
    spec = msgspec.structs.replace(SPEC, architecture=architecture, merged_projections=merged, num_kv_heads=4)
    shape = module_shapes(spec, 1)[ours.removeprefix("layers.1.")]
    save_adapter(tmp_path, {name: shape})
    assert [module.name for module in adapter_modules(read(tmp_path, spec), spec, 8)] == [ours]


def test_a_config_larger_than_any_is_not_read(tmp_path: Path) -> None:
    save_adapter(tmp_path, SHAPES)
    with (tmp_path / "adapter_config.json").open("r+b") as file:
        file.truncate(65 << 20)
    assert "is larger than" in refused(tmp_path)


def test_a_config_says_more_than_we_read(tmp_path: Path) -> None:
    save_adapter(tmp_path, SHAPES, target_modules=["q_proj"], fan_in_fan_out=True, lora_dropout=0.1, task_type="X")
    assert json.loads((tmp_path / "adapter_config.json").read_text())["fan_in_fan_out"] is True
    assert read(tmp_path).rank == 4
