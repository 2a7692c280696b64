"""A step's tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.reference_step import StepTensors
from tests.kernels.cross_compile import Launch, meta

if TYPE_CHECKING:
    from kernels.cuda import CudaOps


def int32s(*size: int) -> torch.Tensor:
    return meta(*size, dtype=torch.int32)


def step_tensors(ops: CudaOps) -> None:
    tokens = (meta(8192, dtype=torch.int64) for _ in range(3))
    out = StepTensors(*tokens, int32s(257), int32s(256), int32s(256, 512))
    ops.step_tensors(int32s(256, 8193), int32s(256, 512), int32s(200), int32s(200), int32s(201), 8000, 16, out)


LAUNCHES = {
    "step tensors": Launch(step_tensors),
    "store tokens": Launch(lambda ops: ops.store_tokens(int32s(256, 8193), int32s(200), int32s(200), int32s(200))),
}
