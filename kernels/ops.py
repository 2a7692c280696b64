"""Ops: the operations a model is made of, and the one table from a kind of device to their implementation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.reference import ReferenceOps

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

Ops = ReferenceOps
"""The interface is the reference's: every implementation is a subclass that overrides what it does faster."""


def _cpu(device: torch.device, block_size: int, num_threads: int) -> Ops:
    from kernels.cpu import make_cpu_ops

    return make_cpu_ops(block_size, num_threads)


def _cuda(device: torch.device, block_size: int, num_threads: int) -> Ops:
    from kernels.cuda import CudaOps
    from kernels.gpu import Gpu

    return CudaOps(Gpu.of(device))


_IMPLEMENTATIONS: dict[str, Callable[[torch.device, int, int], Ops]] = {"cpu": _cpu, "cuda": _cuda}


def make_ops(device: torch.device, block_size: int, num_threads: int) -> Ops:
    """The operations for a device, on `num_threads` CPU threads; block_size is that of the KV cache.

    A device without kernels of its own gets the reference.
    """
    make = _IMPLEMENTATIONS.get(device.type)
    return make(device, block_size, num_threads) if make else ReferenceOps()
