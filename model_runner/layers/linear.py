"""Linear: a projection whose weight may be several of the checkpoint's, one above the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from model_runner.device import DevicePolicy


class Linear:
    """y = x W^T + b, with W [sum of out_sizes, in_size]: one product instead of one per part."""

    def __init__(self, in_size: int, out_sizes: list[int], bias: bool, policy: DevicePolicy) -> None:
        self._out_sizes = out_sizes
        self.weight = torch.empty(sum(out_sizes), in_size, dtype=policy.dtype, device=policy.device)
        self.bias = torch.empty(sum(out_sizes), dtype=policy.dtype, device=policy.device) if bias else None

    def slices(self, names: list[str]) -> dict[str, torch.Tensor]:
        """Where the checkpoint's tensors `<name>.weight` (and bias) belong: one name per part, or one for all."""
        sizes = self._out_sizes if len(names) > 1 else [sum(self._out_sizes)]
        table = {}
        first = 0
        for name, size in zip(names, sizes, strict=True):
            rows = slice(first, first := first + size)
            table[f"{name}.weight"] = self.weight[rows]
            if self.bias is not None:
                table[f"{name}.bias"] = self.bias[rows]
        return table

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)
