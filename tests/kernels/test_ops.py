"""Which implementation a device gets."""

from __future__ import annotations

import logging

import pytest
import torch

from kernels import cpu
from kernels.cpu import CpuOps
from kernels.cpu_library import load_library
from kernels.ops import make_ops
from kernels.reference import ReferenceOps

CPU = torch.device("cpu")


def test_a_cpu_gets_the_best_variant_it_can_run(monkeypatch: pytest.MonkeyPatch):
    for capability, variant in (("AVX2", "avx2"), ("DEFAULT", "generic"), ("SVE256", "generic")):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda capability=capability: capability)
        library = load_library(variant)
        if library is None:
            pytest.skip(f"{variant} is not built")
        ops = make_ops(CPU, 16, 1)
        assert isinstance(ops, CpuOps)
        assert ops.calls.library is library


def test_blocks_that_a_wide_vector_does_not_divide_get_a_narrower_variant(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    wide, narrow = load_library("avx512"), load_library("avx2")
    if wide is None or narrow is None:
        pytest.skip("not built")
    assert make_ops(CPU, 32, 1).calls.library is wide
    assert make_ops(CPU, 24, 1).calls.library is narrow


def test_without_compiled_kernels_the_reference_computes_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(cpu, "load_library", lambda variant: None)
    with caplog.at_level(logging.WARNING):
        ops = make_ops(CPU, 16, 1)
    assert type(ops) is ReferenceOps
    (record,) = caplog.records
    assert "C++ kernels are not built" in record.message


def test_a_device_without_kernels_of_its_own_gets_the_reference():
    assert type(make_ops(torch.device("xpu"), 16, 1)) is ReferenceOps
