"""QuantisedMatrix: the weights of a linear layer as integers with a scale, packed so that vectors run over outputs.

weight[o, k] = value[o, k] * scale[o, g] + minimum[o, g], with g the group of inputs that k is in. TILE outputs lie
together; a tile holds, group by group: the integers, TILE scales, and TILE minimums where there are any. Eight-bit
integers lie by fours of inputs, in them output by output. Of four-bit ones a byte has an output's weights for two
inputs that are four apart, so that a shift and a mask make the same of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kernels.tiled import TILE, TiledMatrix

FOUR_BIT_ZERO = 8
"""What is added to signed four-bit integers, which are kept without sign; the minimum takes it back."""
EIGHT_BIT_ZERO = 128
"""The same for those of eight bits, which have no minimum; the products take it back."""


@dataclass(frozen=True, slots=True)
class QuantisedFormat:
    """How weights are held."""

    bits: int
    """4 or 8."""
    group: int
    """Inputs that share a scale: 16 or 32."""
    has_minimums: bool
    """Four-bit integers always have them."""
    scale_type: torch.dtype
    """Of scales and minimums: float16 where that holds them exactly, else float32."""

    @property
    def integer_bytes(self) -> int:
        """Of a group of a tile."""
        return TILE * self.group * self.bits // 8

    @property
    def group_bytes(self) -> int:
        """The same with scales and minimums."""
        return self.integer_bytes + TILE * self.scale_type.itemsize * (1 + self.has_minimums)


class QuantisedMatrix(TiledMatrix):
    """Integers, group by group, with their scales."""

    def __init__(self, outputs: int, inputs: int, form: QuantisedFormat) -> None:
        """Raises ValueError for a number of inputs that has no whole groups."""
        if inputs % form.group:
            raise ValueError(f"{inputs} inputs are not whole groups of {form.group}")
        self.format = form
        self.num_groups = inputs // form.group
        super().__init__(outputs, inputs, (self.num_groups, form.group_bytes), torch.uint8)

    @property
    def layout(self) -> QuantisedFormat:
        return self.format

    def fill(self, first: int, values: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor | None) -> None:
        """Rows from `first`, which begins a tile: values [rows, inputs] int8 or uint8, the others [rows, groups]."""
        assert first % TILE == 0, "rows come by tiles"
        form = self.format
        rows = len(values)
        if form.bits == 4:
            if values.dtype == torch.int8:
                values, minimums = values + FOUR_BIT_ZERO, scales * -FOUR_BIT_ZERO
            assert minimums is not None, "four-bit integers have minimums"
        elif not form.has_minimums:
            values = values.view(torch.uint8) ^ EIGHT_BIT_ZERO
        spare = -rows % TILE
        tiles = self.tiles[first // TILE : (first + rows + spare) // TILE]
        values = F.pad(values.view(torch.uint8), (0, 0, 0, spare))
        tiles[:, :, : form.integer_bytes] = (_pack_four if form.bits == 4 else _pack_eight)(values, self.num_groups)
        at = form.integer_bytes
        for numbers in (scales, minimums) if form.has_minimums else (scales,):
            assert numbers is not None
            numbers = F.pad(numbers, (0, 0, 0, spare)).to(form.scale_type)
            by_group = numbers.view(-1, TILE, self.num_groups).transpose(1, 2).contiguous().view(torch.uint8)
            tiles[:, :, at : at + by_group.shape[2]] = by_group
            at += by_group.shape[2]

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """The weights of some outputs: [n] to [n, inputs] float32."""
        form = self.format
        lanes = torch.arange(len(indices)), slice(None), indices % TILE
        tiles = self.tiles[indices // TILE]
        packed = tiles[:, :, : form.integer_bytes]
        values = (_unpack_four if form.bits == 4 else _unpack_eight)(packed.contiguous(), form.group)[lanes]
        numbers = tiles[:, :, form.integer_bytes :].contiguous().view(form.scale_type)
        values = values.float() - (0 if form.has_minimums else EIGHT_BIT_ZERO)
        weights = values * numbers[:, :, :TILE][lanes].float()[:, :, None]
        if form.has_minimums:
            weights += numbers[:, :, TILE:][lanes].float()[:, :, None]
        return weights.flatten(1)


def _pack_four(values: torch.Tensor, groups: int) -> torch.Tensor:
    """[outputs, inputs] below 16 to [tiles, groups, bytes]."""
    # tile, output, group, eight inputs: two halves of four
    halves = values.view(-1, TILE, groups, values.shape[1] // groups // 8, 2, 4).to(torch.uint8)
    return (halves[..., 0, :] | halves[..., 1, :] << 4).permute(0, 2, 3, 1, 4).flatten(2)


def _unpack_four(packed: torch.Tensor, group: int) -> torch.Tensor:
    """[n, groups, bytes] to [n, groups, TILE, group]."""
    fours = packed.view(*packed.shape[:2], group // 8, TILE, 4).transpose(2, 3)
    return torch.stack([fours & 15, fours >> 4], -2).flatten(3)


def _pack_eight(values: torch.Tensor, groups: int) -> torch.Tensor:
    """[outputs, inputs] bytes to [tiles, groups, bytes]."""
    fours = values.view(-1, TILE, groups, values.shape[1] // groups // 4, 4)
    return fours.permute(0, 2, 3, 1, 4).flatten(2)


def _unpack_eight(packed: torch.Tensor, group: int) -> torch.Tensor:
    """[n, groups, bytes] to [n, groups, TILE, group]."""
    return packed.view(*packed.shape[:2], group // 4, TILE, 4).transpose(2, 3).flatten(3)
