"""CudaOps: what GPUs do faster than the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from kernels.triton_activation import TritonActivation
from kernels.triton_attention import TritonAttention
from kernels.triton_cache import TritonCache
from kernels.triton_edits import TritonEdits
from kernels.triton_norm import TritonNorm
from kernels.triton_sampling import TritonSampling
from kernels.triton_step import TritonStep

if TYPE_CHECKING:
    from kernels.gpu import Gpu

ALIGNMENT = 8
"""Numbers of 16 bits that rows of a grouped product must be a multiple of."""
FP8_CAPABILITY = 89
"""From here on GPUs convert numbers of this type themselves."""


class CudaOps(TritonStep, TritonAttention, TritonCache, TritonNorm, TritonActivation, TritonEdits, TritonSampling):
    """Each base is the Triton kernels of one noun; what torch has a good kernel for stands here.

    No method waits for the device: tests call them with tensors that have no values.
    """

    mixes_cache_types = False

    def __init__(self, gpu: Gpu, batch_invariant: bool = False) -> None:
        """batch_invariant: what a row gets does not depend on the rows beside it, at the price of some speed."""
        self.gpu, self.batch_invariant = gpu, batch_invariant
        self.takes_fp8_cache = gpu.capability >= FP8_CAPABILITY

    def grouped_matmul(self, x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """In one launch: the ends of segments stay on the device, and the host need not wait for them."""
        if x.dtype is not torch.bfloat16 or any(size % ALIGNMENT for size in weights.shape[1:]):
            return super().grouped_matmul(x, weights, ends)
        return F.grouped_mm(x, weights.transpose(1, 2), offs=ends.int())
