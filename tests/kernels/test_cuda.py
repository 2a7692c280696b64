"""CudaOps is made for a device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch

from kernels.ops import make_ops
from tests.kernels.interpreted import CudaOps, Gpu

if TYPE_CHECKING:
    import pytest


def test_a_gpu_gets_kernels_shaped_for_it(monkeypatch: pytest.MonkeyPatch):
    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", {torch.device("cuda", 1): properties}.get)
    ops = make_ops(torch.device("cuda", 1), 16, 1)
    assert isinstance(ops, CudaOps)
    assert ops.gpu == Gpu(capability=90, num_sms=132)
