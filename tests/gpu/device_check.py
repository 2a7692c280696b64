"""Checks a device: every kernel and a whole model, right and then fast.

    python tests/gpu/device_check.py [--device cuda|cpu] [--wheels DIRECTORY]

prints what it finds as it goes and one table at the end; exit code 1 if a check failed or a bar was missed. On the CPU
it is a dry run of small sizes. What the device's Python lacks can be brought along as wheels.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NEEDS = ("msgspec", "llguidance")
"""That a device's Python may lack."""


def bring_along(wheels: Path) -> None:
    """Puts what is missing on the path, unpacked from its wheel. Raises SystemExit naming what has none."""
    for name in NEEDS:
        if importlib.util.find_spec(name) is not None:
            continue
        found = sorted(wheels.glob(f"{name}-*.whl"))
        if not found:
            raise SystemExit(f"{name} is missing: pip download --no-deps -d {wheels} {name}")
        directory = tempfile.mkdtemp()
        zipfile.ZipFile(found[-1]).extractall(directory)
        sys.path.append(directory)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--wheels", type=Path, default=ROOT / "build" / "wheels")
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    bring_along(arguments.wheels)

    import torch

    from tests.gpu.device_clock import DeviceClock
    from tests.gpu.device_report import DeviceReport, tell
    from tests.gpu.device_sizes import sizes
    from tests.gpu.kernel_checks import check_kernels
    from tests.gpu.model_checks import check_model, make_judge
    from tests.gpu.sampling_checks import check_sampling
    from tests.gpu.timings import time_kernels, time_model

    size = sizes(arguments.device)
    name = torch.cuda.get_device_name(size.device) if arguments.device == "cuda" else "CPU, a dry run"
    tell(f"{name}; Python {sys.version.partition(' ')[0]}, torch {torch.__version__}")
    report = DeviceReport(asks_speed=arguments.device == "cuda")
    with report.section("kernels"):
        check_kernels(report, size)
        check_sampling(report, size)
    with report.section("model"):
        judge = make_judge(size)
        check_model(report, size, judge)
        del judge
    with report.section("time of kernels"):
        clock = DeviceClock(size)
        time_kernels(report, size, clock)
    with report.section("time of a model"):
        time_model(report, size, clock)
    tell(f"\n{name}, {report.seconds:.0f} s\n\n{report.table()}")
    return 1 if report.num_missed else 0


if __name__ == "__main__":
    sys.exit(main())
