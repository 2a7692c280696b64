"""Adapter: a LoRA adapter beside the model, as all processes know it."""

from __future__ import annotations

import msgspec


class Adapter(msgspec.Struct, frozen=True, array_like=True):
    """An adapter that fits the model, as far as can be known without its numbers."""

    name: str
    path: str
    """Absolute, of the directory with adapter_config.json and adapter_model.safetensors."""
    digest: str
    """32 hex digits over the content of both: names the weights, wherever they lie."""
    rank: int
    """Largest of its modules."""
    num_bytes: int
    """Of its tensors, as they are in the file."""
