"""ReferenceOps: every operation in plain PyTorch. The truth that other implementations are tested against.

Storage is float32, bfloat16 or float16; arithmetic is in float32 and rounds once, at the end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from kernels.reference_sampling import ReferenceSamplingOps
from kernels.reference_step import ReferenceStepOps

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kernels.cpu_program import Program, Record, Sizes, Then
    from kernels.halves import HalvesMatrix
    from kernels.low_rank import LowRank, Tokens
    from kernels.quantised import QuantisedMatrix
    from kernels.tiled import TiledMatrix

FP8 = torch.float8_e4m3fn
"""The type of a KV cache of 8 bits: its largest number is 448, and it has no infinity."""


class ReferenceOps(ReferenceSamplingOps, ReferenceStepOps):
    """Runs on any device; written to be read, not to be fast."""

    takes_fp8_cache = False
    """Whether attention to a KV cache of FP8 is fast."""
    mixes_cache_types = True
    """Whether a KV cache of 16 or 32 bits may have another type than queries, keys and values."""
    keeps_integers = False
    """Whether quantised products are faster than products with the same weights as floats."""

    def kv_cache_shapes(
        self, num_blocks: int, num_kv_heads: int, head_dim: int, block_size: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of one layer's key and value cache. Others only pass the tensors on, never index them.

        Keys lie dimension by dimension inside a block and values token by token, so that vectors run over
        keys in the first product of attention and over dimensions in the second.
        """
        return (num_blocks, num_kv_heads, head_dim, block_size), (num_blocks, num_kv_heads, block_size, head_dim)

    def write_kv(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slots: torch.Tensor,
        key_scale: float = 1.0,
        value_scale: float = 1.0,
    ) -> None:
        """Stores key and value [tokens, kv_heads, head_dim] at slots [tokens], int64: block * block_size + offset.

        Slot -1 is padding and writes nothing. Caches of float8_e4m3fn keep what is stored divided by a scale, which
        attention multiplies with; numbers over 448 after that become 448. A cache may have any other type: in float16
        numbers over 65504 become 65504. The scales are for caches of float8_e4m3fn alone.
        """
        real = slots >= 0
        block_size = value_cache.shape[2]
        blocks, offsets = slots[real] // block_size, slots[real] % block_size
        key_cache[blocks, :, :, offsets] = _stored(key[real], key_cache.dtype, key_scale)
        value_cache[blocks, :, offsets] = _stored(value[real], value_cache.dtype, value_scale)

    def rotate_and_write(
        self,
        merged: torch.Tensor,
        kv_heads: int,
        cosines: torch.Tensor,
        sines: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slots: torch.Tensor,
        key_scale: float = 1.0,
        value_scale: float = 1.0,
    ) -> None:
        """rotary and write_kv of merged [tokens, heads + 2 * kv_heads, head_dim]: queries, keys and values.

        The queries are rotated in place; whether the keys are too differs between implementations.
        """
        with_keys = merged.shape[1] - kv_heads
        key, value = merged[:, with_keys - kv_heads : with_keys], merged[:, with_keys:]
        self.rotary(merged[:, :with_keys], cosines, sines)
        self.write_kv(key, value, key_cache, value_cache, slots, key_scale, value_scale)

    def attention(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        query_starts: torch.Tensor,
        seq_lens: torch.Tensor,
        block_tables: torch.Tensor,
        scale: float,
        sliding_window: int,
        softcap: float,
        sinks: torch.Tensor | None = None,
        key_scale: float = 1.0,
        value_scale: float = 1.0,
    ) -> torch.Tensor:
        """Causal attention of query [tokens, heads, head_dim] over the cached keys of each row.

        Row r owns tokens query_starts[r]:query_starts[r + 1], the last of its seq_lens[r] keys, which lie in
        the blocks of block_tables[r]. A query sees itself and what is before it, at most sliding_window keys
        (0 is all). Scores pass softcap * tanh(score / softcap) (0 leaves them). sinks [heads], float32, are scores
        of one more key of each head, whose value is zero. Cached keys and values count times their scales. The three
        index tensors are int32. Returns [tokens, heads, head_dim]; tokens beyond the last row's, and those of rows with
        seq_lens 0, which are padding, are left undefined.

        Where there are as many tokens as rows, each row has one, except that rows without keys may have none.
        """
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        block_size = value_cache.shape[2]
        starts, lengths = query_starts.tolist(), seq_lens.tolist()
        for row, length in enumerate(lengths):
            first, end = starts[row], starts[row + 1]
            if first == end:
                continue
            blocks = block_tables[row, : -(-length // block_size)].long()
            keys = key_cache[blocks].permute(1, 0, 3, 2).flatten(1, 2)[:, :length].float() * key_scale
            values = value_cache[blocks].transpose(0, 1).flatten(1, 2)[:, :length].float() * value_scale
            positions = torch.arange(length - (end - first), length, device=query.device)[:, None]
            distance = positions - torch.arange(length, device=query.device)
            seen = (distance >= 0) & (distance < (sliding_window or length + 1))
            group = query.shape[1] // keys.shape[0]
            queries = query[first:end].float().transpose(0, 1)
            scores = queries @ keys.repeat_interleave(group, 0).transpose(1, 2) * scale
            if softcap:
                self.softcap(scores, softcap)
            scores = scores.masked_fill(~seen, -torch.inf)
            if sinks is not None:
                scores = torch.cat([scores, sinks[:, None, None].expand(-1, end - first, 1)], -1)
            weights = scores.softmax(-1)[..., :length]
            # A key that is not seen may be memory nobody wrote, and 0 * NaN is NaN.
            values = values.masked_fill(~seen.any(0)[:, None], 0.0).repeat_interleave(group, 0)
            out[first:end] = (weights @ values).transpose(0, 1).to(out.dtype)
        return out

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [tokens, size] over its root mean square, times weight [size], float32.

        With a residual, x is added to it in place first and the sum is what is normed.
        """
        if residual is not None:
            x = residual.add_(x)
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (wide * scale * weight).to(x.dtype)

    def layer_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        eps: float,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [tokens, size] less its mean, over its deviation, times weight [size], plus bias [size], both float32.

        A residual is treated as by rms_norm.
        """
        if residual is not None:
            x = residual.add_(x)
        return F.layer_norm(x.float(), weight.shape, weight, bias, eps).to(x.dtype)

    def norm_heads(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        """Norms each head of x [tokens, heads, head_dim] in place, times weight [head_dim], float32."""
        x.copy_(self.rms_norm(x.flatten(0, 1), weight, eps).view(x.shape))

    def rotary(self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> None:
        """Rotates x [tokens, heads, head_dim] in place by the angles of cosines and sines [tokens, pairs], float32.

        Dimension i pairs with i + pairs; dimensions from 2 * pairs on stay as they are.
        """
        pairs = cosines.shape[1]
        low, high = x[..., :pairs].float(), x[..., pairs : 2 * pairs].float()
        cosines, sines = cosines[:, None], sines[:, None]
        rotated = low * cosines - high * sines, high * cosines + low * sines
        x[..., : 2 * pairs] = torch.cat(rotated, -1)

    def grouped_matmul(self, x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """x [rows, in_size] in segments, each times a matrix of weights [groups, out_size, in_size], transposed.

        Segment g is the rows before ends[g], int64, that are not of an earlier one. Returns [rows, out_size].
        """
        out = torch.empty(x.shape[0], weights.shape[1], dtype=x.dtype, device=x.device)
        first = 0
        for group, end in enumerate(ends.tolist()):
            if end > first:
                torch.mm(x[first:end], weights[group].T, out=out[first:end])
                first = end
        return out

    def add_low_rank(self, out: torch.Tensor, x: torch.Tensor, factors: LowRank, tokens: Tokens) -> None:
        """Adds to some rows of out [rows, outputs] what the factors make of the same rows of x [rows, inputs]."""
        inner = x[tokens].float() @ factors.a.T
        for (first, _, b), own in zip(factors.parts, inner.split(factors.ranks, 1), strict=True):
            out[tokens, first : first + b.shape[1]] += own @ b

    def quantised_product(
        self, weight: QuantisedMatrix, activation_bits: int = 16
    ) -> Callable[[torch.Tensor, torch.Tensor], None]:
        """What makes out [rows, outputs] of x [rows, inputs]: its product with the transposed weights, all float32.

        Others may round x to 8 or 16 bits, with a scale for each group of inputs.
        """
        return _product(weight)

    def halves_product(self, weight: HalvesMatrix) -> Callable[[torch.Tensor, torch.Tensor], None]:
        """The same of weights of 16 bits; no x is rounded."""
        return _product(weight)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory for a result of operations on integers that are kept, on a CPU."""
        return torch.empty(shape, dtype=dtype)

    def program(self, record: Record, most: Sizes, then: Then | None = None) -> Program:
        """What `record` calls these for, as one list for all sizes up to `most`, where operations keep integers; and
        `then` of its result, where that is wanted too."""
        raise NotImplementedError

    def quantised_rows(self, weight: QuantisedMatrix, indices: torch.Tensor) -> torch.Tensor:
        """The weights of some outputs: indices [n], int64, to [n, inputs] float32."""
        return weight.rows(indices)

    def halves_rows(self, weight: HalvesMatrix, indices: torch.Tensor) -> torch.Tensor:
        """The same of weights of 16 bits."""
        return weight.rows(indices)

    def rows(self, table: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Some rows of table [rows, size]: indices [n], int64, to [n, size]."""
        return F.embedding(indices, table)

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """x [tokens, size] plus y, [tokens, size] or [size], in place."""
        return x.add_(y)

    def scale(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        """x [tokens, size] times a number, in place."""
        return x.mul_(factor)

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up [tokens, size], where x [tokens, 2 * size] holds the gates and then the ups."""
        gate, up = x.float().chunk(2, -1)
        return (F.silu(gate) * up).to(x.dtype)

    def gelu_mul(self, x: torch.Tensor) -> torch.Tensor:
        """gelu(gate) * up likewise, with the approximation of gelu by tanh."""
        gate, up = x.float().chunk(2, -1)
        return (F.gelu(gate, approximate="tanh") * up).to(x.dtype)

    def gelu(self, x: torch.Tensor) -> torch.Tensor:
        """gelu(x) [tokens, size], with the same approximation."""
        return F.gelu(x.float(), approximate="tanh").to(x.dtype)

    def softcap(self, x: torch.Tensor, cap: float) -> None:
        """Bounds x [..., size], float32, in place: cap * tanh(x / cap)."""
        x.div_(cap).tanh_().mul_(cap)


def _product(weight: TiledMatrix) -> Callable[[torch.Tensor, torch.Tensor], None]:
    def product(x: torch.Tensor, out: torch.Tensor) -> None:
        first = 0
        for part in weight.chunks():
            torch.mm(x, part.T, out=out[:, first : first + len(part)])
            first += len(part)

    return product


def _stored(x: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """x as a cache of this type keeps it."""
    if dtype is FP8:
        x = (x.float() * (1 / scale)).clamp(-448, 448)
    elif dtype is torch.float16 and x.dtype is not dtype:
        x = x.float().clamp(-65504, 65504)
    return x.to(dtype)
