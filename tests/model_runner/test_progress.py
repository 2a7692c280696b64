"""How far a load is, whatever the files: the numbers that are reported, and the bar that a terminal shows."""

from __future__ import annotations

import io
import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

from async_engine.load_bar import LoadBar
from protos.config import EngineConfig, build
from protos.gguf import read_gguf
from tests.model_runner.gguf_files import write_gguf
from tests.model_runner.tiny import make_runner, save_tiny

if TYPE_CHECKING:
    from pathlib import Path

FORMATS = ("safetensors", "gguf", "dummy")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    model = save_tiny(path, "LlamaForCausalLM", max_shard_size="60KB")
    write_gguf(path / "tiny.gguf", model, "llama", "Q8_0")
    return path


def load(directory: Path, file_format: str, report: Any) -> int:
    path = directory / "tiny.gguf" if file_format == "gguf" else directory
    load_format = "dummy" if file_format == "dummy" else "auto"
    runner = make_runner(path, build(EngineConfig, num_kv_blocks=64, load_format=load_format))
    return runner.load(path, report).weight_bytes


@pytest.mark.parametrize("file_format", FORMATS)
def test_reports_count_the_bytes_that_are_read(file_format: str, directory: Path):
    reports: list[tuple[int, int]] = []
    weight_bytes = load(directory, file_format, lambda done, total: reports.append((done, total)))
    index = json.loads((directory / "model.safetensors.index.json").read_bytes())
    total = {
        "safetensors": index["metadata"]["total_size"],
        "gguf": sum(tensor.nbytes for tensor in read_gguf(directory / "tiny.gguf").tensors.values()),
        "dummy": weight_bytes,
    }[file_format]
    assert reports[0] == (0, total)
    assert reports[-1] == (total, total)
    assert {total for _, total in reports} == {total}
    assert sorted(set(reports)) == reports
    assert len(reports) == 1 + 3 * 9 + 3


@pytest.mark.parametrize("file_format", FORMATS)
def test_a_terminal_is_shown_a_bar_that_then_goes(file_format: str, directory: Path, monkeypatch: pytest.MonkeyPatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    load(directory, file_format, LoadBar())
    assert terminal.getvalue().startswith("\rloading weights:   0%|")
    assert terminal.getvalue().endswith("\r")
    assert not terminal.getvalue().split("\r")[-2].strip()


def test_what_is_no_terminal_is_shown_nothing(directory: Path, capsys: pytest.CaptureFixture[str]):
    load(directory, "dummy", LoadBar())
    assert capsys.readouterr().err == ""
