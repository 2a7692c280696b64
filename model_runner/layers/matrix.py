"""Matrix: the weights of products y = x W^T, as floats of one type, or packed as what the checkpoint has."""

from __future__ import annotations

from itertools import accumulate, groupby
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from kernels.halves import HalvesMatrix
from kernels.quantised import QuantisedMatrix
from kernels.tiled import TILE, TiledMatrix
from model_runner.kept import Kept
from model_runner.target import Target

if TYPE_CHECKING:
    from collections.abc import Callable

    from model_runner.device import DevicePolicy
    from model_runner.shard import Shard

    Product = Callable[[torch.Tensor, torch.Tensor], None]
    Weights = TiledMatrix | torch.Tensor


class Matrix:
    """W [sum of row counts, columns]: the rows of several tensors of the checkpoint, one above the other.

    On a policy that keeps weights, W is a list of parts of one kind each; else it is one tensor of the policy's type.
    """

    def __init__(self, row_counts: list[int], columns: int, policy: DevicePolicy, least_bits: int = 0) -> None:
        """Of integers that a checkpoint's floats become, these have so many bits at least; with 16 they stay floats."""
        self._ops, self._activation_bits = policy.ops, policy.activation_bits
        self._ends = list(accumulate(row_counts))
        bits = policy.weight_bits and max(policy.weight_bits, least_bits)
        self._kept = [Kept(count, columns, bits) for count in row_counts] if policy.keeps_weights else []
        self._products: list[tuple[slice, Product]] = []
        """Of rows of what was kept, once it is used."""
        self.floats = torch.empty(0)
        if not self._kept:
            self.floats = torch.empty(self._ends[-1], columns, dtype=policy.dtype, device=policy.device)

    def target(self, first: int, outs: tuple[Shard, ...], ins: Shard) -> Target:
        """For a tensor of the checkpoint that holds `outs` from row `first` of ours on."""
        rows = slice(first, first + sum(out.size for out in outs))
        axes = outs, (ins,)
        if not self._kept:
            return Target(self.floats[rows], axes)
        starts = [end - part.shape[0] for part, end in zip(self._kept, self._ends, strict=True)]
        kept = [part for part, start in zip(self._kept, starts, strict=True) if rows.start <= start < rows.stop]
        return Target(torch.empty(rows.stop - rows.start, ins.size, device="meta"), axes, tuple(kept))

    def times(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, columns] to [T, rows]."""
        if not self._kept:
            return F.linear(x, self.floats, bias)
        out = self._ops.empty((x.shape[0], self._ends[-1]), x.dtype)
        self.multiply(x, out)
        return out if bias is None else self._ops.add(out, bias)

    def multiply(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """The same into out [T, rows], of weights that are kept."""
        parts = self._products or self._make_products()
        if len(parts) == 1:
            parts[0][1](x, out)
        else:
            for rows, product in parts:
                product(x, out[:, rows])

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Some rows of a matrix that is one tensor's: indices [n] to [n, columns]."""
        if not self._kept:
            return self._ops.rows(self.floats, indices)
        part = self._kept[0].weights
        assert part is not None, "weights come first"
        if isinstance(part, QuantisedMatrix):
            return self._ops.quantised_rows(part, indices)
        if isinstance(part, HalvesMatrix):
            return self._ops.halves_rows(part, indices)
        return self._ops.rows(part, indices)

    def _make_products(self) -> list[tuple[slice, Product]]:
        """Of what was kept: neighbours of one kind together, so that there are few, and each in one place."""
        first = 0
        for _, group in groupby(self._kept, _kind):
            kept = list(group)
            rows = slice(first, first := first + sum(part.shape[0] for part in kept))
            weights = _joined([part.weights for part in kept])
            if isinstance(weights, QuantisedMatrix):
                product = self._ops.quantised_product(weights, self._activation_bits)
            elif isinstance(weights, HalvesMatrix):
                product = self._ops.halves_product(weights)
            else:
                product = _product(weights)
            self._products.append((rows, product))
            if len(kept) > 1:
                for part in kept:
                    part.weights = None
        return self._products


def _product(weights: torch.Tensor) -> Product:
    def product(x: torch.Tensor, out: torch.Tensor) -> None:
        torch.mm(x, weights.T, out=out)

    return product


def _kind(part: Kept) -> object:
    """Equal for neighbours that may become one."""
    if not isinstance(part.weights, TiledMatrix):
        return None
    return part if part.shape[0] % TILE else part.weights.layout


def _joined(weights: list[Weights | None]) -> Weights:
    """All of one kind."""
    if len(weights) == 1 and weights[0] is not None:
        return weights[0]
    if tiled := [part for part in weights if isinstance(part, TiledMatrix)]:
        return tiled[0].joined(tiled)
    return torch.cat([part for part in weights if isinstance(part, torch.Tensor)])
