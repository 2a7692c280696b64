"""Which implementation a device gets."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels import cpu
from kernels.cpu import CpuOps
from kernels.cpu_library import load_library
from kernels.ops import make_ops
from kernels.reference import ReferenceOps
from tests.kernels.conftest import cpu_ops

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
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    wide, narrow = load_library("avx512"), load_library("avx2")
    if wide is None or narrow is None:
        pytest.skip("not built")
    assert make_ops(CPU, 32, 1).calls.library is wide
    assert make_ops(CPU, 24, 1).calls.library is narrow


def test_a_processor_with_amx_gets_its_variant():
    library = cpu_ops("amx").calls.library
    assert make_ops(CPU, 16, 1).calls.library is library


REFUSED = """
import ctypes
from kernels.cpu import make_cpu_ops
from kernels.cpu_library import load_library, variants

class Stack(ctypes.Structure):
    _fields_ = [("memory", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]

# A stack for signals that tiles would not fit on: the system refuses them then.
memory = ctypes.create_string_buffer(8192)
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(Stack(ctypes.addressof(memory), 0, 8192)), None) == 0
assert variants()[0] == "amx"
assert load_library("amx") is None
assert make_cpu_ops(16, 1).calls.library is load_library("avx512")
"""


def test_a_system_that_refuses_tiles_gets_the_next_variant():
    cpu_ops("amx")
    subprocess.run([sys.executable, "-c", REFUSED], cwd=Path(__file__).parents[2], check=True)


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
