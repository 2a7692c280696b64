"""CpuOps: the C++ kernels of cpp/, for whatever sizes they take."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

import torch

from kernels.cpu_library import Calls, Library, load_library, variants
from kernels.cpu_sampling import CpuSampling
from kernels.pool import Pool
from kernels.reference import ReferenceOps

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kernels.cpu_program import Program, Record, Sizes, Then
    from kernels.halves import HalvesMatrix
    from kernels.low_rank import LowRank, Tokens
    from kernels.quantised import QuantisedMatrix
    from kernels.reference_step import StepTensors

logger = logging.getLogger(__name__)

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_SILU, _GELU = 0, 1
"""Activations of the gated product, as cpp/elementwise.h numbers them."""
LARGE = 1 << 18
"""Bytes of a result that comes from the pool."""
_LANES = 16
"""Sizes must be a multiple of the widest vector, floats; others take the reference."""


def make_cpu_ops(block_size: int, num_threads: int) -> ReferenceOps:
    """The fastest kernels that this processor runs and that take blocks of this size."""
    for variant in variants():
        library = load_library(variant)
        if library is not None and block_size % library.vector_width == 0:
            return CpuOps(library, num_threads)
    logger.warning("the C++ kernels are not built (no compiler at install time?): attention will be slow")
    return ReferenceOps()


class CpuOps(CpuSampling):
    """Each operation adds up a row in one fixed order: its result does not depend on the rows beside it."""

    keeps_integers = True

    def __init__(self, library: Library, num_threads: int) -> None:
        self.calls = calls = Calls(library, num_threads)
        super().__init__(calls)
        self._pool = Pool()
        self._attention = calls.kernel("attention")
        self._write_kv = calls.kernel("write_kv")
        self._rms_norm = calls.kernel("rms_norm")
        self._layer_norm = calls.kernel("layer_norm")
        self._rotary = calls.kernel("rotary")
        self._norm_heads = calls.kernel("norm_heads")
        self._gated = calls.kernel("gated")
        self._gelu = calls.kernel("gelu")
        self._softcap = calls.kernel("softcap")
        self._add = calls.kernel("add")
        self._scale = calls.kernel("scale")
        self._add_low_rank = calls.kernel("add_low_rank")
        self._rows = calls.kernel("rows")
        self._quantised_linear = calls.kernel("quantised_linear")
        self._quantised_rows = calls.kernel("quantised_rows")
        self._halves_linear = calls.kernel("halves_linear")
        self._halves_rows = calls.kernel("halves_rows")
        self._step_tensors = calls.kernel("step_tensors")

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        if self.calls.recording is not None or math.prod(shape) * dtype.itemsize < LARGE:
            return torch.empty(shape, dtype=dtype)
        return self._pool.empty(shape, dtype)

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
        if key_cache.dtype not in _DTYPES:
            return super().write_kv(key, value, key_cache, value_cache, slots, key_scale, value_scale)
        tokens, kv_heads, head_dim = key.shape
        assert key.stride(1) == value.stride(1) == head_dim
        assert slots.dtype == torch.int64
        self._write_kv(
            key.data_ptr(),
            value.data_ptr(),
            key_cache.data_ptr(),
            value_cache.data_ptr(),
            slots.data_ptr(),
            tokens,
            key.stride(0),
            value.stride(0),
            _DTYPES[key.dtype],
            _DTYPES[key_cache.dtype],
            kv_heads,
            head_dim,
            value_cache.shape[2],
        )

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
        tokens, heads, head_dim = query.shape
        if head_dim % _LANES or sinks is not None or key_cache.dtype not in _DTYPES:
            return super().attention(
                query,
                key_cache,
                value_cache,
                query_starts,
                seq_lens,
                block_tables,
                scale,
                sliding_window,
                softcap,
                sinks,
                key_scale,
                value_scale,
            )
        assert query.stride(1) == head_dim
        assert query_starts.dtype == seq_lens.dtype == block_tables.dtype == torch.int32
        out = self.empty((tokens, heads, head_dim), query.dtype)
        self._attention(
            query.data_ptr(),
            key_cache.data_ptr(),
            value_cache.data_ptr(),
            out.data_ptr(),
            query_starts.data_ptr(),
            seq_lens.data_ptr(),
            block_tables.data_ptr(),
            query.stride(0),
            block_tables.stride(0),
            seq_lens.shape[0],
            heads,
            key_cache.shape[1],
            head_dim,
            value_cache.shape[2],
            sliding_window,
            _DTYPES[query.dtype],
            _DTYPES[key_cache.dtype],
            scale,
            softcap,
        )
        return out

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        tokens, size = x.shape
        if size % _LANES:
            return super().rms_norm(x, weight, eps, residual)
        assert x.is_contiguous()
        assert weight.dtype == torch.float32
        out = self.empty(x.shape, x.dtype)
        summed = None if residual is None else residual.data_ptr()
        pointers = x.data_ptr(), summed, weight.data_ptr(), None, out.data_ptr()
        self._rms_norm(*pointers, tokens, size, eps, _DTYPES[x.dtype])
        return out

    def layer_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        eps: float,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        tokens, size = x.shape
        if size % _LANES:
            return super().layer_norm(x, weight, bias, eps, residual)
        assert x.is_contiguous()
        assert weight.dtype == bias.dtype == torch.float32
        out = self.empty(x.shape, x.dtype)
        summed = None if residual is None else residual.data_ptr()
        pointers = x.data_ptr(), summed, weight.data_ptr(), bias.data_ptr(), out.data_ptr()
        self._layer_norm(*pointers, tokens, size, eps, _DTYPES[x.dtype])
        return out

    def norm_heads(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        tokens, heads, head_dim = x.shape
        if head_dim % _LANES:
            return super().norm_heads(x, weight, eps)
        assert x.stride(1) == head_dim
        assert weight.dtype == torch.float32
        pointers = x.data_ptr(), weight.data_ptr()
        self._norm_heads(*pointers, tokens, x.stride(0), eps, _DTYPES[x.dtype], heads, head_dim)
        return None

    def rotary(self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> None:
        tokens, heads, head_dim = x.shape
        rotated = 2 * cosines.shape[1]
        if rotated % _LANES:
            return super().rotary(x, cosines, sines)
        assert x.stride(1) == head_dim
        assert cosines.dtype == sines.dtype == torch.float32
        assert cosines.is_contiguous()
        assert sines.is_contiguous()
        pointers = x.data_ptr(), cosines.data_ptr(), sines.data_ptr()
        self._rotary(*pointers, tokens, x.stride(0), _DTYPES[x.dtype], heads, head_dim, rotated)
        return None

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        return super().silu_mul(x) if x.shape[1] % (2 * _LANES) else self._gate(_SILU, x)

    def gelu_mul(self, x: torch.Tensor) -> torch.Tensor:
        return super().gelu_mul(x) if x.shape[1] % (2 * _LANES) else self._gate(_GELU, x)

    def gelu(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] % _LANES:
            return super().gelu(x)
        assert x.is_contiguous()
        out = self.empty(x.shape, x.dtype)
        self._gelu(x.data_ptr(), out.data_ptr(), x.numel(), _DTYPES[x.dtype])
        return out

    def softcap(self, x: torch.Tensor, cap: float) -> None:
        if x.shape[-1] % _LANES:
            return super().softcap(x, cap)
        assert x.is_contiguous()
        assert x.dtype == torch.float32
        self._softcap(x.data_ptr(), x.numel(), cap)
        return None

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        rows, size = x.shape
        if size % _LANES or x.dtype != y.dtype:
            return super().add(x, y)
        assert x.is_contiguous()
        assert y.stride(-1) == 1
        self._add(x.data_ptr(), y.data_ptr(), rows, size, y.stride(0) if y.dim() == 2 else 0, _DTYPES[x.dtype])
        return x

    def scale(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        if x.shape[-1] % _LANES:
            return super().scale(x, factor)
        assert x.is_contiguous()
        self._scale(x.data_ptr(), x.numel(), factor, _DTYPES[x.dtype])
        return x

    def add_low_rank(self, out: torch.Tensor, x: torch.Tensor, factors: LowRank, tokens: Tokens) -> None:
        ins = x.shape[1]
        if ins % _LANES or any(part.b.shape[1] % _LANES for part in factors.parts):
            return super().add_low_rank(out, x, factors, tokens)
        assert x.is_contiguous()
        assert out.stride(1) == 1
        assert x.dtype is out.dtype
        stride, cell = out.stride(0), x.itemsize
        if isinstance(tokens, slice):
            start, count, indices = tokens.start, tokens.stop - tokens.start, None
        else:
            assert tokens.is_contiguous()
            start, count, indices = 0, len(tokens), tokens.data_ptr()
        from_, to = x.data_ptr() + start * ins * cell, out.data_ptr() + start * stride * cell
        for first, a, b in factors.parts:
            pointers = from_, to + first * cell, a.data_ptr(), b.data_ptr(), indices
            self._add_low_rank(*pointers, count, ins, b.shape[1], stride, a.shape[0], _DTYPES[x.dtype])
        return None

    def rows(self, table: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        assert table.stride(1) == 1
        assert indices.dtype == torch.int64
        assert indices.is_contiguous()
        (count,), size, cell = indices.shape, table.shape[1], table.itemsize
        out = self.empty((count, size), table.dtype)
        pointers = table.data_ptr(), indices.data_ptr(), out.data_ptr()
        self._rows(*pointers, count, size * cell, table.stride(0) * cell)
        return out

    def program(self, record: Record, most: Sizes, then: Then | None = None) -> Program:
        from kernels.cpu_program import Program

        return Program(self.calls, record, most, then)

    def quantised_rows(self, weight: QuantisedMatrix, indices: torch.Tensor) -> torch.Tensor:
        assert indices.dtype == torch.int64
        assert indices.is_contiguous()
        (count,), size = indices.shape, weight.shape[1]
        out = self.empty((count, size), torch.float32)
        pointers = weight.tiles.data_ptr(), indices.data_ptr(), out.data_ptr()
        self._quantised_rows(*pointers, count, size, *_numbers(weight))
        return out

    def quantised_product(
        self, weight: QuantisedMatrix, activation_bits: int = 16
    ) -> Callable[[torch.Tensor, torch.Tensor], None]:
        (outputs, size), numbers = weight.shape, _numbers(weight)
        kernel = self._quantised_linear

        def product(x: torch.Tensor, out: torch.Tensor) -> None:
            assert x.is_contiguous()
            assert x.dtype == out.dtype == torch.float32
            pointers = weight.tiles.data_ptr(), x.data_ptr(), out.data_ptr()
            kernel(*pointers, x.shape[0], size, outputs, out.stride(0), *numbers, activation_bits)

        return product

    def halves_rows(self, weight: HalvesMatrix, indices: torch.Tensor) -> torch.Tensor:
        assert indices.dtype == torch.int64
        assert indices.is_contiguous()
        (count,), size = indices.shape, weight.shape[1]
        out = self.empty((count, size), torch.float32)
        pointers = weight.tiles.data_ptr(), indices.data_ptr(), out.data_ptr()
        self._halves_rows(*pointers, count, size, _DTYPES[weight.tiles.dtype])
        return out

    def halves_product(self, weight: HalvesMatrix) -> Callable[[torch.Tensor, torch.Tensor], None]:
        (outputs, size), dtype, kernel = weight.shape, _DTYPES[weight.tiles.dtype], self._halves_linear

        def product(x: torch.Tensor, out: torch.Tensor) -> None:
            assert x.is_contiguous()
            assert x.dtype == out.dtype == torch.float32
            pointers = weight.tiles.data_ptr(), x.data_ptr(), out.data_ptr()
            kernel(*pointers, x.shape[0], size, outputs, out.stride(0), dtype)

        return product

    def step_tensors(
        self,
        token_table: torch.Tensor,
        block_table: torch.Tensor,
        rows: torch.Tensor,
        starts: torch.Tensor,
        query_starts: torch.Tensor,
        num_tokens: int,
        block_size: int,
        out: StepTensors,
    ) -> None:
        padded_rows, width = out.block_tables.shape
        given = token_table, block_table, rows, starts, query_starts, *out
        self._step_tensors(
            *(tensor.data_ptr() for tensor in given),
            token_table.stride(0),
            block_table.stride(0),
            out.block_tables.stride(0),
            rows.shape[0],
            padded_rows,
            out.input_ids.shape[0],
            width,
            block_size,
        )

    def _gate(self, activation: int, x: torch.Tensor) -> torch.Tensor:
        assert x.is_contiguous()
        tokens, size = x.shape[0], x.shape[1] // 2
        out = self.empty((tokens, size), x.dtype)
        self._gated(x.data_ptr(), out.data_ptr(), tokens, size, _DTYPES[x.dtype], activation)
        return out


def _numbers(weight: QuantisedMatrix) -> tuple[int, int, bool, bool]:
    """How a kernel is told of a format."""
    form = weight.format
    return form.bits, form.group, form.has_minimums, form.scale_type == torch.float32
