"""Loads model files in processes that have little memory and time, and tells how each load ended.

    python -m tests.model_runner.load_files

reads paths from standard input, a line each, and writes a line of JSON for each: [outcome, text]. The outcome is
"loaded", "refused" (a StartupError), "raised" (anything else) or "died" (of a signal, or without a word).
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import sys
import traceback
from pathlib import Path

import numpy as np
import safetensors.torch  # noqa: F401  what a load imports is imported once, here
import tokenizers  # noqa: F401
import torch

from async_engine.tokenizer import load_tokenizer
from gpu_executor.worker import Worker
from model_runner.models import generic, generic_spec  # noqa: F401
from protos.config import EngineConfig, build
from protos.errors import StartupError
from protos.model_files import read_model_spec
from protos.step import NewRow, SchedulerOutput
from tests.model_runner.driver import GREEDY

MEMORY = 96 << 20
"""Bytes that a load may take beside what the interpreter has; the models are of a few hundred kilobytes."""
ROWS = np.zeros(1, np.int32)
CPU_SECONDS = 5
WALL_SECONDS = 20
BATCH = 20
"""Loads per process: forking one costs more than a load."""


def load(path: Path) -> None:
    """As the front end and the worker do; then a step."""
    spec = read_model_spec(path)
    load_tokenizer(path).close()
    config = build(EngineConfig, model=str(path), num_kv_blocks=8, max_num_seqs=2, device="cpu", num_threads=1)
    worker = Worker(config, ())
    count = min(5, worker.load(lambda done, total: None).max_model_len)
    prompt = NewRow(0, np.arange(count, dtype=np.int32) % spec.vocab_size, count, [1], GREEDY)
    worker.execute(SchedulerOutput(1, ROWS, ROWS, ROWS + count, np.array([True]), [prompt]))
    worker.sample().result()


def outcome(path: Path) -> tuple[str, str]:
    try:
        load(path)
    except StartupError as error:
        return "refused", str(error)
    except BaseException:
        return "raised", traceback.format_exc()
    return "loaded", ""


def batch(paths: list[Path]) -> list[tuple[str, str]]:
    """The outcomes in a child that cannot take more than its share, up to the one it does not survive."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        resource.setrlimit(resource.RLIMIT_DATA, (_data_bytes() + MEMORY, -1))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for path in paths:
            signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
            signal.alarm(WALL_SECONDS)
            told = json.dumps(outcome(path)) + "\n"
            gc.collect()
            os.write(writer, told.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        told = [tuple(json.loads(line)) for line in pipe]
    _, status = os.waitpid(pid, 0)
    if len(told) < len(paths):
        told.append(("died", f"wait status {status}"))
    return told


def _data_bytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmData"].split()[0]) << 10


def main() -> None:
    torch.set_num_threads(1)
    gc.freeze()  # so that a child's collections are of its own
    paths = [Path(line) for line in sys.stdin.read().splitlines()]
    while paths:
        told = batch(paths[:BATCH])
        del paths[: len(told)]
        sys.stdout.writelines(json.dumps(line) + "\n" for line in told)


if __name__ == "__main__":
    main()
