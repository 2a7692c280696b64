"""Norms: each token over its root mean square, or less its mean and over its deviation."""

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

    def weights(self) -> dict[str, torch.Tensor]:
        return {"weight": self.weight}

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """The norm of x, or of x + residual, which is then stored in residual."""
        return self._ops.rms_norm(x, self.weight, self._eps, residual)

    def norm_heads(self, x: torch.Tensor) -> None:
        """Norms x [T, heads, size of a head] in place: each head or, with a weight for all, those of a token as one."""
        self._ops.norm_heads(x.view(x.shape[0], -1, self.weight.shape[0]), self.weight, self._eps)


class LayerNorm:
    def __init__(self, size: int, eps: float, policy: DevicePolicy) -> None:
        self.weight = torch.empty(size, dtype=torch.float32, device=policy.device)
        self.bias = torch.empty(size, dtype=torch.float32, device=policy.device)
        self._eps = eps
        self._ops = policy.ops

    def weights(self) -> dict[str, torch.Tensor]:
        return {"weight": self.weight, "bias": self.bias}

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """The norm of x, or of x + residual, which is then stored in residual."""
        return self._ops.layer_norm(x, self.weight, self.bias, self._eps, residual)


class NoNorm:
    """Where a model has no norm: what others would norm."""

    def weights(self) -> dict[str, torch.Tensor]:
        return {}

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        return x if residual is None else residual.add_(x)
