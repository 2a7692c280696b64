"""Experts: a projection of every expert of a layer; a step's rows come sorted by expert."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from model_runner.layers.matrix import Matrix
from model_runner.target import Target

if TYPE_CHECKING:
    from model_runner.device import DevicePolicy
    from model_runner.shard import Shard


class Experts:
    """y = x W^T with W [sum of outs, ins] of each expert, in one tensor for all; or one by one, where the policy keeps
    weights as they are."""

    def __init__(self, count: int, ins: Shard, outs: list[Shard], policy: DevicePolicy) -> None:
        self._ins, self._outs, self._ops = ins, outs, policy.ops
        sizes = [out.size for out in outs]
        self._matrices = [Matrix(sizes, ins.size, policy) for _ in range(count)] if policy.keeps_weights else []
        self._stacked = torch.empty(0)
        if not self._matrices:
            self._stacked = torch.empty(count, sum(sizes), ins.size, dtype=policy.dtype, device=policy.device)

    def slices(self, names: list[str]) -> dict[str, Target]:
        """Where the checkpoint's tensors `experts.<expert>.<name>.weight` belong, one for each of outs."""
        table = {}
        first = 0
        for name, out in zip(names, self._outs, strict=True):
            rows = slice(first, first := first + out.size)
            parts = (
                [matrix.target(rows.start, (out,), self._ins) for matrix in self._matrices]
                if self._matrices
                else [Target(weight[rows], ((out,), (self._ins,))) for weight in self._stacked]
            )
            table |= {f"experts.{expert}.{name}.weight": part for expert, part in enumerate(parts)}
        return table

    def times(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """x [T, ins], of which expert e has the rows before ends[e] that no earlier one has, to [T, sum of outs]."""
        if not self._matrices:
            return self._ops.grouped_matmul(x, self._stacked, ends)
        out = self._ops.empty((x.shape[0], sum(part.size for part in self._outs)), x.dtype)
        first = 0
        for matrix, end in zip(self._matrices, ends.tolist(), strict=True):
            if end > first:
                matrix.multiply(x[first:end], out[first:end])
                first = end
        return out
