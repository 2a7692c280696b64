"""CheckpointTensor: one tensor of a checkpoint, whatever the file format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import torch


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """One tensor of a checkpoint, not read yet."""

    file: Path
    name: str
    """As Hugging Face checkpoints name it."""
    source_name: str
    """As the file names it."""
    shape: tuple[int, ...]
    nbytes: int


class Checkpoint(Protocol):
    """The files of a model."""

    def tensors(self) -> list[CheckpointTensor]:
        """What the files hold, from their headers alone. Raises StartupError naming the file at fault."""
        ...

    def read(self, wanted: list[CheckpointTensor], table: dict[str, torch.Tensor]) -> Iterator[int]:
        """Fills the table's slices from the tensors wanted; yields the bytes read with each."""
        ...
