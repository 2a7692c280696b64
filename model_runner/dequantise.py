"""Dequantisation: blocks of a GGUF tensor to float32, bit for bit what the gguf package computes.

The formats of 32 weights per block are done here, and the common ones of 256 in dequantise_k.py, several
times faster and without importing the package (0.25 s); the others go through it. In those here a block
starts with its scale d (float16); the _1 formats add a minimum m (float16); the 5-bit formats then keep
the fifth bits in a 32-bit mask, bit i for weight i; a byte of the rest holds weight i in its low half and
weight i + 16 in its high half, or one signed weight in Q8_0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from model_runner.dequantise_k import q4_k, q5_k, q6_k
from protos.gguf import BLOCK_FORMATS

if TYPE_CHECKING:
    from collections.abc import Callable

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


def can_dequantise(type_id: int) -> bool:
    """Whether `dequantise` knows the ggml type."""
    return type_id in _DIRECT or type_id in _package_types()


def dequantise(data: Bytes, type_id: int) -> Floats:
    """The weights of whole blocks, in order: [bytes] to [weights]. Raises KeyError for a type it does not know."""
    if type_id in _DIRECT:
        block_bytes = BLOCK_FORMATS[type_id][2]
        return _DIRECT[type_id](data.reshape(-1, block_bytes)).reshape(-1)
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    # As one row: the package works through 16 rows at a time, in Python.
    weights: Floats = dequantize(data.reshape(1, -1), GGMLQuantizationType(type_id))
    return weights.reshape(-1)


def _package_types() -> set[int]:
    from gguf import quants

    return {int(kind) for kind in quants._type_traits}


def _halves(blocks: Bytes, at: int) -> Floats:
    """[blocks, 1]: the float16 at a byte offset of every block."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(quants: Bytes) -> Bytes:
    """[blocks, 16] bytes to [blocks, 32] values of 4 bits."""
    values = np.empty((len(quants), 32), np.uint8)
    np.bitwise_and(quants, 15, out=values[:, :16])
    np.right_shift(quants, 4, out=values[:, 16:])
    return values


def _fifth_bits(masks: Bytes) -> Bytes:
    """[blocks, 4] bytes to [blocks, 32] values that are 0 or 16."""
    return np.unpackbits(masks, axis=1, bitorder="little") << np.uint8(4)


def _scaled(values: npt.NDArray[np.generic], blocks: Bytes, offset: float = 0.0) -> Floats:
    weights = values.astype(np.float32)
    if offset:
        weights += offset
    weights *= _halves(blocks, 0)
    return weights


def _with_minimum(values: Bytes, blocks: Bytes) -> Floats:
    weights = _scaled(values, blocks)
    weights += _halves(blocks, 2)
    return weights


def _bfloat16(data: Bytes) -> Floats:
    return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)


_DIRECT: dict[int, Callable[[Bytes], Floats]] = {
    0: lambda blocks: blocks.view("<f4"),
    1: lambda blocks: blocks.view("<f2").astype(np.float32),
    2: lambda blocks: _scaled(_nibbles(blocks[:, 2:]), blocks, -8),
    3: lambda blocks: _with_minimum(_nibbles(blocks[:, 4:]), blocks),
    6: lambda blocks: _scaled(_nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6]), blocks, -16),
    7: lambda blocks: _with_minimum(_nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8]), blocks),
    8: lambda blocks: _scaled(blocks[:, 2:].view(np.int8), blocks),
    12: q4_k,
    13: q5_k,
    14: q6_k,
    30: _bfloat16,
}
"""By ggml type id: F32, F16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, BF16.
Each takes [blocks, bytes of a block]."""
