"""Norms: each token over its root mean square, or less its mean and over its deviation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from model_runner.target import Target

if TYPE_CHECKING:
    from model_runner.device import DevicePolicy
    from model_runner.shard import Shard


class RMSNorm:
    def __init__(self, size: int, eps: float, policy: DevicePolicy) -> None:
        # float32 whatever the model's type: a norm that is stored as its difference from 1 would lose digits.
        self.weight = torch.empty(size, dtype=torch.float32, device=policy.device)
        self._eps = eps
        self._ops = policy.ops

    def weights(self) -> dict[str, Target]:
        return {"weight": Target.whole(self.weight)}

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """The norm of x, or of x + residual, which is then stored in residual."""
        return self._ops.rms_norm(x, self.weight, self._eps, residual)

    def norm_heads(self, x: torch.Tensor) -> None:
        """Norms x [T, heads, size of a head] in place: each head or, with a weight for all, those of a token as one."""
        self._ops.norm_heads(x.view(x.shape[0], -1, self.weight.shape[0]), self.weight, self._eps)


class SpreadNorm:
    """One norm over heads that are spread over the workers."""

    def __init__(self, shard: Shard, eps: float, policy: DevicePolicy) -> None:
        self.weight = torch.empty(shard.size, dtype=torch.float32, device=policy.device)
        self._shard, self._eps, self._workers = shard, eps, policy.workers

    def weights(self) -> dict[str, Target]:
        return {"weight": Target(self.weight, ((self._shard,),))}

    def norm_heads(self, x: torch.Tensor) -> None:
        """Norms x [T, heads of this worker, size of a head] in place, with those of a token on all workers as one."""
        wide = x.flatten(1).float()
        squares = self._workers.all_reduce(wide.square().sum(-1, keepdim=True))
        # A head that several workers hold counts for each, and so do its places.
        mean = squares / (self._shard.size * self._workers.place.tensor_size)
        x.copy_((wide * torch.rsqrt(mean + self._eps) * self.weight).view(x.shape))


class LayerNorm:
    def __init__(self, size: int, eps: float, policy: DevicePolicy) -> None:
        self.weight = torch.empty(size, dtype=torch.float32, device=policy.device)
        self.bias = torch.empty(size, dtype=torch.float32, device=policy.device)
        self._eps = eps
        self._ops = policy.ops

    def weights(self) -> dict[str, Target]:
        return {"weight": Target.whole(self.weight), "bias": Target.whole(self.bias)}

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """The norm of x, or of x + residual, which is then stored in residual."""
        return self._ops.layer_norm(x, self.weight, self.bias, self._eps, residual)


class NoNorm:
    """Where a model has no norm: what others would norm."""

    def __init__(self, policy: DevicePolicy) -> None:
        self._ops = policy.ops

    def weights(self) -> dict[str, Target]:
        return {}

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        return x if residual is None else self._ops.add(residual, x)
