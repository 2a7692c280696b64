"""Keys of the noise that a row's token is drawn with: a pure function of (seed, position).

They are taken from SplitMix64 (Steele, Lea, Flood 2014), seeded with the request's seed, at the index of
the token being drawn. What becomes of them is in kernels/gumbel.py.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def row_keys(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    """[rows] of two 32-bit keys each; positions are indices of the drawn tokens in prompt + output."""
    state = _mix64(seeds + _GOLDEN)
    return _mix64(state + positions.astype(np.uint64) * _GOLDEN).view(np.int64)


def _mix64(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's output function: a bijection of 64-bit words."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
