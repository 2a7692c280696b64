"""Quantisation of a checkpoint's floats as they are loaded: groups of 32 inputs, scales in float16."""

from __future__ import annotations

import torch

from kernels.quantised import QuantisedFormat

GROUP = 32
QUANTISED = {
    4: QuantisedFormat(4, GROUP, True, torch.float16),
    8: QuantisedFormat(8, GROUP, False, torch.float16),
}
"""What floats become, by the number of bits: as Q4_1 and Q8_0 of GGUF."""


def quantise(weights: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """[rows, inputs] to the nearest integers of the same shape, with scales and, of 4 bits, minimums [rows, groups]."""
    groups = weights.float().unflatten(1, (-1, GROUP))
    low, high = groups.aminmax(dim=2, keepdim=True)
    if bits == 8:
        scales, minimums, least, dtype = torch.maximum(-low, high) / 127, None, -127, torch.int8
    else:
        scales, minimums, least, dtype = (high - low) / 15, low.half().float(), 0, torch.uint8
        groups = groups - minimums
    scales = scales.half().float()
    values = (groups / scales).round_().nan_to_num_(0.0).clamp_(least, least + 2**bits - 1 - (bits == 8))
    return (
        values.to(dtype).flatten(1),
        scales.squeeze(2),
        None if minimums is None else minimums.squeeze(2),
    )
