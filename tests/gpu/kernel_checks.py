"""Every kernel of a device against its twin in PyTorch, on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kernels.ops import make_ops
from kernels.reference import ReferenceOps
from tests.kernels.attention_cases import make_batch

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernels.ops import Ops
    from tests.gpu.device_report import DeviceReport
    from tests.gpu.device_sizes import DeviceSizes
    from tests.kernels.attention_cases import Batch

BLOCK_SIZE = 16
ERRORS = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Of a number about 1, by the type it is rounded to."""
BATCHES = [
    [(37, 37), (130, 130)],
    [(64, 300), (5, 77)],
    [(1, 1), (1, 16), (1, 17), (1, 200), (1, 1000)],
    [(1, 500), (90, 90), (1, 33), (3, 130)],
]
"""Queries and keys of each row: prompts, pieces of prompts, rows that draw, and all of these together."""
BF16 = torch.bfloat16
VARIANTS: dict[str, tuple[torch.dtype, tuple[int, int, int], dict[str, Any]]] = {
    "128 dimensions, bfloat16": (BF16, (32, 8, 128), {}),
    "128, float16": (torch.float16, (32, 8, 128), {}),
    "128, float32": (torch.float32, (32, 8, 128), {}),
    "64, three heads to one": (BF16, (9, 3, 64), {}),
    "80": (BF16, (4, 4, 80), {}),
    "256, eight to one": (BF16, (8, 1, 256), {}),
    "128, window": (BF16, (32, 8, 128), {"window": 50}),
    "128, cap": (BF16, (32, 8, 128), {"softcap": 30.0}),
    "64, sinks": (BF16, (8, 2, 64), {"has_sinks": True}),
}
"""Each is a kernel of its own: type, heads, KV heads and their size, and what else there is to attention."""


def check_kernels(report: DeviceReport, sizes: DeviceSizes) -> None:
    ops, twin = make_ops(sizes.device, BLOCK_SIZE, 2), ReferenceOps()
    _check_attention(report, ops, twin, sizes.device)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        for what, call in _ELEMENTWISE.items():
            ours, truth = (call(each, sizes.device, dtype) for each in (ops, twin))
            report.near(f"{what}, {name}", _error(ours, truth), ERRORS[dtype])


def _check_attention(report: DeviceReport, ops: Ops, twin: Ops, device: torch.device) -> None:
    for name, (dtype, shape, options) in VARIANTS.items():
        batches = [make_batch(rows, *shape, BLOCK_SIZE, dtype, device=device, **options) for rows in BATCHES]
        report.near(f"attention, {name}", _attention_error(batches, ops, twin), ERRORS[dtype])
    batches = [make_batch(rows, 32, 8, 128, BLOCK_SIZE, BF16, device=device) for rows in BATCHES]
    in_eight_bits = [batch.in_eight_bits(0.02, 0.01) for batch in batches]
    report.near("attention, 128, fp8 cache", _attention_error(in_eight_bits, ops, twin), ERRORS[BF16])


def _attention_error(batches: list[Batch], ops: Ops, twin: Ops) -> float:
    """NaN if one of them is."""
    return float(torch.tensor([_error(batch.run(ops), batch.run(twin)) for batch in batches]).max())


def _error(ours: torch.Tensor, truth: torch.Tensor) -> float:
    """The largest difference, of numbers over 1 the largest relative one; NaN if one is not a number."""
    ours, truth = ours.float(), truth.float()
    return float(((ours - truth).abs() / truth.abs().clamp(min=1.0)).max())


def _random(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(*shape, device=device, generator=generator).to(dtype)


def _rms_norm(ops: Ops, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    x, residual = (_random(33, 4096, device=device, dtype=dtype, seed=seed) for seed in (1, 2))
    normed = ops.rms_norm(x, _random(4096, device=device), 1e-5, residual)
    return torch.cat([normed, residual])


def _layer_norm(ops: Ops, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    x = _random(33, 768, device=device, dtype=dtype, seed=1)
    return ops.layer_norm(x, _random(768, device=device), _random(768, device=device, seed=3), 1e-5)


def _norm_heads(ops: Ops, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    x = _random(33, 8, 128, device=device, dtype=dtype)
    ops.norm_heads(x, _random(128, device=device), 1e-6)
    return x


def _rotary(ops: Ops, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    x, angles = _random(33, 8, 128, device=device, dtype=dtype), _random(33, 32, device=device, seed=4)
    ops.rotary(x, angles.cos(), angles.sin())
    return x


def _silu_mul(ops: Ops, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return ops.silu_mul(_random(33, 2 * 1000, device=device, dtype=dtype))


def _gelu_mul(ops: Ops, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return ops.gelu_mul(_random(33, 2 * 1000, device=device, dtype=dtype))


def _softcap(ops: Ops, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    x = 40 * _random(33, 1001, device=device)
    ops.softcap(x, 30.0)
    return x


_ELEMENTWISE: dict[str, Callable[[Ops, torch.device, torch.dtype], torch.Tensor]] = {
    "RMS norm with residual": _rms_norm,
    "layer norm": _layer_norm,
    "norm of heads": _norm_heads,
    "rotary": _rotary,
    "SiLU gate": _silu_mul,
    "GELU gate": _gelu_mul,
    "softcap": _softcap,
}
