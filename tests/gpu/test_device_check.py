"""The check of a device, dry: every line of it that needs no GPU, on small sizes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.gpu.device_report import DeviceReport

SCRIPT = Path(__file__).with_name("device_check.py")


def test_a_dry_run_passes_and_prints_its_table() -> None:
    run = subprocess.run([sys.executable, str(SCRIPT), "--device", "cpu"], capture_output=True, text=True, timeout=170)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    table = [line for line in run.stdout.splitlines() if line.startswith("|")]
    assert sum("| yes |" in line for line in table) > 30
    assert any("decode step of" in line for line in table)


def test_what_is_wrong_is_told_and_counted() -> None:
    report = DeviceReport(asks_speed=True)
    with report.section("one"):
        report.near("not a number", float("nan"), 1.0)
        report.near("near enough", 0.5, 1.0)
        report.measure("slow", 1.0, "ms", share=0.5, bar=0.8)
        raise RuntimeError("lost")
    with report.section("two"):
        report.check("afterwards", True)
    assert [row.is_met for row in report.rows] == [False, True, False, False, True]
    assert report.num_missed == 3
    assert "RuntimeError: lost" in report.table()


def test_a_dry_run_asks_for_no_speed() -> None:
    report = DeviceReport(asks_speed=False)
    report.measure("slow", 1.0, "ms", share=0.5, bar=0.8)
    assert report.num_missed == 0
