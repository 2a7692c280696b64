"""What weights of products are on a CPU: as the checkpoint has them, or as --quantization says."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch

from async_engine.commands import describe
from model_runner.parallel import Workers
from model_runner.quantise import QUANTISED, quantise
from protos.architectures import ARCHITECTURES
from protos.config import EngineConfig, build
from protos.errors import StartupError
from protos.messages import CoreReady
from protos.place import Place
from tests.model_runner.driver import Driver
from tests.model_runner.gguf_files import write_gguf
from tests.model_runner.test_tiny_greedy import FAMILIES
from tests.model_runner.tiny import (
    as_floats,
    chunk_logits,
    kept_weights,
    load_tiny,
    make_runner,
    save_shape,
    save_tiny,
    tensors,
)

if TYPE_CHECKING:
    from pathlib import Path

    from model_runner.layers.experts import Experts
    from model_runner.runner import ModelRunner

TOKENS = [(7 * i * i + 3) % 199 for i in range(100)]
ENDS = [1, 7, 40, 41, 99]
IN_VECTORS = {"head_dim": 16, "vocab_size": 208}
"""Sizes that the CPU kernels take."""
HAVE_EXPERTS = {"MixtralForCausalLM", "Qwen3MoeForCausalLM"}
WHOLE_ROTATION = {"Phi3ForCausalLM": {"partial_rotary_factor": 1.0}}
"""Where half of so small a head would be turned."""
COMPUTED_BY_TORCH = {"OPTForCausalLM": "aten.relu"}
"""In part, so that it is not recorded."""


def save_halves(
    directory: Path, architecture: str = "LlamaForCausalLM", dtype: str = "bfloat16", **changes: Any
) -> Any:
    model = save_tiny(directory, architecture, **FAMILIES[architecture] | changes).to(getattr(torch, dtype))
    model.save_pretrained(directory)
    return model


def load_exact_cache(path: Path, **options: Any) -> ModelRunner:
    """With keys and values as float32 has them, so that only weights make a difference."""
    return load_tiny(path, dtype="auto", kv_cache_dtype="float32", **options)


def kinds(runner: ModelRunner) -> dict[str, set[str]]:
    """What the model's weights are, by the last part of their names that says something."""
    found: dict[str, set[str]] = {}
    for name, target in runner.model.weights().items():
        found.setdefault(name.split(".")[-2], set()).update(kept.kind for kept in target.kept)
    return found


def assert_computes_with(runner: ModelRunner, exact: ModelRunner) -> None:
    """What a model of floats does that has the weights which the runner keeps as integers."""
    whole = tensors(exact)
    for name, weights in kept_weights(runner).items():
        whole[name].copy_(weights)
    ours, expected = chunk_logits(runner, TOKENS, ENDS), chunk_logits(exact, TOKENS, ENDS)
    assert (ours - expected).abs().max() < 3e-3 * expected.abs().max()


def weight_bytes(path: Path, **options: Any) -> int:
    config = build(EngineConfig, max_num_seqs=8, num_kv_blocks=64, **options)
    return make_runner(path, config).load(path, lambda done, total: None).weight_bytes


# 16 bits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "GPT2LMHeadModel", "Qwen3MoeForCausalLM"])
def test_16_bit_weights_stay_so_and_compute_what_floats_do(architecture: str, dtype: str, tmp_path: Path):
    save_halves(tmp_path, architecture, dtype)
    runner, exact = load_tiny(tmp_path, dtype="auto"), load_tiny(tmp_path)
    assert {kind for each in kinds(runner).values() for kind in each} == {dtype}
    whole = tensors(exact)
    for name, target in runner.model.weights().items():
        for place, kept in target.kept_pieces():
            theirs = whole[name].mT if target.is_turned else whole[name]
            assert torch.equal(as_floats(kept.weights), theirs[place])
    ours, expected = chunk_logits(runner, TOKENS, ENDS), chunk_logits(exact, TOKENS, ENDS)
    assert (ours - expected).abs().max() < 3e-6 * expected.abs().max() * len(TOKENS)
    if "Moe" not in architecture:
        assert torch.equal(chunk_logits(load_tiny(tmp_path, dtype="auto"), TOKENS, [99])[0], ours[-1])
    small, large = weight_bytes(tmp_path), weight_bytes(tmp_path, dtype="float32")
    assert 0.5 < small / large < 0.65, "norms and learned positions are of 32 bits"


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_16_bit_weights_of_a_gguf_file_stay_so(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With rows of q and k turned from pair order; read by as few rows as can be, which here are those of two heads."""
    monkeypatch.setattr("model_runner.gguf_rows._CHUNK_WEIGHTS", 1)
    model = save_tiny(tmp_path, "LlamaForCausalLM", num_attention_heads=8, num_key_value_heads=2)
    write_gguf(tmp_path / "tiny.gguf", model, "llama", kind)
    runner = load_tiny(tmp_path / "tiny.gguf", dtype="auto")
    assert kinds(runner)["q_proj"] == {{"F16": "float16", "BF16": "bfloat16"}[kind]}
    exact = tensors(load_tiny(tmp_path / "tiny.gguf"))
    for name, target in runner.model.weights().items():
        for _, kept in target.kept_pieces():
            assert torch.equal(as_floats(kept.weights), exact[name])


@pytest.mark.parametrize("architecture", sorted(FAMILIES.keys() - HAVE_EXPERTS))
def test_steps_of_a_model_of_16_bit_weights_are_one_program(
    architecture: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Prompts in pieces too, which do not draw, and batches of many sizes."""
    save_halves(tmp_path, architecture, **IN_VECTORS, **WHOLE_ROTATION.get(architecture, {}))
    outputs = []
    for options in ({}, {"graphs": "off", "num_threads": 1}, {"dtype": "float32"}):
        with caplog.at_level(logging.WARNING):
            runner = load_tiny(tmp_path, **{"dtype": "auto"} | options)
        driver = Driver(runner, 64, 8)
        generations = [driver.add([row, 9, 8, 7] * (1 + row % 3), 5 + 3 * row) for row in range(8)]
        driver.run(generations[:2], num_steps=2)
        driver.run(generations, budget=9)
        outputs.append([generation.output for generation in generations])
        is_recorded = not options and architecture not in COMPUTED_BY_TORCH
        assert (runner._graphs is not None and runner._graphs._program is not None) == is_recorded
    told = [record.getMessage() for record in caplog.records if record.name.startswith("model_runner")]
    assert len(told) == (architecture in COMPUTED_BY_TORCH)
    assert all(COMPUTED_BY_TORCH[architecture] in line for line in told)
    assert outputs[0] == outputs[1] == outputs[2]


def test_a_named_type_and_float32_files_are_as_they_were(tmp_path: Path):
    save_halves(tmp_path)
    for dtype in ("float32", "bfloat16"):
        runner = load_tiny(tmp_path, dtype=dtype)
        assert not any(target.kept for target in runner.model.weights().values())
    save_tiny(tmp_path, "LlamaForCausalLM")
    assert not any(target.kept for target in load_tiny(tmp_path, dtype="auto").model.weights().values())


# Integers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [4, 8])
def test_floats_become_the_nearest_integers(bits: int):
    torch.manual_seed(0)
    weights = torch.randn(7, 96) + 0.3
    values, scales, minimums = quantise(weights, bits)
    assert scales.dtype == torch.float32
    assert torch.equal(scales, scales.half().float())
    again = values.float().view(7, 3, 32) * scales[:, :, None]
    if minimums is not None:
        again += minimums[:, :, None]
    error = (again - weights.view(7, 3, 32)).abs()
    assert (error <= 0.51 * scales[:, :, None] + 1e-3 * weights.abs().max() * (bits == 4)).all()
    largest = values.abs() if bits == 8 else values
    assert (largest.view(7, 3, 32).amax(2) == 2 ** (bits - (bits == 8)) - 1).all()
    # What was quantised so is the same again.
    exact = quantise(again.flatten(1), bits)
    assert torch.equal(exact[0], values)


@pytest.mark.parametrize("bits", [4, 8])
def test_groups_of_zeros_and_of_what_is_no_number(bits: int):
    weights = torch.zeros(2, 64)
    weights[1, 40] = torch.nan
    values, scales, minimums = quantise(weights, bits)
    assert not values[0].any()
    assert torch.equal(scales.isnan(), torch.tensor([[False, False], [False, True]]))
    assert minimums is None or not minimums[0].any()


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_floats_are_quantised_at_load(quantization: str, dtype: str, tmp_path: Path):
    save_halves(tmp_path, dtype=dtype, tie_word_embeddings=False)
    runner, exact = load_exact_cache(tmp_path, quantization=quantization), load_tiny(tmp_path)
    bits = quantization.removeprefix("int")
    found = kinds(runner)
    assert found["q_proj"] == found["down_proj"] == {f"{bits}-bit integers"}
    assert found["embed_tokens"] == found["lm_head"] == {"8-bit integers"}
    whole, kept = tensors(exact), kept_weights(runner)
    for name, weights in kept.items():
        own = 8 if "embed" in name or "head" in name else int(bits)
        assert (weights - whole[name]).abs().max() < 1.2 * whole[name].abs().max() * 2.0 ** (1 - own)
    assert_computes_with(runner, exact)
    sizes = {name: weight_bytes(tmp_path, quantization=name) for name in ("auto", "int8", "int4")}
    assert sizes["int4"] < sizes["int8"] < 0.6 * sizes["auto"]


def test_integers_of_a_file_stay_what_they_are_unless_there_shall_be_none(tmp_path: Path):
    write_gguf(tmp_path / "tiny.gguf", save_tiny(tmp_path, "LlamaForCausalLM"), "llama", "Q4_1")
    kept = kept_weights(load_tiny(tmp_path / "tiny.gguf", dtype="auto"))
    again = kept_weights(load_tiny(tmp_path / "tiny.gguf", dtype="auto", quantization="int8"))
    assert kept.keys() == again.keys()
    assert all(torch.equal(kept[name], again[name]) for name in kept)
    none = load_tiny(tmp_path / "tiny.gguf", dtype="auto", quantization="none")
    assert not any(target.kept for target in none.model.weights().values())
    assert none._policy.dtype == torch.float32


def test_other_blocks_of_a_file_are_quantised_as_floats_are(tmp_path: Path):
    write_gguf(tmp_path / "tiny.gguf", save_tiny(tmp_path, "LlamaForCausalLM"), "llama", "F16")
    runner = load_exact_cache(tmp_path / "tiny.gguf", quantization="int8")
    assert {kind for each in kinds(runner).values() for kind in each} == {"8-bit integers"}
    assert_computes_with(runner, load_tiny(tmp_path / "tiny.gguf"))


def test_inputs_that_are_no_whole_groups_stay_as_they_are(tmp_path: Path):
    save_halves(tmp_path, intermediate_size=80)
    found = kinds(load_tiny(tmp_path, dtype="auto", quantization="int4"))
    assert found["gate_proj"] == {"4-bit integers"}
    assert found["down_proj"] == {"bfloat16"}


def test_random_weights_are_quantised_too_some_rows_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("model_runner.kept._CHUNK_WEIGHTS", 1)
    save_shape(tmp_path)
    runner = load_tiny(tmp_path, dtype="auto", quantization="int4", load_format="dummy")
    exact = tensors(load_tiny(tmp_path, load_format="dummy"))
    for name, weights in kept_weights(runner).items():
        assert (weights - exact[name]).abs().max() < 0.25 * exact[name].abs().max()
    assert len(kept_weights(runner)) > 20


@pytest.mark.parametrize("quantization", ["auto", "int8", "int4"])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "GPT2LMHeadModel", "MixtralForCausalLM"])
def test_workers_hold_parts_of_the_same_weights(architecture: str, quantization: str, tmp_path: Path):
    save_halves(tmp_path, architecture, intermediate_size=128, n_inner=128)
    whole = {
        name: torch.cat([as_floats(kept.weights) for kept in target.kept])
        for name, target in load_tiny(tmp_path, dtype="auto", quantization=quantization).model.weights().items()
        if target.kept
    }
    config = build(EngineConfig, num_kv_blocks=8, max_num_seqs=2, num_threads=1, quantization=quantization)
    for rank in range(2):
        runner = make_runner(tmp_path, config, Workers(Place(rank=rank, tensor_size=2)))
        runner.load(tmp_path, lambda done, total: None)
        for name, target in runner.model.weights().items():
            for place, kept in target.kept_pieces():
                theirs = whole[name][place]
                assert torch.equal(as_floats(kept.weights)[: len(theirs)], theirs), name


# Experts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
@pytest.mark.parametrize("architecture", ["MixtralForCausalLM", "Qwen3MoeForCausalLM"])
def test_experts_stay_the_integers_of_a_file(architecture: str, kind: str, tmp_path: Path):
    model = save_tiny(tmp_path, architecture, **FAMILIES[architecture])
    path = tmp_path / "tiny.gguf"
    write_gguf(path, model, ARCHITECTURES[architecture].gguf_name, kind)
    runner, exact = load_exact_cache(path), load_tiny(path)
    kept, whole = kept_weights(runner), tensors(exact)
    experts = [name for name in whole if ".experts." in name]
    assert experts
    for name in experts:
        torch.testing.assert_close(kept[name], whole[name], atol=1e-6, rtol=1e-6)
    ours, expected = chunk_logits(runner, TOKENS, ENDS), chunk_logits(exact, TOKENS, ENDS)
    assert (ours - expected).abs().max() < 3e-3 * expected.abs().max()
    assert weight_bytes(path) < 0.4 * weight_bytes(path, quantization="none")


def test_routers_are_not_quantised(tmp_path: Path):
    save_halves(tmp_path, "MixtralForCausalLM")
    found = kinds(load_tiny(tmp_path, dtype="auto", quantization="int4"))
    assert found["gate"] == {"bfloat16"}
    assert found["w1"] == {"4-bit integers"} if "w1" in found else found["gate_proj"] == {"4-bit integers"}


def test_a_row_of_an_expert_has_the_same_bits_whatever_is_beside_it(tmp_path: Path):
    save_halves(tmp_path, "MixtralForCausalLM")
    runner = load_tiny(tmp_path, dtype="auto", quantization="int8")
    experts = next(each for each in _experts(runner) if each._matrices)
    x = torch.randn(40, 64)
    ends = torch.tensor([13, 13, 30, 40])
    together = experts.times(x, ends)
    assert torch.equal(experts.times(x[5:6], torch.tensor([1, 1, 1, 1])), together[5:6])
    assert torch.equal(experts.times(x[20:32], torch.tensor([0, 0, 10, 12])), together[20:32])
    assert experts.times(x[:0], torch.tensor([0, 0, 0, 0])).shape == (0, together.shape[1])


def _experts(runner: ModelRunner) -> list[Experts]:
    return [layer.mlp.gate_up for layer in runner.model.layers]


# What is said ----------------------------------------------------------------------------------


def test_a_start_tells_what_weights_are(tmp_path: Path):
    save_halves(tmp_path, intermediate_size=80, tie_word_embeddings=False)

    def told(**options: Any) -> str:
        config = build(EngineConfig, max_num_seqs=8, num_kv_blocks=64, **options)
        return make_runner(tmp_path, config).load(tmp_path, lambda done, total: None).weights

    assert told() == "bfloat16"
    assert told(dtype="float32") == told(dtype="bfloat16") == ""
    assert told(quantization="int8", activation_bits="8") == "8-bit integers 77 %, bfloat16 23 %; activations 8 bits"
    mixed = told(quantization="int4")
    assert mixed.endswith("; activations 16 bits")
    assert {part.rsplit(" ", 2)[0] for part in mixed.split("; ")[0].split(", ")} == {
        "4-bit integers",
        "8-bit integers",
        "bfloat16",
    }
    line = describe(CoreReady(64, 1024, 16, 8, "float32", "cpu", 3 << 20, 1 << 20, weights=mixed))
    assert f"weights 3 MiB ({mixed}) + KV cache 1 MiB" in line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float32"}, "--quantization int8 does not go with --dtype float32; leave that at auto"),
        ({"dtype": "bfloat16"}, "--quantization int8 does not go with --dtype bfloat16; leave that at auto"),
    ],
)
def test_a_type_of_floats_and_integers_are_not_asked_for_together(
    options: dict[str, Any], message: str, tmp_path: Path
):
    save_halves(tmp_path)
    with pytest.raises(StartupError, match=message):
        load_tiny(tmp_path, quantization="int8", **options)


def test_without_the_kernels_nothing_is_quantised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save_halves(tmp_path)
    monkeypatch.setattr("kernels.cpu.load_library", lambda variant: None)
    assert not any(target.kept for target in load_tiny(tmp_path, dtype="auto").model.weights().values())
    with pytest.raises(StartupError, match="--quantization int4 is for a CPU with the C\\+\\+ kernels"):
        load_tiny(tmp_path, dtype="auto", quantization="int4")


def test_transformers_own_code_computes_with_floats(tmp_path: Path):
    save_tiny(tmp_path, "GPTNeoXForCausalLM")
    with pytest.raises(StartupError, match="GPTNeoXForCausalLM is computed by transformers' own code, on floats"):
        load_tiny(tmp_path, dtype="auto", quantization="int8")


def test_the_forms_are_those_of_gguf():
    assert (QUANTISED[8].group_bytes, QUANTISED[4].group_bytes) == (16 * (32 + 2), 16 * (16 + 4))
