"""Weights: fills a model from its checkpoint, tensor by tensor, into the slices the model's table names."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from protos.architectures import ARCHITECTURES
from protos.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from model_runner.checkpoint import Checkpoint, CheckpointTensor
    from protos.model_spec import ModelSpec

_COMPUTED = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
"""Tensors of old checkpoints that follow from the config."""


def load_weights(
    path: Path, spec: ModelSpec, table: dict[str, torch.Tensor], report: Callable[[int, int], None]
) -> None:
    """Fills every slice of the table from the checkpoint at `path`, converting to the slice's type.

    Nothing is read before all names and shapes are known to fit. Beside the model, memory holds one
    tensor (GGUF) or one mapped shard. `report(done, total)` counts the checkpoint's bytes. Raises
    StartupError naming the file and the tensor at fault.
    """
    checkpoint = _open(path, spec)
    wanted = _check(path, checkpoint.tensors(), table, spec)
    done, total = 0, sum(tensor.nbytes for tensor in wanted)
    report(done, total)
    with _one_thread():
        for nbytes in checkpoint.read(wanted, table):
            done += nbytes
            report(done, total)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Copies are bound by memory: more threads gain nothing, and lose much where they wait for a busy core."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _open(path: Path, spec: ModelSpec) -> Checkpoint:
    if path.suffix != ".gguf":
        from model_runner.safetensors_weights import SafetensorsCheckpoint

        return SafetensorsCheckpoint(path)
    from model_runner.gguf_weights import GGUFCheckpoint

    permuted = ARCHITECTURES[spec.architecture].gguf_permuted
    return GGUFCheckpoint(path, {"q_proj": spec.num_heads, "k_proj": spec.num_kv_heads} if permuted else {})


def _check(
    path: Path, tensors: list[CheckpointTensor], table: dict[str, torch.Tensor], spec: ModelSpec
) -> list[CheckpointTensor]:
    """The tensors to read: each entry of the table once, in the order of the files.

    Raises StartupError naming the file and the tensor that is missing, unexpected or of another shape.
    """
    wanted = []
    for tensor in tensors:
        target = table.get(tensor.name)
        if target is None:
            if tensor.name.endswith(_COMPUTED) or (spec.tie_word_embeddings and tensor.name == "lm_head.weight"):
                continue
            raise StartupError(f"{tensor.file}: tensor {tensor.source_name} has no place in this architecture")
        if tensor.shape != tuple(target.shape):
            raise StartupError(
                f"{tensor.file}: tensor {tensor.source_name} has shape {list(tensor.shape)}, "
                f"the config says {list(target.shape)}"
            )
        wanted.append(tensor)
    found = {tensor.name for tensor in wanted}
    for name in table:
        if name not in found:
            raise StartupError(f"{path}: has no tensor {name}")
    return wanted
