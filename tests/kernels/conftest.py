"""The CPU kernels, one variant at a time."""

from __future__ import annotations

import os
import re
import zlib
from importlib.util import find_spec
from pathlib import Path

# Before torch: threads that wait must not spin on the cores that other tests and processes need.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch

from kernels.cpu import CpuOps
from kernels.cpu_library import load_library, variants

collect_ignore = [
    path.name
    for path in Path(__file__).parent.glob("test_*.py")
    if find_spec("triton") is None and re.search(r"kernels\.(interpreted|cross_compile) import", path.read_text())
]
"""Without Triton there are no kernels for GPUs to test."""
VARIANTS = ["generic", "avx2", "avx512", "amx"]


def cpu_ops(variant: str, num_threads: int = 2) -> CpuOps:
    library = load_library(variant)
    if library is None or variant not in variants():
        pytest.skip(f"{variant} is not built or does not run here")
    return CpuOps(library, num_threads)


@pytest.fixture(autouse=True)
def same_numbers_each_time(request: pytest.FixtureRequest) -> None:
    """Of torch's own random numbers: what is near a tolerance is so in every run or in none."""
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def ops(variant: str) -> CpuOps:
    return cpu_ops(variant)
