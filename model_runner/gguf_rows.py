"""Rows of a GGUF tensor: those of a worker's part, some at a time, as floats or as the integers they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from kernels.quantised import QuantisedFormat
from kernels.tiled import TILE
from model_runner.dequantise import Integers, dequantise, integers
from protos.gguf import BLOCK_FORMATS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from model_runner.target import Target

_CHUNK_WEIGHTS = 1 << 17
"""Weights read at a time, so that they are still in the cache when they are copied."""
QUANTISED_FORMATS = {
    2: QuantisedFormat(4, 32, True, torch.float16),
    3: QuantisedFormat(4, 32, True, torch.float16),
    6: QuantisedFormat(8, 32, False, torch.float16),
    7: QuantisedFormat(8, 32, True, torch.float16),
    8: QuantisedFormat(8, 32, False, torch.float16),
    12: QuantisedFormat(4, 32, True, torch.float32),
    13: QuantisedFormat(8, 32, True, torch.float32),
    14: QuantisedFormat(8, 16, False, torch.float32),
}
"""How the ggml types that are integers are held: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K. The scales of the
last three are products of two, which float16 would round."""


def can_keep(target: Target, form: QuantisedFormat, unit: int) -> bool:
    """Whether the target's parts are whole groups; `unit` is the rows that have to be read together, 0 for any."""
    return unit % TILE == 0 and all(
        part[1].start % form.group == part[1].stop % form.group == 0 for part, _ in target.kept_pieces()
    )


def read_floats(
    data: np.ndarray, shape: tuple[int, ...], part: tuple[slice, ...], type_id: int, unit: int
) -> Iterator[tuple[slice, np.ndarray]]:
    """Rows of a part of a tensor, counted from its first one, and their weights; where a unit is given, whole units
    of so many rows. Of the blocks in `data` only those that the part is in are read."""
    rows = part[0]
    if np.prod(shape[1:]) % BLOCK_FORMATS[type_id][1]:  # a vector: its blocks run along the rows themselves
        yield slice(0, rows.stop - rows.start), dequantise(np.array(data), type_id)[rows]
        return
    for places, columns, blocks in _read_blocks(data, shape, part, type_id, unit or 1):
        weights = dequantise(blocks.reshape(-1), type_id).reshape(len(blocks), -1)[:, columns]
        yield places, weights if len(part) > 1 else weights[:, 0]


def read_integers(
    data: np.ndarray, shape: tuple[int, ...], part: tuple[slice, ...], type_id: int, unit: int
) -> Iterator[tuple[slice, Integers]]:
    """The same, of whole tiles of rows: values [rows, columns], scales and minimums [rows, groups]."""
    group = QUANTISED_FORMATS[type_id].group
    for places, columns, blocks in _read_blocks(data, shape, part, type_id, unit or TILE):
        num_rows = len(blocks)
        found = integers(blocks.reshape(-1), type_id).apply(lambda numbers, n=num_rows: numbers.reshape(n, -1))
        groups = slice(columns.start // group, columns.stop // group)
        minimums = None if found.minimums is None else found.minimums[:, groups]
        yield places, Integers(found.values[:, columns], found.scales[:, groups], minimums)


def in_halves(weights: np.ndarray, pairs: int) -> np.ndarray:
    """Rows as the model has them. `pairs`: of each head, where the file has the rows of its halves interleaved."""
    if not pairs:
        return weights
    # The file has [head, pair, half, ...]: rotation by neighbours. The model rotates [head, half, pair, ...].
    return weights.reshape(-1, pairs, 2, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


def _read_blocks(
    data: np.ndarray, shape: tuple[int, ...], part: tuple[slice, ...], type_id: int, unit: int
) -> Iterator[tuple[slice, slice, np.ndarray]]:
    """Rows of a part, by whole units, the blocks [rows, blocks, bytes] that they are in, and their columns in these."""
    row_size = int(np.prod(shape[1:]))
    _, block_size, block_bytes = BLOCK_FORMATS[type_id]
    columns = part[1] if len(part) > 1 else slice(0, row_size)
    first_block, end_block = columns.start // block_size, -(-columns.stop // block_size)
    blocks = data.reshape(shape[0], -1, block_bytes)[part[0], first_block:end_block]
    start = columns.start - first_block * block_size
    within = slice(start, start + columns.stop - columns.start)
    step = max(1, _CHUNK_WEIGHTS // (max(1, blocks.shape[1] * block_size) * unit)) * unit
    for first in range(0, len(blocks), step):
        read = np.array(blocks[first : first + step])
        yield slice(first, first + len(read)), within, read
