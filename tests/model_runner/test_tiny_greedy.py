"""Tiny random models of every architecture draw the tokens that transformers draws: in a batch, with prompts
in chunks, behind prefix hits; from safetensors and from GGUF; and in 16 bits as near as it does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from protos.architectures import ARCHITECTURES
from protos.model_files import read_model_spec
from tests.model_runner.driver import Driver
from tests.model_runner.gguf_files import write_gguf
from tests.model_runner.greedy import assert_greedy
from tests.model_runner.test_tiny_models import (
    CASES,
    ENDS,
    GEMMA,
    GEMMA2,
    GPT2,
    OPT,
    PHI_LONGROPE,
    QWEN3_MOE,
    TOKENS,
    TOLERANCE,
    UNPADDED,
)
from tests.model_runner.tiny import chunk_logits, load_tiny, reference_logits, save_tiny

if TYPE_CHECKING:
    from pathlib import Path

WINDOW, NUM_TOKENS = 30, 32
LOCAL_BEHIND_THE_FIRST = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
# Tied, a random model repeats its last token, and equal tokens would say little.
UNTIED = {"tie_word_embeddings": False}
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"sliding_window": WINDOW},
    "MixtralForCausalLM": {"num_local_experts": 4},
    "Qwen2ForCausalLM": LOCAL_BEHIND_THE_FIRST,
    "Qwen3ForCausalLM": LOCAL_BEHIND_THE_FIRST | {"head_dim": 32},
    "Qwen3MoeForCausalLM": QWEN3_MOE | {"norm_topk_prob": True},
    "SmolLM3ForCausalLM": UNPADDED | {"num_hidden_layers": 5},
    "Phi3ForCausalLM": UNPADDED | {"sliding_window": WINDOW, "partial_rotary_factor": 0.5},
    "Gemma2ForCausalLM": GEMMA2,
    "Gemma3ForCausalLM": GEMMA | {"final_logit_softcapping": 4.0},
    "Olmo2ForCausalLM": {},
    "Olmo3ForCausalLM": {"num_hidden_layers": 5, "sliding_window": WINDOW},
    "GPT2LMHeadModel": GPT2,
    "OPTForCausalLM": OPT,
}
IN_GGUF = [name for name in FAMILIES if ARCHITECTURES[name].gguf_name]
PROMPTS = [TOKENS[:size] for size in (1, 7, WINDOW - 1, WINDOW, WINDOW + 1, 64, 150)]
PROMPTS += [TOKENS[:48] + TOKENS[:20], [*TOKENS[:80], 1, 2, 3]]
"""Some of which begin alike."""


def test_every_architecture_is_covered():
    assert FAMILIES.keys() == ARCHITECTURES.keys()


@pytest.mark.parametrize("architecture", FAMILIES)
def test_greedy_tokens_equal_transformers(architecture: str, tmp_path: Path):
    model = save_tiny(tmp_path, architecture, **FAMILIES[architecture] | UNTIED)
    runner = load_tiny(tmp_path, max_num_seqs=16, num_kv_blocks=128)
    whole = Driver(runner, 128, 16)
    generations = [whole.add(prompt, NUM_TOKENS) for prompt in PROMPTS]
    whole.run(generations)
    for generation in generations:
        assert_greedy(model, generation.token_ids[: generation.num_prompt_tokens], generation.output)
    assert len({token for generation in generations for token in generation.output}) > 15

    # In chunks, and behind hits shorter and longer than the window.
    chunked = Driver(runner, 128, 16)
    first = chunked.add(TOKENS, 1)
    chunked.run([first], budget=40)
    again = [chunked.add(prompt, NUM_TOKENS) for prompt in PROMPTS]
    hits = {chunked.share_prefix(generation, first) for generation in again}
    assert {0, 16, 48, 80, 144} <= hits
    chunked.run(again, budget=13)
    for generation in again:
        assert_greedy(model, generation.token_ids[: generation.num_prompt_tokens], generation.output)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_sixteen_bit_logits_are_as_near_as_those_of_transformers(architecture: str, dtype: str, tmp_path: Path):
    spread = {"init_std" if architecture == "OPTForCausalLM" else "initializer_range": 0.05}
    model = save_tiny(tmp_path, architecture, **FAMILIES[architecture] | spread)
    exact = reference_logits(model, TOKENS, ENDS)
    ours = chunk_logits(load_tiny(tmp_path, dtype=dtype), TOKENS, ENDS)
    theirs = reference_logits(model.to(getattr(torch, dtype)), TOKENS, ENDS)
    assert (ours - exact).square().mean() < 1.5 * (theirs - exact).square().mean()


@pytest.mark.parametrize("architecture", IN_GGUF)
def test_logits_of_a_gguf_file_equal_transformers(architecture: str, tmp_path: Path):
    """Tied where it is the architecture's habit."""
    model = save_tiny(tmp_path, architecture, **FAMILIES[architecture] | {"use_sliding_window": False})
    path = tmp_path / "tiny.gguf"
    write_gguf(path, model, ARCHITECTURES[architecture].gguf_name)
    ours = chunk_logits(load_tiny(path), TOKENS, ENDS)
    torch.testing.assert_close(ours, reference_logits(model, TOKENS, ENDS), atol=TOLERANCE, rtol=0)


def test_an_olmo3_file_scales_its_global_layers_only(tmp_path: Path):
    architecture, changes = CASES["olmo3, scaled global rope"]
    model = save_tiny(tmp_path, architecture, **changes)
    path = tmp_path / "tiny.gguf"
    scaling = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}
    write_gguf(path, model, "olmo2", **scaling, rope__scaling__original_context_length=128)
    assert read_model_spec(path).architecture == "Olmo3ForCausalLM"
    ours = chunk_logits(load_tiny(path), TOKENS, ENDS)
    torch.testing.assert_close(ours, reference_logits(model, TOKENS, ENDS), atol=TOLERANCE, rtol=0)


def test_a_phi3_file_has_the_tables_of_longrope_as_tensors(tmp_path: Path):
    model = save_tiny(tmp_path, "Phi3ForCausalLM", **UNPADDED | PHI_LONGROPE)
    path = tmp_path / "tiny.gguf"
    write_gguf(path, model, "phi3")
    ours = chunk_logits(load_tiny(path), TOKENS, ENDS)
    torch.testing.assert_close(ours, reference_logits(model, TOKENS, ENDS), atol=TOLERANCE, rtol=0)
    ours = chunk_logits(load_tiny(path, max_model_len=100), TOKENS[:100], [7, 100])
    torch.testing.assert_close(ours, reference_logits(model, TOKENS[:100], [7, 100]), atol=TOLERANCE, rtol=0)
