"""SafetensorsCheckpoint: a directory of .safetensors files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from model_runner.checkpoint import CheckpointTensor
from protos.errors import StartupError
from protos.json_files import read_json_object

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

_FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Tensor types of safetensors that hold weights as they are, with their size in bytes."""


class SafetensorsCheckpoint:
    """A directory of .safetensors files: one, or the shards that an index names.

    `norm_offset` is added to the weights of norms.
    """

    def __init__(self, directory: Path, norm_offset: float = 0.0) -> None:
        self._norm_offset = norm_offset
        self._files = _safetensors_files(directory)

    def tensors(self) -> list[CheckpointTensor]:
        """What the files hold. Raises StartupError naming a file that is cut short or no safetensors."""
        found = []
        for file in self._files:
            with _opened(file) as shard:
                for name in shard.offset_keys():
                    entry = shard.get_slice(name)
                    shape, dtype = tuple(entry.get_shape()), entry.get_dtype()
                    if dtype not in _FLOATS:
                        raise StartupError(
                            f"{file}: tensor {name} has type {dtype}; supported are {', '.join(_FLOATS)}"
                        )
                    found.append(CheckpointTensor(file, name, name, shape, math.prod(shape) * _FLOATS[dtype]))
        return found

    def read(self, wanted: list[CheckpointTensor], table: dict[str, torch.Tensor]) -> Iterator[int]:
        """Fills the table's slices; yields the bytes read with each. Shards are mapped one at a time."""
        for file in self._files:
            with _opened(file) as shard:
                for tensor in wanted:
                    if tensor.file == file:
                        table[tensor.name].copy_(shard.get_tensor(tensor.source_name))
                        if self._norm_offset and tensor.name.endswith("norm.weight"):
                            table[tensor.name] += self._norm_offset
                        yield tensor.nbytes


def _safetensors_files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.exists():
        try:
            names = sorted(set(read_json_object(index)["weight_map"].values()))
        except (KeyError, AttributeError, TypeError):
            raise StartupError(f"{index}: is not an index of shards") from None
        for name in names:
            if not isinstance(name, str) or name in ("", "..") or Path(name).name != name or "\0" in name:
                raise StartupError(f"{index}: names {name!r}, which is no file beside it")
            if not (directory / name).is_file():
                raise StartupError(f"{directory / name}: no such file, but {index.name} names it")
        return [directory / name for name in names]
    files = sorted(file for file in directory.glob("*.safetensors") if not file.name.startswith("consolidated"))
    if not files:
        raise StartupError(f"{directory}: has no .safetensors files; convert the weights to safetensors or GGUF")
    return files


def _opened(file: Path) -> safe_open:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise StartupError(f"{file}: is cut short or no safetensors file ({error})") from None
