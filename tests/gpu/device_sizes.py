"""DeviceSizes: how much a check of a device does: on a GPU what its users do, on a CPU enough to try every line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

LLAMA_8B: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.02,
}
"""Llama 3 8B."""
SMALL: dict[str, Any] = LLAMA_8B | {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
}


@dataclass(frozen=True, slots=True)
class DeviceSizes:
    device: torch.device
    dtype: torch.dtype
    """Of the model."""
    model: dict[str, Any]
    """A config of transformers' LlamaForCausalLM."""
    batches: tuple[int, ...]
    """Sequences at once, in checks."""
    timed_batches: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int
    prefill_tokens: int
    """Of the prompts whose prefill is timed."""
    context: int
    """Keys of each row in the decode attention that is timed."""
    kv_tokens: int
    """That the KV cache of the model is to hold."""
    copy_bytes: int
    matrix: int
    """Rows and columns of the product that finds the matrix rate."""
    repeats: int
    """Of what is timed."""


def sizes(kind: str) -> DeviceSizes:
    if kind == "cuda":
        return DeviceSizes(
            device=torch.device("cuda", 0),
            dtype=torch.bfloat16,
            model=LLAMA_8B,
            batches=(1, 8, 64, 256),
            timed_batches=(1, 32, 256),
            prompt_tokens=128,
            output_tokens=64,
            prefill_tokens=8192,
            context=4096,
            kv_tokens=256 * 512,
            copy_bytes=4 << 30,
            matrix=8192,
            repeats=20,
        )
    return DeviceSizes(
        device=torch.device("cpu"),
        dtype=torch.float32,
        model=SMALL,
        batches=(1, 4),
        timed_batches=(1, 4),
        prompt_tokens=24,
        output_tokens=8,
        prefill_tokens=128,
        context=128,
        kv_tokens=1024,
        copy_bytes=1 << 22,
        matrix=256,
        repeats=3,
    )
