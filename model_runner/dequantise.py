"""Dequantisation: blocks of a GGUF tensor to integers with their scales, and to float32, bit for bit what the gguf
package computes.

The formats of 32 weights per block are done here, and the common ones of 256 in dequantise_k.py, several
times faster and without importing the package (0.25 s); the others go through it, to float32 only. In those here a
block starts with its scale d (float16); the _1 formats add a minimum m (float16); the 5-bit formats then keep
the fifth bits in a 32-bit mask, bit i for weight i; a byte of the rest holds weight i in its low half and
weight i + 16 in its high half, or one signed weight in Q8_0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from model_runner.dequantise_k import q4_k, q5_k, q6_k
from protos.gguf import BLOCK_FORMATS

if TYPE_CHECKING:
    from collections.abc import Callable

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Integers:
    """Quantised weights: weight = value * scale + minimum, with a scale and a minimum for each group."""

    values: npt.NDArray[np.uint8 | np.int8]
    scales: Floats
    """One for each group of values."""
    minimums: Floats | None
    """The same; None is 0 for all."""

    def apply(self, change: Callable[[npt.NDArray[Any]], npt.NDArray[Any]]) -> Integers:
        """The same change made to values, scales and minimums."""
        minimums = None if self.minimums is None else change(self.minimums)
        return Integers(change(self.values), change(self.scales), minimums)

    def floats(self) -> Floats:
        """The weights, in order, of values [groups, size of a group]."""
        weights = self.values.astype(np.float32)
        weights *= self.scales[:, None]
        if self.minimums is not None:
            weights += self.minimums[:, None]
        return weights.reshape(-1)


def can_dequantise(type_id: int) -> bool:
    """Whether `dequantise` knows the ggml type."""
    return type_id in _FLOATS or type_id in _INTEGERS or type_id in _package_types()


def dequantise(data: Bytes, type_id: int) -> Floats:
    """The weights of whole blocks, in order: [bytes] to [weights]. Raises KeyError for a type it does not know."""
    if type_id in _FLOATS:
        return _FLOATS[type_id](data).reshape(-1)
    if type_id in _INTEGERS:
        return integers(data, type_id).floats()
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    # As one row: the package works through 16 rows at a time, in Python.
    weights: Floats = dequantize(data.reshape(1, -1), GGMLQuantizationType(type_id))
    return weights.reshape(-1)


def integers(data: Bytes, type_id: int) -> Integers:
    """The weights of whole blocks, in order, as they are stored: values [groups, size of a group]. Raises KeyError for
    a type that is not integers with a scale for each group."""
    values, scales, minimums = _INTEGERS[type_id](data.reshape(-1, BLOCK_FORMATS[type_id][2]))
    groups = values.reshape(scales.size, -1)
    return Integers(groups, scales.reshape(-1), None if minimums is None else minimums.reshape(-1))


def _package_types() -> set[int]:
    from gguf import quants

    return {int(kind) for kind in quants._type_traits}


def _half(blocks: Bytes, at: int) -> Floats:
    """[blocks]: the float16 at a byte offset of every block."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)[:, 0]


def _nibbles(quants: Bytes) -> Bytes:
    """[blocks, 16] bytes to [blocks, 32] values of 4 bits."""
    values = np.empty((len(quants), 32), np.uint8)
    np.bitwise_and(quants, 15, out=values[:, :16])
    np.right_shift(quants, 4, out=values[:, 16:])
    return values


def _five_bits(blocks: Bytes, at: int) -> Bytes:
    """[blocks, 32] values: the masks of their fifth bits are at a byte offset, the rest follows."""
    fifth = np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little") << np.uint8(4)
    return _nibbles(blocks[:, at + 4 :]) | fifth


def _signed(values: Bytes, zero: int) -> npt.NDArray[np.int8]:
    signed = values.view(np.int8)
    signed -= zero
    return signed


def _bfloat16(data: Bytes) -> Floats:
    return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)


_FLOATS: dict[int, Callable[[Bytes], Floats]] = {
    0: lambda data: data.view("<f4"),
    1: lambda data: data.view("<f2").astype(np.float32),
    30: _bfloat16,
}
"""By ggml type id: F32, F16, BF16."""
_INTEGERS: dict[int, Callable[[Bytes], tuple[npt.NDArray[np.uint8 | np.int8], Floats, Floats | None]]] = {
    2: lambda blocks: (_signed(_nibbles(blocks[:, 2:]), 8), _half(blocks, 0), None),
    3: lambda blocks: (_nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2)),
    6: lambda blocks: (_signed(_five_bits(blocks, 2), 16), _half(blocks, 0), None),
    7: lambda blocks: (_five_bits(blocks, 4), _half(blocks, 0), _half(blocks, 2)),
    8: lambda blocks: (blocks[:, 2:].view(np.int8), _half(blocks, 0), None),
    12: q4_k,
    13: q5_k,
    14: q6_k,
}
"""By ggml type id: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K. Each takes [blocks, bytes of a block]."""
