"""Compiles what CudaOps launches for GPUs that are not here, and tells what it takes of them.

Each module of `launches/` has LAUNCHES: calls of CudaOps with tensors of the meta device, which have shapes and no
values. The calls go through Triton's own launcher up to where it would load the kernel, so that types, alignments,
constants and configurations are those of a real launch.

    python -m tests.kernels.cross_compile              # a table; a name after it: only launches that contain it
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from kernels.gpu import Gpu

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kernels.cuda import CudaOps

SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024}
"""Bytes of shared memory that a block may have, by capability."""
GPUS = {80: Gpu(capability=80, num_sms=108), 90: Gpu(capability=90, num_sms=132)}


@dataclass(frozen=True)
class Launch:
    """A call whose kernels are compiled."""

    call: Callable[[CudaOps], Any]
    capabilities: tuple[int, ...] = (80, 90)
    wgmma: frozenset[str] = frozenset()
    """Names of kernels whose products must be Hopper's own instruction, or run at half the speed."""


@dataclass(frozen=True)
class Compiled:
    """What one kernel takes."""

    launch: str
    kernel: str
    capability: int
    num_warps: int
    num_stages: int
    registers: int
    stack: int
    """Bytes of each thread's registers and arrays that went to memory; 0 where nothing spilled."""
    shared: int
    """Bytes of shared memory of a block."""
    products: str
    """Which instruction multiplies matrices: wgmma (Hopper), wgmma one by one, mma, or none."""

    @property
    def name(self) -> str:
        return f"{self.launch} / {self.kernel} / sm_{self.capability}"


def meta(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor without values."""
    return torch.empty(size, dtype=dtype, device="meta")


def launches() -> dict[str, Launch]:
    found: dict[str, Launch] = {}
    for path in sorted((Path(__file__).parent / "launches").glob("*.py")):
        found |= importlib.import_module(f"tests.kernels.launches.{path.stem}").LAUNCHES
    return found


class _NoDriver:
    """Stands where Triton asks which GPU there is."""

    capability = 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        """Triton keeps what it has compiled by device."""
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_all(chosen: dict[str, Launch]) -> Iterator[Compiled]:
    """Each kernel of each launch, once per capability. This process can launch no kernels afterwards."""
    import triton
    from triton.runtime.jit import JITFunction

    from kernels.cuda import CudaOps

    driver, compiled = _NoDriver(), []
    triton.runtime.driver.set_active(driver)
    run = JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        compiled.append(run(kernel, *args, grid=grid, warmup=True, **kwargs))

    JITFunction.run = compile_only
    for name, launch in chosen.items():
        for driver.capability in launch.capabilities:
            compiled.clear()
            launch.call(CudaOps(GPUS[driver.capability]))
            assert compiled, f"{name} launches nothing"
            for kernel in compiled:
                yield _describe(name, driver.capability, kernel)


def _describe(launch: str, capability: int, kernel: Any) -> Compiled:
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = _output(knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name)
    numbers = {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", usage)}
    return Compiled(
        launch=launch,
        kernel=kernel.metadata.name,
        capability=capability,
        num_warps=kernel.metadata.num_warps,
        num_stages=kernel.metadata.num_stages,
        registers=numbers["REG"],
        stack=numbers["STACK"] + numbers["LOCAL"],
        shared=kernel.metadata.shared,
        products=_products(kernel.asm["ptx"], capability),
    )


def _products(ptx: str, capability: int) -> str:
    from triton.backends.nvidia.compiler import get_ptxas

    if "wgmma.mma_async" not in ptx:
        return "mma" if "mma.sync" in ptx else "none"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        said = _output(get_ptxas(capability).path, "-v", f"--gpu-name=sm_{capability}a", file.name, "-o", os.devnull)
    # It waits for each product before the next where it cannot keep track of their registers, and says so.
    return "wgmma one by one" if "serialized" in said else "wgmma"


def _output(*command: str) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True)
    return done.stdout


def table(results: list[Compiled]) -> str:
    """In Markdown."""
    lines = [
        "| launch | kernel | sm | warps | registers | spilled | shared, KB | products |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        cells = (result.launch, f"`{result.kernel}`", result.capability, result.num_warps, result.registers)
        cells += (result.stack, f"{result.shared / 1024:.1f}", result.products)
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    as_json = "--json" in sys.argv
    words = [argument for argument in sys.argv[1:] if argument != "--json"]
    chosen = {name: launch for name, launch in launches().items() if all(word in name for word in words)}
    results = list(compile_all(chosen))
    text = msgspec.json.encode([asdict(result) for result in results]).decode() if as_json else table(results)
    sys.stdout.write(text + "\n")
