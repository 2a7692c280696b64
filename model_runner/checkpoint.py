"""CheckpointTensor: one tensor of a checkpoint, whatever the file format and the names in it."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Protocol

from protos.config_spec import MAX_EXPERTS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from model_runner.target import Target

_STACKED = re.compile(r"(.*\.experts)\.(gate_up_proj|gate_proj|up_proj|down_proj)(?:\.weight)?")
"""Of all experts of a layer, in one tensor."""


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """One tensor of a checkpoint, or some rows of one; not read yet."""

    file: Path
    name: str
    """As the model's table names it: as Hugging Face checkpoints of Llama would."""
    source_name: str
    """As the file names it."""
    shape: tuple[int, ...]
    nbytes: int
    first_row: int = 0
    """Where it starts in the file's tensor, in rows of the last axis."""


class Checkpoint(Protocol):
    """The files of a model."""

    def tensors(self) -> list[CheckpointTensor]:
        """What the files hold, from their headers alone. Raises StartupError naming the file at fault."""
        ...

    def read(self, wanted: list[CheckpointTensor], table: dict[str, Target]) -> Iterator[int]:
        """Fills the table's targets from the tensors wanted; yields the bytes read with each."""
        ...


def unstacked(tensor: CheckpointTensor) -> list[CheckpointTensor]:
    """A tensor of all experts of a layer as one of each, and of their gates and ups apart; any other as it is."""
    match = _STACKED.fullmatch(tensor.name)
    if match is None or len(tensor.shape) != 3:
        return [tensor]
    prefix, name = match.groups()
    names = ["gate_proj", "up_proj"] if name == "gate_up_proj" else [name]
    experts, all_rows, size = tensor.shape
    if not 0 < experts <= MAX_EXPERTS or all_rows % len(names):
        return [tensor]
    rows = all_rows // len(names)
    return [
        dataclasses.replace(
            tensor,
            name=f"{prefix}.{place // len(names)}.{names[place % len(names)]}.weight",
            shape=(rows, size),
            nbytes=tensor.nbytes // (experts * len(names)),
            first_row=place * rows,
        )
        for place in range(experts * len(names))
    ]
