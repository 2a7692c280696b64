"""CudaOps: what GPUs do faster than the reference, so far with torch's own kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.reference import ReferenceOps

ALIGNMENT = 8
"""Numbers of 16 bits that rows of a grouped product must be a multiple of."""


class CudaOps(ReferenceOps):
    """Runs wherever torch does, and is tested on a CPU."""

    def grouped_matmul(self, x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """In one launch: the ends of segments stay on the device, and the host need not wait for them."""
        if x.dtype is not torch.bfloat16 or any(size % ALIGNMENT for size in weights.shape[1:]):
            return super().grouped_matmul(x, weights, ends)
        return F.grouped_mm(x, weights.transpose(1, 2), offs=ends.int())
