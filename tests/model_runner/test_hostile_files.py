"""Damaged model files load, or end in one clear line: within their memory, within their time, without a crash."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.model_runner.hostile import (
    GENERIC_CONFIG,
    damage_config,
    damage_directory,
    damaged_gguf,
    gguf_image,
    write_directory,
)

ROOT = Path(__file__).parents[2]
NUM_DAMAGED = 100
"""Of each kind."""


def outcomes(paths: list[Path]) -> list[tuple[str, str]]:
    """How each load ended; see load_files.py."""
    result = subprocess.run(
        [sys.executable, "-m", "tests.model_runner.load_files"],
        cwd=ROOT,
        input="\n".join(map(str, paths)),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return [tuple(json.loads(line)) for line in result.stdout.splitlines()]


def check(paths: list[Path]) -> int:
    """Each loads, or is refused in one line that names it and does not blame the memory; how many are refused."""
    told = outcomes(paths)
    assert [kind for kind, _ in told[:1]] == ["loaded"], told[0]  # the whole one
    assert len(told) == len(paths)
    for path, (kind, line) in zip(paths, told, strict=True):
        assert kind in ("loaded", "refused"), f"{path}: {kind}\n{line}"
        if kind == "refused":
            assert line.isprintable()
            assert len(line) < 1500
            assert str(path) in line, line
            assert "out of memory" not in line, line
    return sum(kind == "refused" for kind, _ in told)


def test_damaged_gguf_files_load_or_end_in_one_line(tmp_path: Path):
    paths = [tmp_path / "whole.gguf"]
    paths[0].write_bytes(gguf_image().content)
    for seed in range(NUM_DAMAGED):
        paths.append(tmp_path / f"{seed}.gguf")
        paths[-1].write_bytes(damaged_gguf(seed))
    assert check(paths) > NUM_DAMAGED // 2


def test_damaged_directories_load_or_end_in_one_line(tmp_path: Path):
    paths = [tmp_path / "whole"]
    write_directory(paths[0])
    for seed in range(NUM_DAMAGED):
        paths.append(tmp_path / str(seed))
        write_directory(paths[-1])
        damage_directory(paths[-1], seed)
    assert check(paths) > NUM_DAMAGED // 3


def test_damaged_configs_of_generic_models_load_or_end_in_one_line(tmp_path: Path):
    paths = [tmp_path / "whole"]
    write_directory(paths[0], GENERIC_CONFIG)
    for seed in range(NUM_DAMAGED // 3):
        paths.append(tmp_path / str(seed))
        write_directory(paths[-1], GENERIC_CONFIG)
        damage_config(paths[-1], seed, GENERIC_CONFIG)
    assert check(paths) > NUM_DAMAGED // 6
