"""Triton kernels without a GPU: Triton's interpreter runs them (see tests/conftest.py), beside their PyTorch twins.

What a kernel must not read is NaN, what it must write is NaN before, what it must not write is compared after.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from kernels.cuda import CudaOps
from kernels.gpu import Gpu

if TYPE_CHECKING:
    from collections.abc import Iterator

AMPERE, HOPPER = Gpu(capability=80, num_sms=108), Gpu(capability=90, num_sms=132)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
"""Largest difference from the twin, of numbers around 1: two units in the last place, or sums in another order."""

_patch_tensors = interpreter._patch_lang_tensor


def _patch_tensors_for_numpy(tensor: Any, scope: Any) -> None:
    """Bounds of loops are arrays of one number to the interpreter; int() of these is an error since NumPy 2.4."""
    _patch_tensors(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


interpreter._patch_lang_tensor = _patch_tensors_for_numpy

_convert_float = interpreter._convert_float
_FLOATS = {
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
}
_BITS = {1: (np.uint8, torch.uint8), 2: (np.uint16, torch.uint16), 4: (np.uint32, torch.uint32)}


def _convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
    """Bits of one type of float as those of another. The interpreter's own cuts bfloat16 off instead of rounding, and
    loses the carry of a mantissa that is rounded up, small numbers and NaN on the way to float8."""
    if not {source, target} <= _FLOATS.keys():
        return _convert_float(data, source, target, rounding)
    old, new = _FLOATS[source], _FLOATS[target]
    bits = np.ascontiguousarray(data).view(_BITS[old.itemsize][0])
    converted = torch.from_numpy(bits).view(old).to(new)
    return converted.view(_BITS[new.itemsize][1]).numpy()


interpreter._convert_float = _convert


def _dot(self: Any, a: Any, b: Any, accumulator: Any, *options: Any) -> Any:
    """The interpreter holds bfloat16 as the integers of its bits, and multiplies them as such.

    In float64, because a row of BLAS's product in float32 depends on its place among the others, which no GPU's does.
    """
    wide = [
        (x.data.astype(np.uint32) << 16).view(np.float32) if x.dtype.scalar == tl.bfloat16 else x.data for x in (a, b)
    ]
    product = np.matmul(wide[0].astype(np.float64), wide[1]) + accumulator.data
    return interpreter.TensorHandle(product.astype(accumulator.data.dtype), accumulator.dtype.scalar)


interpreter.InterpreterBuilder.create_dot = _dot
# Of what a GPU computes without a word: products with memory nobody wrote, which are replaced afterwards.
interpreter.GridExecutor.__call__ = np.errstate(all="ignore")(interpreter.GridExecutor.__call__)


def cuda_ops(gpu: Gpu = HOPPER) -> CudaOps:
    """Those of a GPU, to be called with tensors of the CPU."""
    return CudaOps(gpu)


@contextmanager
def poisoned_outputs() -> Iterator[None]:
    """Whatever is allocated within holds NaN, integers their largest value, until it is written."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def assert_equals_twin(ours: torch.Tensor, twin: torch.Tensor, tolerance: float | None = None) -> None:
    """Shape, type and numbers are the same; the tolerance grows with numbers over 1, and is none for integers.

    NaN equals nothing. Where the twin makes NaN, compare isnan() of both.
    """
    assert (ours.shape, ours.dtype) == (twin.shape, twin.dtype)
    if not ours.is_floating_point():
        tolerance = 0
    elif tolerance is None:
        tolerance = TOLERANCE[ours.dtype]
    torch.testing.assert_close(ours, twin, atol=tolerance, rtol=tolerance, equal_nan=False)
