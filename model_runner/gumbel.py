"""Gumbel noise: the randomness of a draw, a pure function of (seed, position, token id).

Adding Gumbel noise to logits and taking the largest draws from their softmax (the Gumbel-max trick).
The noise comes from a hash of counters, so that a token is the same alone, in any batch and row,
after a preemption and in another process. Per row, two 32-bit keys are taken from SplitMix64 (Steele,
Lea, Flood 2014) seeded with the request's seed, at the index of the token being drawn. Per token, the
finalizer of MurmurHash3 (Appleby) mixes the id with the first key, and the result with the second.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_BELOW_ONE = 1.0 - 2.0**-24
"""The largest float32 below 1."""


def row_keys(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.integer]) -> npt.NDArray[np.int32]:
    """[rows, 2] keys; positions are indices of the drawn tokens in prompt + output."""
    state = _mix64(seeds + _GOLDEN)
    state = _mix64(state + positions.astype(np.uint64) * _GOLDEN)
    return state.view(np.int32).reshape(-1, 2)


def _mix64(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's output function: a bijection of 64-bit words."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def hash_bits(keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[rows, vocab_size] int32, uniform over all 32-bit words; keys are [rows, 2] int32."""
    token_ids = torch.arange(vocab_size, dtype=torch.int32, device=keys.device)
    bits = _mix32_(token_ids ^ keys[:, :1])
    return _mix32_(bits.add_(keys[:, 1:]))


def _mix32_(bits: torch.Tensor) -> torch.Tensor:
    """MurmurHash3's finalizer, in place. int32 products wrap; shifts are made logical by masking."""
    bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF)).mul_(-0x7A143595)
    bits.bitwise_xor_((bits >> 13).bitwise_and_(0x7FFFF)).mul_(-0x3D4D51CB)
    return bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF))


def uniforms(bits: torch.Tensor) -> torch.Tensor:
    """float32 in (0, 1): (bits + 1/2) / 2^32 of the bits as an unsigned number.

    Finest near 0, where the noise below is largest: that end decides draws.
    """
    numbers = bits.float()
    numbers.add_((bits >> 31).float(), alpha=-(2.0**32))
    return numbers.add_(0.5).mul_(2.0**-32).clamp_(max=_BELOW_ONE)


def gumbel_noise(keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[rows, vocab_size] float32: -log(-log(1 - v)) of uniform v."""
    numbers = uniforms(hash_bits(keys, vocab_size))
    return numbers.neg_().log1p_().neg_().log_().neg_()
