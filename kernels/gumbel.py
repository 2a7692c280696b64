"""Gumbel noise: the randomness of a draw, a pure function of (seed, position, token id).

Adding Gumbel noise to logits and taking the largest draws from their softmax (the Gumbel-max trick).
The noise comes from a hash of counters, so that a token is the same alone, in any batch and row,
after a preemption, in another process and on another device. A row has two 32-bit keys, of its seed and
the index of the token being drawn. Per token, the finalizer of MurmurHash3 (Appleby) mixes the id with the
first key, and the result with the second.
"""

from __future__ import annotations

import torch

_BELOW_ONE = 1.0 - 2.0**-24
"""The largest float32 below 1."""


def hash_bits(keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[rows, vocab_size] int32, uniform over all 32-bit words; keys [rows] int64 are two 32-bit keys each."""
    first, second = keys.view(torch.int32).view(-1, 2, 1).unbind(1)
    token_ids = torch.arange(vocab_size, dtype=torch.int32, device=keys.device)
    return _mix32_(_mix32_(token_ids ^ first).add_(second))


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
