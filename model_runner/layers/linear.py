"""Linear: a projection whose weight may be several of the checkpoint's, one above the other."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from model_runner.layers.added import Added, AddedRows
from model_runner.layers.matrix import Matrix
from model_runner.target import Target

if TYPE_CHECKING:
    from model_runner.device import DevicePolicy
    from model_runner.shard import Shard


class Linear:
    """y = x W^T + b, with W [sum of outs, ins]: one product instead of one per part.

    Workers may each have some of the rows: each then has some of y. Or some of the columns, for some of x: what they
    make of it is added up, and each has all of y.
    """

    def __init__(self, ins: Shard, outs: list[Shard], bias: bool, policy: DevicePolicy, least_bits: int = 0) -> None:
        self._ins, self._outs = ins, outs
        self.weight = Matrix([out.size for out in outs], ins.size, policy, least_bits)
        size = sum(out.size for out in outs)
        self.bias = torch.empty(size, dtype=policy.dtype, device=policy.device) if bias else None
        self.added = Added(policy.ops)
        self._workers, self._ops = policy.workers, policy.ops

    def slices(self, names: list[str]) -> dict[str, Target]:
        """Where the checkpoint's tensors `<name>.weight` (and bias) belong: one name per part, or one for all."""
        parts = [(out,) for out in self._outs] if len(names) > 1 else [tuple(self._outs)]
        table = {}
        first = 0
        for name, outs in zip(names, parts, strict=True):
            rows = slice(first, first := first + sum(out.size for out in outs))
            target = self.weight.target(rows.start, outs, self._ins)
            table[f"{name}.weight"] = replace(target, linear=AddedRows(self.added, rows.start))
            if self.bias is not None:
                table[f"{name}.bias"] = Target(self.bias[rows], (outs,))
        return table

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        is_whole = self._ins.is_whole
        y = self.weight.times(x, self.bias if is_whole else None)
        if self.added.groups:
            self.added(x, y)
        if is_whole:
            return y
        y = self._workers.all_reduce(y)
        return y if self.bias is None else self._ops.add(y, self.bias)
