"""SafetensorsCheckpoint: a directory of .safetensors files."""

from __future__ import annotations

import math
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from model_runner.checkpoint import CheckpointTensor
from protos.errors import StartupError
from protos.json_files import read_json_object
from protos.tensor_names import renamed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from model_runner.target import Target
    from protos.architecture import Architecture

_FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Tensor types of safetensors that hold weights as they are, with their size in bytes."""
MAPPED_BYTES = 64 << 20


class SafetensorsCheckpoint:
    """A directory of .safetensors files: one, or the shards that an index names."""

    def __init__(self, directory: Path, architecture: Architecture | None) -> None:
        """An architecture without a row of its own has names and weights as the model wants them."""
        self._renamed = {} if architecture is None else architecture.renamed
        self._norm_offset = 0.0 if architecture is None else architecture.norm_offset
        self._files = _safetensors_files(directory)

    def tensors(self) -> list[CheckpointTensor]:
        """What the files hold. Raises StartupError naming a file that is cut short or no safetensors."""
        found = []
        for file in self._files:
            with _opened(file) as shard:
                for source_name in shard.offset_keys():
                    entry = shard.get_slice(source_name)
                    shape, dtype = tuple(entry.get_shape()), entry.get_dtype()
                    if dtype not in _FLOATS:
                        raise StartupError(
                            f"{file}: tensor {source_name} has type {dtype}; supported are {', '.join(_FLOATS)}"
                        )
                    usual, nbytes = renamed(source_name, self._renamed), math.prod(shape) * _FLOATS[dtype]
                    found.append(CheckpointTensor(file, usual, source_name, shape, nbytes))
        return found

    def read(self, wanted: list[CheckpointTensor], table: dict[str, Target]) -> Iterator[int]:
        """Fills the table's targets; yields the bytes read with each. Of a file no more than MAPPED_BYTES and one
        tensor are in memory at a time: what was read of a mapped file stays resident until it is closed."""
        mapped = 0

        def mapping(tensor: CheckpointTensor) -> tuple[Path, int]:
            nonlocal mapped
            mapped += table[tensor.name].share(tensor.nbytes)
            return tensor.file, mapped // MAPPED_BYTES

        for (file, _), tensors in groupby(wanted, mapping):
            with _opened(file) as shard:
                for tensor in tensors:
                    target = table[tensor.name]
                    self._fill(target, tensor, shard)
                    yield target.share(tensor.nbytes)

    def _fill(self, target: Target, tensor: CheckpointTensor, shard: safe_open) -> None:
        weights = shard.get_tensor(tensor.source_name)  # a view of the mapped file: read where it is copied
        if weights.shape != tensor.shape:
            rows = weights.view(-1, *tensor.shape[1:])
            weights = rows[tensor.first_row : tensor.first_row + tensor.shape[0]]
        target.store(weights)
        if self._norm_offset and tensor.name.endswith("norm.weight"):
            for _, view in target.pieces():
                view += self._norm_offset


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
