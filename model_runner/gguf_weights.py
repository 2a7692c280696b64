"""GGUFCheckpoint: the tensors of a GGUF file under their Hugging Face names, dequantised as they are read where the
model does not keep them as they are."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from kernels.tiled import TILE
from model_runner.checkpoint import CheckpointTensor
from model_runner.dequantise import can_dequantise
from model_runner.gguf_rows import QUANTISED_FORMATS, can_keep, in_halves, read_floats, read_integers
from protos.errors import StartupError
from protos.gguf import BLOCK_FORMATS, read_gguf

if TYPE_CHECKING:
    from collections.abc import Iterator

    from model_runner.target import Target

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
"""From a tensor's name in GGUF, without block number and suffix, to its Hugging Face name; those of Llama."""
_IN_THE_SPEC = {"rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"}
"""Tensors that the ModelSpec has already read."""
_STORED = {1: torch.float16, 30: torch.bfloat16}
"""Types of 16 bits, by ggml type id: what is read of them as float32 is made the same again."""
_BLOCK_NAME = re.compile(r"blk\.(\d+)\.(\w+)(?:\.(\d+))?\.(weight|bias)")
"""With the number of an expert, in old files."""
_OTHER_NAME = re.compile(r"(\w+)\.(weight|bias)")


class GGUFCheckpoint:
    """`names` go before Llama's. `pair_heads`: heads of q and k, by the module's name, whose rows the file
    keeps in pair order."""

    def __init__(self, path: Path, names: dict[str, str], pair_heads: dict[str, int]) -> None:
        self._names = _NAMES | names
        self._pair_heads = pair_heads
        self._tensors = read_gguf(path).tensors

    def tensors(self) -> list[CheckpointTensor]:
        """Raises StartupError naming a tensor in a block format that cannot be read."""
        found = []
        for tensor in self._tensors.values():
            if tensor.name in _IN_THE_SPEC:
                continue
            if not can_dequantise(tensor.type):
                kind = BLOCK_FORMATS[tensor.type][0]
                raise StartupError(
                    f"{tensor.path}: tensor {tensor.name} is in block format {kind}, which cannot be read"
                )
            found.append(
                CheckpointTensor(
                    Path(tensor.path), self._hugging_face_name(tensor.name), tensor.name, tensor.shape, tensor.nbytes
                )
            )
        return found

    def read(self, wanted: list[CheckpointTensor], table: dict[str, Target]) -> Iterator[int]:
        """Fills the table's targets; yields the bytes read with each."""
        for tensor in wanted:
            target = table[tensor.name]
            self._fill(target, tensor)
            yield target.share(tensor.nbytes)

    def _fill(self, target: Target, tensor: CheckpointTensor) -> None:
        heads = self._pair_heads.get(tensor.name.split(".")[-2], 0)
        pairs = tensor.shape[0] // heads // 2 if heads else 0
        entry = self._tensors[tensor.source_name]
        _, block_size, block_bytes = BLOCK_FORMATS[entry.type]
        before = tensor.first_row * entry.shape[-1] // block_size * block_bytes
        data = np.memmap(entry.path, np.uint8, "r", entry.offset + before, (tensor.nbytes,))
        form = QUANTISED_FORMATS.get(entry.type)
        if form is not None and target.kept and can_keep(target, form, 2 * pairs):
            for part, kept in target.kept_pieces():
                matrix = kept.integers(form)
                for rows, found in read_integers(data, tensor.shape, part, entry.type, 2 * pairs):
                    ours = found.apply(lambda numbers: in_halves(numbers, pairs))
                    minimums = None if ours.minimums is None else torch.from_numpy(ours.minimums)
                    matrix.fill(rows.start, torch.from_numpy(ours.values), torch.from_numpy(ours.scales), minimums)
            return
        dtype, unit = _STORED.get(entry.type, torch.float32), math.lcm(TILE, max(1, 2 * pairs))
        for part, kept in target.kept_pieces():
            for rows, weights in read_floats(data, tensor.shape, part, entry.type, unit):
                kept.fill(rows.start, torch.from_numpy(in_halves(weights, pairs)), dtype)
        for part, view in target.pieces():
            for rows, weights in read_floats(data, tensor.shape, part, entry.type, 2 * pairs):
                view[rows] = torch.from_numpy(in_halves(weights, pairs))

    def _hugging_face_name(self, name: str) -> str:
        """The name itself where GGUF's is not known: the check against the model's table will then refuse it."""
        if match := _BLOCK_NAME.fullmatch(name):
            block, module, expert, suffix = match.groups()
            usual = self._names.get(module, module)
            if expert is not None:
                usual = usual.replace("mlp.", f"mlp.experts.{expert}.")
            return f"model.layers.{block}.{usual}.{suffix}"
        if match := _OTHER_NAME.fullmatch(name):
            module, suffix = match.groups()
            return f"{self._names.get(module, module)}.{suffix}"
        return name
