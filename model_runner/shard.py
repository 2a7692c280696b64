"""Shard: a worker's part of one dimension of the model; and whether a model can be shared out at all."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from protos.errors import StartupError
from protos.model_spec import ModelSpec

if TYPE_CHECKING:
    from protos.model_spec import BasicSpec
    from protos.place import Place

_MOST_WORKERS = 64
"""Sizes looked at to name those that would do."""


class Shard(NamedTuple):
    """`size` of `whole` places, from `first` on."""

    whole: int
    first: int
    size: int

    def times(self, count: int) -> Shard:
        """The same where each place is `count` places."""
        return Shard(self.whole * count, self.first * count, self.size * count)

    @property
    def is_whole(self) -> bool:
        return self.size == self.whole


def all_of(size: int) -> Shard:
    """Of what every worker holds."""
    return Shard(size, 0, size)


def evenly(size: int, place: Place) -> Shard:
    """Of what the workers of a stage hold equal parts of."""
    part = size // place.tensor_size
    return Shard(size, place.tensor_rank * part, part)


def kv_heads(num_kv_heads: int, place: Place) -> Shard:
    """The KV heads that the query heads of a worker look at: where there are fewer than workers, neighbours each
    hold the same one."""
    if num_kv_heads >= place.tensor_size:
        return evenly(num_kv_heads, place)
    return Shard(num_kv_heads, place.tensor_rank * num_kv_heads // place.tensor_size, 1)


def rows_each(vocab_size: int, place: Place) -> int:
    """Rows of the vocabulary that every worker has room for."""
    return -(-vocab_size // place.tensor_size)


def vocabulary(size: int, place: Place) -> Shard:
    """What a worker fills of its rows: all, but that the last ones may go short."""
    rows = rows_each(size, place)
    first = min(size, rows * place.tensor_rank)
    return Shard(size, first, min(rows, size - first))


def spec_to_cut(spec: BasicSpec, flag: str) -> ModelSpec:
    """The spec of a model that several workers are to share, as the flag wants. Raises StartupError if they cannot."""
    if not isinstance(spec, ModelSpec):
        raise StartupError(
            f"{flag}: architecture {spec.architecture} is computed by transformers' own code, which is not cut; "
            "leave it at 1"
        )
    return spec


def check_sizes(spec: BasicSpec, place: Place) -> None:
    """Raises StartupError, with the sizes that would do, where the workers of a stage cannot share a model's layers."""
    size = place.tensor_size
    if size == 1:
        return
    spec = spec_to_cut(spec, f"--tensor-parallel-size {size}")
    if obstacle := _obstacle(spec, size):
        sizes = [str(other) for other in range(1, _MOST_WORKERS + 1) if not _obstacle(spec, other)]
        raise StartupError(
            f"--tensor-parallel-size {size} does not divide the model's {obstacle}; it can be {', '.join(sizes)}"
        )


def _obstacle(spec: ModelSpec, size: int) -> str:
    """What of the model cannot be shared out to so many workers; nothing where all can."""
    numbers = {"attention heads": spec.num_heads}
    if spec.moe is not None:
        numbers["places inside an expert"] = spec.moe.intermediate_size
    if any(not spec.is_sparse(layer) for layer in range(spec.num_layers)):
        numbers["places inside an MLP"] = spec.intermediate_size
    for what, number in numbers.items():
        if number % size:
            return f"{number} {what}"
    if spec.num_kv_heads % size and size % spec.num_kv_heads:
        return f"{spec.num_kv_heads} KV heads, nor do they divide it"
    return ""
