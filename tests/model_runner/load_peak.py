"""Loads models, each in a process of its own, and tells how much memory that took at its peak.

    python -m tests.model_runner.load_peak RANK SIZE [QUANTIZATION:]PATH...

as one of so many workers, writes a line for each: bytes of the weights, and what the process held at most beside what
it held before.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from model_runner.device import make_device
from model_runner.runner import ModelRunner
from protos.config import EngineConfig, build
from protos.model_files import read_model_spec
from protos.place import Place


def load(what: str, place: Place) -> int:
    quantization, _, path_name = what.rpartition(":")
    path, quantization = Path(path_name), quantization or "auto"
    config = build(
        EngineConfig,
        model=path_name,
        quantization=quantization,
        num_kv_blocks=8,
        max_num_seqs=2,
        num_threads=1,
        device="cpu",
    )
    spec = read_model_spec(path)
    runner = ModelRunner(config, spec, (), make_device(config, spec, place))
    return runner.load(path, lambda done, total: None).weight_bytes


def kilobytes(name: str) -> int:
    """A line of this process's status."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields[name].split()[0])


def main() -> None:
    torch.set_num_threads(1)
    place = Place(rank=int(sys.argv[1]), tensor_size=int(sys.argv[2]))
    small, *loads = sys.argv[3:]
    for what in loads:
        if os.fork():
            os.wait()
            continue
        load(small, place)  # brings in the code of a load
        Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is held now
        before = kilobytes("VmRSS")
        weight_bytes = load(what, place)
        sys.stdout.write(f"{weight_bytes} {(kilobytes('VmHWM') - before) << 10}\n")
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
