"""Norms and activations of models of 0.1 to 400 billion parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tests.kernels.cross_compile import Launch, meta

if TYPE_CHECKING:
    from kernels.cuda import CudaOps


def wide(*size: int) -> torch.Tensor:
    return meta(*size, dtype=torch.float32)


def rms_norm(ops: CudaOps, size: int) -> None:
    ops.rms_norm(meta(64, size), wide(size), 1e-5)
    ops.rms_norm(meta(64, size), wide(size), 1e-5, meta(64, size))


LAUNCHES = {
    "rms norm, 576": Launch(lambda ops: rms_norm(ops, 576)),
    "rms norm, 4096": Launch(lambda ops: rms_norm(ops, 4096)),
    "rms norm, 16384": Launch(lambda ops: rms_norm(ops, 16384)),
    "layer norm, 768": Launch(lambda ops: ops.layer_norm(meta(64, 768), wide(768), wide(768), 1e-5)),
    "layer norm, 12288": Launch(
        lambda ops: ops.layer_norm(meta(64, 12288), wide(12288), wide(12288), 1e-5, meta(64, 12288))
    ),
    "norm of heads, 128": Launch(lambda ops: ops.norm_heads(meta(64, 40, 128)[:, :32], wide(128), 1e-6)),
    "norm of heads, 256": Launch(lambda ops: ops.norm_heads(meta(64, 6, 256)[:, :4], wide(256), 1e-6)),
    "silu and gate": Launch(lambda ops: ops.silu_mul(meta(64, 28672))),
    "gelu and gate": Launch(lambda ops: ops.gelu_mul(meta(64, 4096))),
    "gelu": Launch(lambda ops: ops.gelu(meta(64, 3072))),
    "softcap": Launch(lambda ops: ops.softcap(wide(64, 262144), 30.0)),
}
