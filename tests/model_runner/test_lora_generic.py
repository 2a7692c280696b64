"""LoRA adapters of models that transformers' own code computes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from kernels.reference import ReferenceOps
from model_runner.models.hf_module import hooked_linears
from protos.errors import AdapterError
from tests.adapter_files import save_adapter
from tests.model_runner.adapted import linear_shapes, save_adapted
from tests.model_runner.test_generic import CASES, save
from tests.model_runner.test_lora import assert_each_draws, load, load_adapters, outputs, run

if TYPE_CHECKING:
    from pathlib import Path

ARCHITECTURES = [
    *("GPTNeoXForCausalLM", "GPTBigCodeForCausalLM", "GPTJForCausalLM", "CohereForCausalLM", "GraniteForCausalLM"),
    *("DeepseekV3ForCausalLM", "Qwen2MoeForCausalLM", "PhimoeForCausalLM"),
]
"""The last three have experts, which get no adapter."""


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_rows_draw_what_merged_weights_draw(architecture: str, tmp_path: Path) -> None:
    model = save(tmp_path, architecture, **CASES[architecture])
    models: dict[int, Any] = dict(enumerate([model, *save_adapted(tmp_path, model)]))
    runner = load(tmp_path)
    load_adapters(runner, tmp_path, {1: "one", 2: "two"})
    generations = run(runner, [0, 1, 2], budget=50)
    assert_each_draws(generations, models)
    assert len({str(outputs(generations)[slot::3]) for slot in range(3)}) == 3
    runner.unload_adapter(1)
    load_adapters(runner, tmp_path, {1: "two"})
    assert_each_draws(run(runner, [1]), {1: models[2]})


def test_linear_modules_that_see_some_tokens_only_are_left_alone(tmp_path: Path) -> None:
    model = save(tmp_path, "GPTNeoXForCausalLM", **CASES["GPTNeoXForCausalLM"])
    model.gpt_neox.layers[0].mlp.experts = torch.nn.ModuleList([torch.nn.Linear(4, 4)])
    found = hooked_linears(model, ReferenceOps())
    assert found.keys() == {f"{name}.weight" for name in linear_shapes(model)}


@pytest.mark.parametrize(
    ("name", "shape", "problem"),
    [
        ("model.layers.0.mlp.experts.0.w1", (32, 64), "the model has no linear module"),
        ("lm_head", (199, 64), "the model has no linear module lm_head"),
        ("model.layers.3.self_attn.q_proj", (64, 64), "the model has no linear module"),
        ("model.layers.0.self_attn.q_proj", (32, 64), r"has shape \[32, 4\], not \[64, 4\] as module model.layers.0"),
        ("model.layers.0.self_attn.q_proj", (64, 60), r"has shape \[4, 60\], not \[4, 64\] as module model.layers.0"),
    ],
)
def test_modules_that_the_model_has_not(tmp_path: Path, name: str, shape: tuple[int, int], problem: str) -> None:
    save(tmp_path, "PhimoeForCausalLM", **CASES["PhimoeForCausalLM"])
    runner = load(tmp_path)
    save_adapter(tmp_path / "bad", {name: shape})
    with pytest.raises(AdapterError, match=problem):
        load_adapters(runner, tmp_path, {1: "bad"})
    with pytest.raises(RuntimeError, match="no adapter is in slot 1"):
        run(runner, [1])
