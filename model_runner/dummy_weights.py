"""DummyCheckpoint: random weights in place of a model's files, to measure speed where there are none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from model_runner.checkpoint import CheckpointTensor

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SEED = 0


class DummyCheckpoint:
    """What a model with this table needs. The same weights each time: a core that dies is replaced by one like it."""

    def __init__(self, path: Path, table: dict[str, torch.Tensor]) -> None:
        self._path = path
        self._table = table

    def tensors(self) -> list[CheckpointTensor]:
        return [
            CheckpointTensor(self._path, name, name, tuple(target.shape), target.nbytes)
            for name, target in self._table.items()
        ]

    def read(self, wanted: list[CheckpointTensor], table: dict[str, torch.Tensor]) -> Iterator[int]:
        """Matrices keep the size of what passes through them; vectors are norms, which do nothing, or biases of 0."""
        generator: torch.Generator | None = None
        for tensor in wanted:
            target = table[tensor.name]
            generator = generator or torch.Generator(target.device).manual_seed(SEED)
            if target.ndim > 1:
                target.normal_(0.0, target.shape[-1] ** -0.5, generator=generator)
            else:
                target.fill_(0.0 if tensor.name.endswith("bias") else 1.0)
            yield tensor.nbytes
