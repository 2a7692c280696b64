"""Adapters of tiny models, and transformers' model with one merged into its weights."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from transformers.pytorch_utils import Conv1D

from tests.adapter_files import save_adapter

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

OTHERS = {"lm_head", "project_in", "project_out", "gate", "experts"}
"""What linear modules are part of that adapters are not for."""


def linear_shapes(model: Any) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of the modules of transformers' model that an adapter may be for, by their names there."""
    shapes = {}
    for name, module in model.named_modules():
        if type(module) in (torch.nn.Linear, Conv1D) and not set(name.split(".")) & OTHERS:
            outs, ins = module.weight.shape[::-1] if isinstance(module, Conv1D) else module.weight.shape
            shapes[name] = outs, ins
    return shapes


def merged(model: Any, tensors: dict[str, np.ndarray], scale: float) -> Any:
    """Each weight W as W + scale * B A."""
    model = copy.deepcopy(model)
    modules = dict(model.named_modules())
    for name, a in tensors.items():
        if name.endswith("lora_A.weight"):
            module = modules[name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")]
            b = tensors[name.replace("lora_A", "lora_B")]
            added = scale * torch.from_numpy(b).double() @ torch.from_numpy(a).double()
            with torch.no_grad():
                weight = module.weight.mT if isinstance(module, Conv1D) else module.weight
                weight.copy_(weight.double() + added)
    return model


def save_adapted(directory: Path, model: Any, count: int = 2, size: float = 0.2, **config: Any) -> list[Any]:
    """Adapters `one`, `two`, ... of all linear modules, of ranks 4, 6, ...; the model with each merged into it."""
    models = []
    for index, name in enumerate(("one", "two", "three")[:count]):
        rank = 4 + 2 * index
        tensors = save_adapter(directory / name, linear_shapes(model), rank, seed=index, size=size, **config)
        models.append(merged(model, tensors, 2.0))
    return models
