"""Architecture: what sets one supported model class apart from the others, a row each."""

from __future__ import annotations

from typing import Any

import msgspec

from protos.errors import StartupError


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """One row. Bias fields: None is as the config's own `attention_bias` says."""

    model_type: str
    """In config.json."""
    gguf_name: str | None
    """`general.architecture` of its GGUF files; None where another row's stands for it."""
    defaults: dict[str, Any]
    """Keys of config.json that may be absent, with the value absence means."""
    qkv_bias: bool | None = None
    out_bias: bool | None = None
    sliding_window: bool = False
    """Whether the config's sliding window counts; others carry the key without meaning it."""
    global_every: int = 0
    """Where a file names no layers: every n-th is global, the others have the window. 0: all have it."""
    local_rope_theta: float | None = None
    """Base of the rotary embedding of local layers, where the file does not say; None: as in the others."""
    qk_norm: bool = False
    post_norms: bool = False
    scaled_embeddings: bool = False
    """Embeddings are multiplied by the square root of their size."""
    norm_offset: float = 0.0
    """What safetensors leave out of the weights of norms; GGUF has them whole."""
    gguf_names: dict[str, str] = {}
    """GGUF's names of modules, where they are not what they are for Llama, with their Hugging Face names."""
    gguf_permuted: bool = False
    """GGUF stores the rows of q and k in pair order: each head's halves interleaved."""


ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture(
        model_type="llama",
        gguf_name="llama",
        defaults={"max_position_embeddings": 2048},
        gguf_permuted=True,
    ),
    "MistralForCausalLM": Architecture(
        model_type="mistral",
        gguf_name=None,
        defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
        qkv_bias=False,
        out_bias=False,
        sliding_window=True,
    ),
    "Qwen2ForCausalLM": Architecture(
        model_type="qwen2",
        gguf_name="qwen2",
        defaults={
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "use_sliding_window": False,
            "max_window_layers": 28,
        },
        qkv_bias=True,
        out_bias=False,
        sliding_window=True,
    ),
    "Gemma3ForCausalLM": Architecture(
        model_type="gemma3_text",
        gguf_name="gemma3",
        defaults={
            "num_key_value_heads": 4,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "max_position_embeddings": 131072,
            "hidden_activation": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
            "rope_theta": 1000000.0,
            "sliding_window": 4096,
            "bos_token_id": 2,
            "eos_token_id": 1,
        },
        sliding_window=True,
        global_every=6,
        local_rope_theta=10000.0,
        qk_norm=True,
        post_norms=True,
        scaled_embeddings=True,
        norm_offset=1.0,
        gguf_names={
            "attn_q_norm": "self_attn.q_norm",
            "attn_k_norm": "self_attn.k_norm",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
    ),
}
"""By the class name that Hugging Face configs use."""


def require(path: object, name: str) -> Architecture:
    """The row of an architecture. Raises StartupError naming it and the supported ones."""
    if name not in ARCHITECTURES:
        raise StartupError(f"{path}: architecture {name} is not supported; supported are {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]
