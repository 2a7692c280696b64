"""Weights: fills a model from its checkpoint, tensor by tensor, into the targets of the model's table."""

from __future__ import annotations

import dataclasses
from collections import Counter
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING

import torch

from model_runner.checkpoint import unstacked
from model_runner.models import make_model
from model_runner.parallel import Workers
from protos.architectures import ARCHITECTURES
from protos.errors import StartupError
from protos.tensor_names import bare_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Set
    from pathlib import Path

    from model_runner.checkpoint import Checkpoint, CheckpointTensor
    from model_runner.device import DevicePolicy
    from model_runner.target import Target
    from protos.config import LoadFormat
    from protos.model_spec import ModelSpec

_COMPUTED = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached", ".attn.bias", ".attn.masked_bias")
"""Tensors of old checkpoints that follow from the config, or are masks."""


def load_weights(
    path: Path,
    spec: ModelSpec,
    load_format: LoadFormat,
    table: dict[str, Target],
    report: Callable[[int, int], None],
    elsewhere: Set[str] = frozenset(),
) -> None:
    """Fills every target of the table from the checkpoint at `path`, converting to its type.

    Nothing is read before all names and shapes are known to fit, and then only what this worker holds. Beside the
    model, memory holds one tensor (GGUF) or the mapped part of a shard. `report(done, total)` counts the bytes read.
    `elsewhere` are the names of what other stages hold. Raises StartupError naming the file and the tensor at fault.
    """
    table = _as_stored(path, spec, table)
    checkpoint = _open(path, spec, load_format, table)
    wanted = _check(path, checkpoint.tensors(), table, spec, elsewhere)
    done, total = 0, sum(table[tensor.name].share(tensor.nbytes) for tensor in wanted)
    report(done, total)
    with _one_thread():
        for nbytes in checkpoint.read(wanted, table):
            done += nbytes
            report(done, total)


def held_as(table: dict[str, Target], policy: DevicePolicy) -> str:
    """What matrices are held as, in words, the most bytes first; nothing where all are floats of the policy's type."""
    sizes: Counter[str] = Counter()
    for target in table.values():
        if len(target.shape) > 1:
            for kind, nbytes in target.held():
                sizes[kind] += nbytes
    if set(sizes) <= {policy.dtype_name}:
        return ""
    shares = [(kind, round(100 * size / max(1, sizes.total()))) for kind, size in sizes.most_common()]
    kinds = [f"{kind} {share} %" for kind, share in shares if share]
    is_rounded = any("integers" in kind for kind in sizes)
    told = ", ".join(kinds) if len(kinds) > 1 else shares[0][0]
    return told + f"; activations {policy.activation_bits} bits" * is_rounded


def check_weights(path: Path, spec: ModelSpec, load_format: LoadFormat, policy: DevicePolicy) -> None:
    """Raises StartupError where the files do not hold what the spec needs: before memory is taken for any of it."""
    try:
        shapes = whole_table(spec, policy)
    except ValueError as error:
        raise StartupError(f"{path}: {error}") from None
    shapes = _as_stored(path, spec, shapes)
    _check(path, _open(path, spec, load_format, shapes).tensors(), shapes, spec)


def whole_table(spec: ModelSpec, policy: DevicePolicy) -> dict[str, Target]:
    """That of a model whose stages are all here, without memory behind it."""
    return make_model(spec, 1, dataclasses.replace(policy, device=torch.device("meta"), workers=Workers())).weights()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Copies are bound by memory: more threads gain nothing, and lose much where they wait for a busy core."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _open(path: Path, spec: ModelSpec, load_format: LoadFormat, table: dict[str, Target]) -> Checkpoint:
    if load_format == "dummy":
        from model_runner.dummy_weights import DummyCheckpoint

        return DummyCheckpoint(path, table)
    architecture = ARCHITECTURES.get(spec.architecture)
    if path.suffix != ".gguf":
        from model_runner.safetensors_weights import SafetensorsCheckpoint

        return SafetensorsCheckpoint(path, architecture)
    from model_runner.gguf_weights import GGUFCheckpoint

    pair_heads = {"q_proj": spec.num_heads, "k_proj": spec.num_kv_heads} if architecture.gguf_permuted else {}
    return GGUFCheckpoint(path, architecture.gguf_names, pair_heads)


def _as_stored(path: Path, spec: ModelSpec, table: dict[str, Target]) -> dict[str, Target]:
    """The table, its matrices turned as the files have them."""
    architecture = ARCHITECTURES.get(spec.architecture)
    if path.suffix == ".gguf" or architecture is None or not architecture.transposed:
        return table
    return {name: target.turned if name.endswith("proj.weight") else target for name, target in table.items()}


def _check(
    path: Path,
    tensors: list[CheckpointTensor],
    table: dict[str, Target],
    spec: ModelSpec,
    elsewhere: Set[str] = frozenset(),
) -> list[CheckpointTensor]:
    """The tensors to read: each entry of the table once, in the order of the files.

    Raises StartupError naming the file and the tensor that is missing, unexpected or of another shape.
    """
    wanted = []
    known = table.keys() | elsewhere
    names = {bare_name(name): name for name in known}

    def table_name(tensor: CheckpointTensor) -> str:
        return tensor.name if tensor.name in known else names.get(bare_name(tensor.name), tensor.name)

    whole = ([tensor] if table_name(tensor) in known else unstacked(tensor) for tensor in tensors)
    for tensor in chain.from_iterable(whole):
        name = table_name(tensor)
        if name in elsewhere:
            continue
        target = table.get(name)
        if target is None:
            if tensor.name.endswith(_COMPUTED) or spec.ignores(tensor.name) or spec.ignores(bare_name(tensor.name)):
                continue
            raise StartupError(f"{tensor.file}: tensor {tensor.source_name} has no place in this architecture")
        if tensor.shape != target.shape:
            raise StartupError(
                f"{tensor.file}: tensor {tensor.source_name} has shape {list(tensor.shape)}, "
                f"the config says {list(target.shape)}"
            )
        wanted.append(dataclasses.replace(tensor, name=name))
    found: set[str] = set()
    for tensor in wanted:
        if tensor.name in found:
            raise StartupError(f"{tensor.file}: tensor {tensor.source_name} occurs twice")
        found.add(tensor.name)
    for name in table:
        if name not in found:
            raise StartupError(f"{path}: has no tensor {name}")
    return wanted
