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
}
"""By the class name that Hugging Face configs use."""


def require(path: object, name: str) -> Architecture:
    """The row of an architecture. Raises StartupError naming it and the supported ones."""
    if name not in ARCHITECTURES:
        raise StartupError(f"{path}: architecture {name} is not supported; supported are {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]
