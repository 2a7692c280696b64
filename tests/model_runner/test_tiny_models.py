"""Tiny random models of every architecture and RoPE kind have the logits that transformers computes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from protos.architectures import ARCHITECTURES
from tests.model_runner.tiny import VOCAB, chunk_logits, load_tiny, reference_logits, save_tiny

if TYPE_CHECKING:
    from pathlib import Path

TOKENS = np.random.default_rng(5).integers(0, VOCAB, 150).tolist()
ENDS = [1, 2, 7, 40, 41, 64, 150]
TOLERANCE = 2e-4
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.5 * i for i in range(8)],
    "original_max_position_embeddings": 100,
}
GEMMA = {
    "num_hidden_layers": 7,
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "num_key_value_heads": 1,
    "sliding_window": 30,
}
"""Seven layers: the sixth is the one global one."""
GEMMA2 = {
    "num_hidden_layers": 3,
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "num_key_value_heads": 2,
    "sliding_window": 30,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 5.0,
}
"""Caps low enough to matter."""
UNPADDED = {"pad_token_id": None}
"""Of architectures whose default is beyond the vocabulary here."""
PHI_LONGROPE = {
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 100,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + 0.1 * i for i in range(6)],
        "long_factor": [2.0 + 0.5 * i for i in range(6)],
    },
}
UNGROUPED = {"num_key_value_heads": 4}
GPT2 = UNGROUPED | {"n_inner": 96}
OPT = UNGROUPED | {"ffn_dim": 96, "init_std": 0.3}
QWEN3_MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "head_dim": 32}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama with biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama, tied, own head size": ("LlamaForCausalLM", {"tie_word_embeddings": True, "head_dim": 48}),
    "llama, one KV head": ("LlamaForCausalLM", {"num_key_value_heads": 1, "rms_norm_eps": 1e-2}),
    "llama, no grouping, odd sizes": (
        "LlamaForCausalLM",
        {"hidden_size": 60, "num_attention_heads": 3, "num_key_value_heads": 3, "intermediate_size": 50},
    ),
    "mistral with a window": ("MistralForCausalLM", {"sliding_window": 30}),
    "mistral without": ("MistralForCausalLM", {"sliding_window": None}),
    "qwen2": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen2 with a window everywhere": (
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 21, "max_window_layers": 0},
    ),
    "qwen2 with a window behind its first layer": (
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 21, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 32, "attention_bias": True}),
    "qwen3 with a window behind its first layer": (
        "Qwen3ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 21, "max_window_layers": 1},
    ),
    "smollm3": ("SmolLM3ForCausalLM", UNPADDED | {"num_hidden_layers": 5}),
    "smollm3, layers by name, biases": (
        "SmolLM3ForCausalLM",
        UNPADDED | {"no_rope_layers": [0, 1, 0], "attention_bias": True, "mlp_bias": True},
    ),
    "phi3": ("Phi3ForCausalLM", UNPADDED),
    "phi3 with a window": ("Phi3ForCausalLM", UNPADDED | {"sliding_window": 30}),
    "phi3 with longrope on three quarters of a head": ("Phi3ForCausalLM", UNPADDED | PHI_LONGROPE),
    "gemma2": ("Gemma2ForCausalLM", GEMMA2 | {"query_pre_attn_scalar": 48}),
    "gemma2 without caps": (
        "Gemma2ForCausalLM",
        GEMMA2 | {"attn_logit_softcapping": None, "final_logit_softcapping": None, "initializer_range": 0.1},
    ),
    "gemma3 with capped logits": ("Gemma3ForCausalLM", GEMMA | {"final_logit_softcapping": 4.0}),
    "olmo2": ("Olmo2ForCausalLM", {}),
    "olmo2, no grouping, biases": ("Olmo2ForCausalLM", {"num_key_value_heads": 4, "attention_bias": True}),
    "olmo3, scaled global rope": (
        "Olmo3ForCausalLM",
        {
            "num_hidden_layers": 5,
            "sliding_window": 30,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 500000.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 128,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
            },
        },
    ),
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "gpt2, untied, relu, own MLP size": (
        "GPT2LMHeadModel",
        GPT2 | {"tie_word_embeddings": False, "activation_function": "relu", "n_inner": 80},
    ),
    "opt": ("OPTForCausalLM", OPT),
    "opt, norms of the sums, projected embeddings, gelu": (
        "OPTForCausalLM",
        OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 32, "activation_function": "gelu_new"},
    ),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 4}),
    "mixtral, one expert, a window": (
        "MixtralForCausalLM",
        {"num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 30},
    ),
    "qwen3 moe": ("Qwen3MoeForCausalLM", QWEN3_MOE | {"norm_topk_prob": True}),
    "qwen3 moe, some layers dense, weights not normed, odd sizes": (
        "Qwen3MoeForCausalLM",
        QWEN3_MOE
        | {
            "num_hidden_layers": 5,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "moe_intermediate_size": 28,
            "attention_bias": True,
        },
    ),
    "gemma3": ("Gemma3ForCausalLM", GEMMA),
    "gemma3, a window smaller than a block": ("Gemma3ForCausalLM", GEMMA | {"sliding_window": 5}),
    "gemma3, untied, biases, own scale": (
        "Gemma3ForCausalLM",
        GEMMA | {"tie_word_embeddings": False, "attention_bias": True, "query_pre_attn_scalar": 100},
    ),
    "gemma3, scaled global rope, layers by name": (
        "Gemma3ForCausalLM",
        GEMMA
        | {
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "num_hidden_layers": 3,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 70.0},
            },
        },
    ),
    "rope linear": (
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}},
    ),
    "rope llama3": ("LlamaForCausalLM", {"rope_parameters": LLAMA3}),
    "rope yarn": (
        "Qwen2ForCausalLM",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            }
        },
    ),
    "rope longrope beyond the trained context": ("LlamaForCausalLM", {"rope_parameters": LONGROPE}),
    "rope dynamic within the trained context": (
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
    ),
}


def test_every_architecture_is_covered():
    from model_runner.models import MODELS

    assert {architecture for architecture, _ in CASES.values()} == ARCHITECTURES.keys() == MODELS.keys()


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path):
    architecture, changes = CASES[case]
    model = save_tiny(tmp_path, architecture, **changes)
    ours = chunk_logits(load_tiny(tmp_path), TOKENS, ENDS)
    torch.testing.assert_close(ours, reference_logits(model, TOKENS, ENDS), atol=TOLERANCE, rtol=0)


def test_longrope_within_the_trained_context(tmp_path: Path):
    model = save_tiny(tmp_path, "LlamaForCausalLM", rope_parameters=LONGROPE)
    tokens, ends = TOKENS[:100], [1, 50, 100]
    ours = chunk_logits(load_tiny(tmp_path, max_model_len=100), tokens, ends)
    torch.testing.assert_close(ours, reference_logits(model, tokens, ends), atol=TOLERANCE, rtol=0)


def test_dynamic_rope_beyond_the_trained_context(tmp_path: Path):
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = save_tiny(tmp_path, "LlamaForCausalLM", rope_parameters=rope, max_position_embeddings=64)
    ours = chunk_logits(load_tiny(tmp_path, max_model_len=150), TOKENS, [150])
    torch.testing.assert_close(ours, reference_logits(model, TOKENS, [150]), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.25), ("float16", 0.03)])
def test_sixteen_bit_logits_stay_near(dtype: str, tolerance: float, tmp_path: Path):
    model = save_tiny(tmp_path, "LlamaForCausalLM", initializer_range=0.1)
    ours = chunk_logits(load_tiny(tmp_path, dtype=dtype), TOKENS, ENDS)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, reference_logits(model, TOKENS, ENDS), atol=tolerance, rtol=0)


@pytest.mark.parametrize("block_size", [8, 24, 64])
def test_block_sizes(block_size: int, tmp_path: Path):
    model = save_tiny(tmp_path, "LlamaForCausalLM")
    runner = load_tiny(tmp_path, block_size=block_size)
    ours = chunk_logits(runner, TOKENS, ENDS, block_size)
    torch.testing.assert_close(ours, reference_logits(model, TOKENS, ENDS), atol=TOLERANCE, rtol=0)
