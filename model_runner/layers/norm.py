"""RMSNorm: each token over its root mean square."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from model_runner.device import DevicePolicy


class RMSNorm:
    def __init__(self, size: int, eps: float, policy: DevicePolicy) -> None:
        # float32 whatever the model's type: a norm that is stored as its difference from 1 would lose digits.
        self.weight = torch.empty(size, dtype=torch.float32, device=policy.device)
        self._eps = eps
        self._ops = policy.ops

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """The norm of x, or of x + residual, which is then stored in residual."""
        return self._ops.rms_norm(x, self.weight, self._eps, residual)

    def norm_heads(self, x: torch.Tensor) -> None:
        """Norms each head of x [T, heads, size] in place."""
        self._ops.norm_heads(x, self.weight, self._eps)
