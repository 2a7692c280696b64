"""DummyCheckpoint: random weights in place of a model's files, to measure speed where there are none."""

from __future__ import annotations

import math
import zlib
from typing import TYPE_CHECKING

import torch

from model_runner.checkpoint import CheckpointTensor

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from model_runner.target import Target

SEED = 0


class DummyCheckpoint:
    """What a model with this table needs. The same weights each time: a core that dies is replaced by one like it.

    And whatever the number of workers: each makes all weights of its layers, and keeps its part.
    """

    def __init__(self, path: Path, table: dict[str, Target]) -> None:
        self._path = path
        self._table = table

    def tensors(self) -> list[CheckpointTensor]:
        return [
            CheckpointTensor(
                self._path, name, name, target.shape, math.prod(target.shape) * target.tensor.element_size()
            )
            for name, target in self._table.items()
        ]

    def read(self, wanted: list[CheckpointTensor], table: dict[str, Target]) -> Iterator[int]:
        """Matrices keep the size of what passes through them; vectors are norms, which do nothing, or biases of 0."""
        generator: torch.Generator | None = None
        for tensor in wanted:
            target = table[tensor.name]
            ours = target.tensor
            # Random numbers come in the order of memory, not of a view.
            is_all = not target.kept and ours.shape == tensor.shape and ours.is_contiguous()
            device = None if target.kept else ours.device
            whole = ours if is_all else torch.empty(tensor.shape, dtype=ours.dtype, device=device)
            generator = generator or torch.Generator(whole.device)
            generator.manual_seed(SEED ^ zlib.crc32(tensor.name.encode()))
            if whole.ndim > 1:
                whole.normal_(0.0, tensor.shape[-1] ** -0.5, generator=generator)
            else:
                whole.fill_(0.0 if tensor.name.endswith("bias") else 1.0)
            if whole is not ours:
                target.store(whole)
            yield target.share(tensor.nbytes)
