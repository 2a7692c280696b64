"""LoRA adapters as PEFT saves them, of random numbers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import save_file

if TYPE_CHECKING:
    from pathlib import Path

    Arrays = dict[str, np.ndarray]


def save_adapter(
    directory: Path,
    shapes: dict[str, tuple[int, int]],
    rank: int = 4,
    seed: int = 0,
    size: float = 0.3,
    dtype: type = np.float32,
    **config: Any,
) -> Arrays:
    """For modules by their names in transformers, of (outputs, inputs); returns the tensors, which now lie there."""
    generator = np.random.default_rng(seed)
    tensors = {}
    for name, (outs, ins) in shapes.items():
        for part, shape in (("A", (rank, ins)), ("B", (outs, rank))):
            tensor = generator.normal(0.0, size, shape).astype(dtype)
            tensors[f"base_model.model.{name}.lora_{part}.weight"] = tensor
    write_adapter(directory, tensors, {"r": rank, "lora_alpha": 2 * rank, **config})
    return tensors


def write_adapter(directory: Path, tensors: Arrays, config: dict[str, Any]) -> None:
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "bias": "none", **config}))
