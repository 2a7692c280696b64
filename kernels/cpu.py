"""CpuOps: the C++ kernels of cpp/, called through ctypes (which releases the GIL).

The same source is compiled once per instruction set; the best one this processor runs is loaded after
torch, so that it shares torch's OpenMP runtime and its threads.
"""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kernels.reference import ReferenceOps

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernels.quantised import QuantisedMatrix

logger = logging.getLogger(__name__)

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_SILU, _GELU = 0, 1
"""Activations of the gated product, as cpp/elementwise.h numbers them."""
_LANES = 16
"""Sizes must be a multiple of the widest vector, floats; others take the reference."""
_pointer, _int, _long, _float = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float


class _QuantisedArgs(ctypes.Structure):
    """QuantisedArgs of cpp/quantised.h, field by field."""

    _fields_ = [
        ("tiles", _pointer),
        ("x", _pointer),
        ("out", _pointer),
        ("rows", _long),
        ("size", _long),
        ("outputs", _long),
        ("stride", _long),
        ("bits", _int),
        ("group", _int),
        ("has_minimums", _int),
        ("wide_scales", _int),
        ("num_threads", _int),
    ]


class _AttentionArgs(ctypes.Structure):
    """AttentionArgs of cpp/attention.h, field by field."""

    _fields_ = [
        ("query", _pointer),
        ("key_cache", _pointer),
        ("value_cache", _pointer),
        ("out", _pointer),
        ("query_starts", _pointer),
        ("seq_lens", _pointer),
        ("block_tables", _pointer),
        ("query_stride", _long),
        ("table_stride", _long),
        ("num_rows", _int),
        ("num_heads", _int),
        ("num_kv_heads", _int),
        ("head_dim", _int),
        ("block_size", _int),
        ("sliding_window", _int),
        ("num_threads", _int),
        ("scale", _float),
        ("softcap", _float),
    ]


_SIGNATURES: dict[str, list[type]] = {
    "attention": [_int, _pointer],
    "write_kv": [_int, *[_pointer] * 5, *[_long] * 3, *[_int] * 4],
    "rms_norm": [_int, *[_pointer] * 4, _long, _long, _float, _int],
    "layer_norm": [_int, *[_pointer] * 5, _long, _long, _float, _int],
    "rotary": [_int, *[_pointer] * 3, _long, _long, *[_int] * 4],
    "norm_heads": [_int, *[_pointer] * 2, _long, _long, _int, _int, _float, _int],
    "gated": [_int, _int, *[_pointer] * 2, _long, _long, _int],
    "gelu": [_int, *[_pointer] * 2, _long, _int],
    "quantised_linear": [_pointer],
    "softcap": [_pointer, _long, _float, _int],
}


@cache
def load_library(variant: str) -> ctypes.CDLL | None:
    """The kernels compiled for an instruction set, or None where they were not built."""
    for suffix in EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(f"_cpu_{variant}{suffix}")
        if path.exists():
            library = ctypes.CDLL(str(path))
            for name, argument_types in _SIGNATURES.items():
                function = getattr(library, f"tailrace_{name}")
                function.argtypes, function.restype = argument_types, None
            return library
    return None


def variants() -> list[str]:
    """The instruction sets of this processor, best first."""
    capability = torch.backends.cpu.get_cpu_capability()
    has_avx512 = capability == "AVX512" and torch.cpu._is_vnni_supported()
    return ["avx512"] * has_avx512 + ["avx2"] * (capability in ("AVX2", "AVX512")) + ["generic"]


def make_cpu_ops(block_size: int, num_threads: int) -> ReferenceOps:
    """The fastest kernels that this processor runs and that take blocks of this size."""
    for variant in variants():
        library = load_library(variant)
        if library is not None and block_size % library.tailrace_vector_width() == 0:
            return CpuOps(library, num_threads)
    logger.warning("the C++ kernels are not built (no compiler at install time?): attention will be slow")
    return ReferenceOps()


class CpuOps(ReferenceOps):
    """Each operation adds up a row in one fixed order: its result does not depend on the rows beside it."""

    keeps_integers = True

    def __init__(self, library: ctypes.CDLL, num_threads: int) -> None:
        self._num_threads = num_threads
        self._attention = library.tailrace_attention
        self._write_kv = library.tailrace_write_kv
        self._rms_norm = library.tailrace_rms_norm
        self._layer_norm = library.tailrace_layer_norm
        self._rotary = library.tailrace_rotary
        self._norm_heads = library.tailrace_norm_heads
        self._gated = library.tailrace_gated
        self._gelu = library.tailrace_gelu
        self._softcap = library.tailrace_softcap
        self._quantised_linear = library.tailrace_quantised_linear

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
        if key_cache.dtype is not key.dtype:
            return super().write_kv(key, value, key_cache, value_cache, slots, key_scale, value_scale)
        tokens, kv_heads, head_dim = key.shape
        assert key.stride(1) == value.stride(1) == head_dim
        assert slots.dtype == torch.int64
        self._write_kv(
            _DTYPES[key.dtype],
            key.data_ptr(),
            value.data_ptr(),
            key_cache.data_ptr(),
            value_cache.data_ptr(),
            slots.data_ptr(),
            tokens,
            key.stride(0),
            value.stride(0),
            kv_heads,
            head_dim,
            value_cache.shape[2],
            self._num_threads,
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
    ) -> torch.Tensor:
        tokens, heads, head_dim = query.shape
        if head_dim % _LANES:
            return super().attention(
                query, key_cache, value_cache, query_starts, seq_lens, block_tables, scale, sliding_window, softcap
            )
        assert query.stride(1) == head_dim
        assert query_starts.dtype == seq_lens.dtype == block_tables.dtype == torch.int32
        out = torch.empty((tokens, heads, head_dim), dtype=query.dtype)
        arguments = _AttentionArgs(
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
            self._num_threads,
            scale,
            softcap,
        )
        self._attention(_DTYPES[query.dtype], ctypes.byref(arguments))
        return out

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        tokens, size = x.shape
        if size % _LANES:
            return super().rms_norm(x, weight, eps, residual)
        assert x.is_contiguous()
        assert weight.dtype == torch.float32
        out = torch.empty_like(x)
        summed = None if residual is None else residual.data_ptr()
        self._rms_norm(
            _DTYPES[x.dtype],
            x.data_ptr(),
            summed,
            weight.data_ptr(),
            out.data_ptr(),
            tokens,
            size,
            eps,
            self._num_threads,
        )
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
        out = torch.empty_like(x)
        summed = None if residual is None else residual.data_ptr()
        self._layer_norm(
            _DTYPES[x.dtype],
            x.data_ptr(),
            summed,
            weight.data_ptr(),
            bias.data_ptr(),
            out.data_ptr(),
            tokens,
            size,
            eps,
            self._num_threads,
        )
        return out

    def norm_heads(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        tokens, heads, head_dim = x.shape
        if head_dim % _LANES:
            return super().norm_heads(x, weight, eps)
        assert x.stride(1) == head_dim
        assert weight.dtype == torch.float32
        self._norm_heads(
            _DTYPES[x.dtype],
            x.data_ptr(),
            weight.data_ptr(),
            tokens,
            x.stride(0),
            heads,
            head_dim,
            eps,
            self._num_threads,
        )
        return None

    def rotary(self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> None:
        tokens, heads, head_dim = x.shape
        rotated = 2 * cosines.shape[1]
        if rotated % _LANES:
            return super().rotary(x, cosines, sines)
        assert x.stride(1) == head_dim
        assert cosines.dtype == sines.dtype == torch.float32
        self._rotary(
            _DTYPES[x.dtype],
            x.data_ptr(),
            cosines.data_ptr(),
            sines.data_ptr(),
            tokens,
            x.stride(0),
            heads,
            head_dim,
            rotated,
            self._num_threads,
        )
        return None

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        return super().silu_mul(x) if x.shape[1] % (2 * _LANES) else self._gate(_SILU, x)

    def gelu_mul(self, x: torch.Tensor) -> torch.Tensor:
        return super().gelu_mul(x) if x.shape[1] % (2 * _LANES) else self._gate(_GELU, x)

    def gelu(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] % _LANES:
            return super().gelu(x)
        assert x.is_contiguous()
        out = torch.empty_like(x)
        self._gelu(_DTYPES[x.dtype], x.data_ptr(), out.data_ptr(), x.numel(), self._num_threads)
        return out

    def softcap(self, x: torch.Tensor, cap: float) -> None:
        if x.shape[-1] % _LANES:
            return super().softcap(x, cap)
        assert x.is_contiguous()
        assert x.dtype == torch.float32
        self._softcap(x.data_ptr(), x.numel(), cap, self._num_threads)
        return None

    def quantised_product(self, weight: QuantisedMatrix) -> Callable[[torch.Tensor, torch.Tensor], None]:
        return _QuantisedProduct(self._quantised_linear, weight, self._num_threads)

    def _gate(self, activation: int, x: torch.Tensor) -> torch.Tensor:
        assert x.is_contiguous()
        tokens, size = x.shape[0], x.shape[1] // 2
        out = torch.empty((tokens, size), dtype=x.dtype)
        self._gated(_DTYPES[x.dtype], activation, x.data_ptr(), out.data_ptr(), tokens, size, self._num_threads)
        return out


class _QuantisedProduct:
    """Holds the weights, and the arguments that are the same for every call."""

    def __init__(self, function: Callable[..., None], weight: QuantisedMatrix, num_threads: int) -> None:
        form = weight.format
        self._function, self._weight = function, weight
        self._arguments = _QuantisedArgs(
            tiles=weight.tiles.data_ptr(),
            size=weight.shape[1],
            outputs=weight.shape[0],
            bits=form.bits,
            group=form.group,
            has_minimums=form.has_minimums,
            wide_scales=form.scale_type == torch.float32,
            num_threads=num_threads,
        )
        self._reference = ctypes.byref(self._arguments)

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        assert x.is_contiguous()
        assert x.dtype == out.dtype == torch.float32
        arguments = self._arguments
        arguments.x, arguments.out = x.data_ptr(), out.data_ptr()
        arguments.rows, arguments.stride = x.shape[0], out.stride(0)
        self._function(self._reference)
