"""Every kernel that CudaOps launches compiles for Ampere and Hopper, spills nothing, and takes the fast products."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.kernels.cross_compile import SHARED_LIMIT, Compiled, launches, table

LAUNCHES = launches()
CASES = [(name, capability) for name, launch in LAUNCHES.items() for capability in launch.capabilities]


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> list[Compiled]:
    """In a process of its own: where the interpreter is on, nothing is compiled. What each takes stands in the log."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.cross_compile", "--json"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results = msgspec.json.decode(done.stdout, type=list[Compiled])
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        sys.stdout.write(f"\n{table(results)}\n")
    return results


@pytest.mark.parametrize(("name", "capability"), CASES)
def test_a_launch_compiles_without_spills_and_fits(compiled: list[Compiled], name: str, capability: int):
    kernels = [each for each in compiled if (each.launch, each.capability) == (name, capability)]
    assert kernels
    for kernel in kernels:
        assert kernel.stack == 0, f"{kernel.name} spills"
        assert kernel.shared <= SHARED_LIMIT[capability], f"{kernel.name}: {kernel.shared} bytes of shared memory"
        if capability == 90 and kernel.kernel in LAUNCHES[name].wgmma:
            assert kernel.products == "wgmma", kernel.name
