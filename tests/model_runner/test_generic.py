"""The generic backend: tiny random models of every architecture in its table compute what transformers computes."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from model_runner.models import hf_module
from model_runner.models.hf_module import build_module
from protos.architectures import ARCHITECTURES
from protos.errors import StartupError
from protos.generic_architectures import GENERIC
from tests.model_runner.driver import Driver, Generation
from tests.model_runner.greedy import NEAR_TIE
from tests.model_runner.tiny import VOCAB, chunk_logits, load_tiny, reference_logits, save_tiny

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TOKENS = np.random.default_rng(5).integers(0, VOCAB, 90).tolist()
ENDS = [1, 20, 41, 90]
NUM_TOKENS = 32
TOLERANCE = 2e-4
WINDOW: dict[str, Any] = {
    "sliding_window": 30,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
GPT: dict[str, Any] = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512, "n_inner": 96}
MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "head_dim": 8,
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED: dict[str, Any] = EXPERTS | {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
HEADS: dict[str, Any] = {"head_dim": 16}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 20,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
}
CASES: dict[str, dict[str, Any]] = {
    "AfmoeForCausalLM": EXPERTS | WINDOW | {"num_experts": 4, "num_dense_layers": 1},
    "ApertusForCausalLM": {},
    "ArceeForCausalLM": {},
    "BitNetForCausalLM": {},
    "CodeGenForCausalLM": GPT | {"rotary_dim": 8},
    "CohereForCausalLM": {},
    "Cohere2ForCausalLM": WINDOW,
    "CwmForCausalLM": WINDOW | HEADS,
    "DeepseekV2ForCausalLM": ROUTED | MLA | {"topk_method": "group_limited_greedy"},
    "DeepseekV3ForCausalLM": ROUTED | MLA | {"rope_parameters": YARN},
    "Dots1ForCausalLM": ROUTED | WINDOW,
    "Ernie4_5ForCausalLM": HEADS,
    "Ernie4_5_MoeForCausalLM": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
    "Exaone4ForCausalLM": WINDOW,
    "FlexOlmoForCausalLM": EXPERTS | {"num_experts": 4},
    "GPTBigCodeForCausalLM": GPT,
    "GPTJForCausalLM": GPT | {"rotary_dim": 8},
    "GPTNeoXForCausalLM": {},
    "GemmaForCausalLM": HEADS,
    "GlmForCausalLM": HEADS,
    "Glm4ForCausalLM": HEADS,
    "Glm4MoeForCausalLM": ROUTED | HEADS,
    "Glm4MoeLiteForCausalLM": ROUTED | MLA,
    "GraniteForCausalLM": {"attention_multiplier": 0.2, "logits_scaling": 3.0, "embedding_multiplier": 2.0},
    "GraniteMoeForCausalLM": EXPERTS | {"num_local_experts": 4, "attention_multiplier": 0.2, "logits_scaling": 3.0},
    "HeliumForCausalLM": HEADS,
    "HunYuanDenseV1ForCausalLM": HEADS,
    "HunYuanMoEV1ForCausalLM": HEADS | {"num_experts": 4, "moe_topk": 2},
    "MiniCPM3ForCausalLM": MLA,
    "MiniMaxM2ForCausalLM": HEADS | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "MinistralForCausalLM": WINDOW | HEADS,
    "Ministral3ForCausalLM": HEADS | {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.5}},
    "NanoChatForCausalLM": {},
    "NemotronForCausalLM": HEADS,
    "OlmoForCausalLM": {"clip_qkv": 3.0},
    "OlmoeForCausalLM": {"num_experts": 4, "num_experts_per_tok": 2},
    "PersimmonForCausalLM": {},
    "PhiForCausalLM": {},
    "PhimoeForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen2MoeForCausalLM": EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 48},
    "SeedOssForCausalLM": HEADS,
    "SolarOpenForCausalLM": ROUTED | HEADS,
    "Starcoder2ForCausalLM": {"sliding_window": 30},
    "VaultGemmaForCausalLM": WINDOW | HEADS | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 6.0},
}


def save(directory: Path, architecture: str, **changes: Any) -> Any:
    ids = {"pad_token_id": None, "bos_token_id": 0, "eos_token_id": 1}
    return save_tiny(directory, architecture, **ids | changes)


def check_greedy(model: Any, generation: Generation) -> None:
    """Each token drawn is the one transformers would draw behind those before it."""
    start = generation.num_prompt_tokens
    logits = reference_logits(model, generation.token_ids, list(range(start, start + NUM_TOKENS)))
    gaps = logits.max(-1).values - logits[torch.arange(NUM_TOKENS), generation.output]
    assert gaps.max() < NEAR_TIE, f"token {int(gaps.argmax())} of the prompt of {start}"


def test_every_architecture_of_the_table_is_tested():
    assert CASES.keys() == GENERIC.keys()
    assert not GENERIC.keys() & ARCHITECTURES.keys()


@pytest.mark.parametrize("architecture", CASES)
def test_logits_and_greedy_tokens_equal_transformers(architecture: str, tmp_path: Path):
    """In chunks; then in a batch, in chunks, behind prefix hits."""
    model = save(tmp_path, architecture, **CASES[architecture])
    assert GENERIC[architecture].model_type == model.config.model_type
    runner = load_tiny(tmp_path)
    ours = chunk_logits(runner, TOKENS, ENDS)
    torch.testing.assert_close(ours, reference_logits(model, TOKENS, ENDS), atol=TOLERANCE, rtol=0)

    driver = Driver(runner, 64, 8)
    first = driver.add(TOKENS[:50], NUM_TOKENS)
    driver.run([first])
    prompts = [TOKENS[:50] + TOKENS[:9], [*TOKENS[:40], 1, 2, 3], TOKENS[7:20]]
    generations = [driver.add(prompt, NUM_TOKENS) for prompt in prompts]
    assert [driver.share_prefix(generation, first) for generation in generations] == [48, 32, 0]
    driver.run(generations, budget=10)
    for generation in (first, *generations):
        check_greedy(model, generation)


@pytest.mark.parametrize("architecture", ["GPTJForCausalLM", "DeepseekV3ForCausalLM"])
def test_sixteen_bit_logits_are_as_near_as_those_of_transformers(architecture: str, tmp_path: Path):
    model = save(tmp_path, architecture, **CASES[architecture], initializer_range=0.05)
    exact = reference_logits(model, TOKENS, ENDS)
    ours = chunk_logits(load_tiny(tmp_path, dtype="bfloat16"), TOKENS, ENDS)
    theirs = reference_logits(type(model).from_pretrained(tmp_path, dtype=torch.bfloat16), TOKENS, ENDS)
    assert (ours - exact).square().mean() < 1.5 * (theirs - exact).square().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_in_no_checkpoint_is_as_transformers_loads_it(dtype: torch.dtype, tmp_path: Path):
    model = save(tmp_path, "GPTJForCausalLM", **CASES["GPTJForCausalLM"])
    theirs = type(model).from_pretrained(tmp_path, dtype=dtype)
    ours = build_module(type(model), model.config, 512, dtype, torch.device("cpu"))
    for name, buffer in theirs.named_buffers():
        torch.testing.assert_close(ours.get_buffer(name), buffer, atol=0, rtol=0)


LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 4.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.5 * i for i in range(8)],
    "original_max_position_embeddings": 50,
}


@pytest.mark.parametrize(("max_model_len", "length"), [(50, 50), (512, 90)])
def test_longrope_is_fixed_for_the_longest_sequence_served(max_model_len: int, length: int, tmp_path: Path):
    model = save(tmp_path, "ArceeForCausalLM", rope_parameters=LONGROPE)
    tokens, ends = TOKENS[:length], [10, length]
    ours = chunk_logits(load_tiny(tmp_path, max_model_len=max_model_len), tokens, ends)
    torch.testing.assert_close(ours, reference_logits(model, tokens, ends), atol=TOLERANCE, rtol=0)


def test_dynamic_rope_does_not_follow_the_batch(tmp_path: Path):
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    model = save(tmp_path, "ArceeForCausalLM", max_position_embeddings=90, rope_parameters=rope)
    ours = chunk_logits(load_tiny(tmp_path), TOKENS, ENDS)
    torch.testing.assert_close(ours, reference_logits(model, TOKENS, ENDS), atol=TOLERANCE, rtol=0)
    with pytest.raises(StartupError, match="--max-model-len 91 is over the model's limit; set it to 90 or less"):
        load_tiny(tmp_path, max_model_len=91)


def test_tied_embeddings(tmp_path: Path):
    model = save(tmp_path, "ArceeForCausalLM", tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    ours = chunk_logits(load_tiny(tmp_path), TOKENS, ENDS)
    torch.testing.assert_close(ours, reference_logits(model, TOKENS, ENDS), atol=TOLERANCE, rtol=0)


def change_file(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> str:
    """Loads a model whose file was changed; the error, if it is refused."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    try:
        load_tiny(directory)
    except StartupError as error:
        return str(error).removeprefix(f"{directory}")
    return ""


def test_tensors_that_may_be_in_a_file_for_nothing(tmp_path: Path):
    save(tmp_path, "GPTNeoXForCausalLM", tie_word_embeddings=True)
    masks = {"gpt_neox.layers.0.attention.bias": torch.ones(1), "embed_out.weight": torch.ones(1)}
    rotary = {"gpt_neox.layers.0.attention.rotary_emb.inv_freq": torch.ones(1)}
    assert change_file(tmp_path, lambda tensors: tensors.update(masks | rotary)) == ""


EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda tensors: tensors.pop(EXPERT), f": has no tensor {EXPERT}"),
        (
            lambda tensors: tensors.update({EXPERT: torch.ones(32, 63)}),
            f"/model.safetensors: tensor {EXPERT} has shape [32, 63], the config says [32, 64]",
        ),
        (
            lambda tensors: tensors.update(surplus=torch.ones(1)),
            "/model.safetensors: tensor surplus has no place in this architecture",
        ),
    ],
)
def test_faults_of_files_name_the_tensor(change: Callable[..., object], problem: str, tmp_path: Path):
    """By its name in the file, which is not the module's."""
    save(tmp_path, "Qwen2MoeForCausalLM", **CASES["Qwen2MoeForCausalLM"])
    assert change_file(tmp_path, change) == problem


def test_weights_that_would_have_to_be_computed_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hf_module, "_KeepViews", contextlib.nullcontext)
    save(tmp_path, "Qwen2MoeForCausalLM", **CASES["Qwen2MoeForCausalLM"])
    with pytest.raises(StartupError, match=r"its checkpoints hold tensor .*experts\.0\.gate_proj\.weight in a form"):
        load_tiny(tmp_path)
