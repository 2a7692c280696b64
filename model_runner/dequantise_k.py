"""Dequantisation of K blocks: 256 weights in 8 or 16 groups, each with a small scale of its own.

Every function takes [blocks, bytes of a block] and gives the integers in groups [blocks, groups, size of a group],
and the scales and minimums of the groups [blocks, groups]. d and m are float16, one of each for the whole block.

  Q4_K  d, m, 12 bytes of 6-bit scales and minimums, 128 bytes of 4-bit weights
  Q5_K  the same with 32 bytes between: bit g of byte i is the fifth bit of weight i in group g
  Q6_K  128 bytes of 4-bit weights, 64 with their upper two bits, 16 signed scales, d
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


def q4_k(blocks: Bytes) -> tuple[Bytes, Floats, Floats]:
    return _nibbles(blocks[:, 16:], 32), *_scales_and_minimums(blocks)


def q5_k(blocks: Bytes) -> tuple[Bytes, Floats, Floats]:
    groups = np.arange(8, dtype=np.uint8)[:, None]
    fifth = (blocks[:, None, 16:48] >> groups & np.uint8(1)) << np.uint8(4)
    return _nibbles(blocks[:, 48:], 32) | fifth, *_scales_and_minimums(blocks)


def q6_k(blocks: Bytes) -> tuple[npt.NDArray[np.int8], Floats, None]:
    # Both halves of 128 weights: 64 bytes of low nibbles, then high ones; 32 bytes of four upper pairs each.
    values = _nibbles(blocks[:, :128], 64).reshape(-1, 2, 4, 32)
    upper = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    values |= (upper >> np.array([0, 2, 4, 6], np.uint8)[:, None] & np.uint8(3)) << np.uint8(4)
    signed = values.reshape(-1, 16, 16).view(np.int8)
    signed -= 32
    return signed, _half(blocks, 208) * blocks[:, 192:208].view(np.int8), None


def _scales_and_minimums(blocks: Bytes) -> tuple[Floats, Floats]:
    """d * scale and -m * minimum of 8 groups, from 12 bytes behind d and m: four scales and minimums in the low 6 bits
    of the first two words; the others' low halves share the third word, and their top two bits are those of the
    first two."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=1)
    minimums = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=1)
    return _half(blocks, 0) * scales, -_half(blocks, 2) * minimums


def _nibbles(data: Bytes, size: int) -> Bytes:
    """Of each `size` bytes, first the low halves and then the high ones: [blocks, 256 / size, size]."""
    data = data.reshape(len(data), -1, size)
    values = np.empty((len(data), data.shape[1], 2, size), np.uint8)
    np.bitwise_and(data, 15, out=values[:, :, 0])
    np.right_shift(data, 4, out=values[:, :, 1])
    return values.reshape(len(data), -1, size)


def _half(blocks: Bytes, at: int) -> Floats:
    """[blocks, 1]: the float16 at a byte offset of every block."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)
