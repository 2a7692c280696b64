"""RMSNorm: each token over its root mean square."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from model_runner.device import DevicePolicy


class RMSNorm:
    def __init__(self, size: int, eps: float, policy: DevicePolicy) -> None:
        self.weight = torch.empty(size, dtype=policy.dtype, device=policy.device)
        self._eps = eps
        self._ops = policy.ops

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """The norm of x, or of x + residual, which is then stored in residual."""
        return self._ops.rms_norm(x, self.weight, self._eps, residual)
