"""Ranks: processes that each hold a part of one model, and run what a test sends them, all at once."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from typing import TYPE_CHECKING, Any

import torch

from model_runner.parallel import make_workers
from protos.place import Place

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from pathlib import Path

    from model_runner.parallel import Workers

# One process imports torch, once; every rank is forked from it.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["model_runner.runner", "tests.model_runner.ranks"])


class Ranks:
    """`run` calls a function on every rank, with the rank's Workers, and gives their answers by rank."""

    def __init__(self, directory: Path, tensor_size: int, pipeline_size: int = 1) -> None:
        size = tensor_size * pipeline_size
        directory.mkdir(exist_ok=True)
        self.pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            place = Place(
                rank=rank,
                tensor_size=tensor_size,
                pipeline_size=pipeline_size,
                local_rank=rank,
                local_size=size,
                rendezvous=f"file://{directory / 'meet'}",
            )
            ours, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(target=_serve, args=(place, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        for pipe in self.pipes:
            pipe.send((function, args))
        return self.answers()

    def answers(self) -> list[Any]:
        """To the oldest call that is not answered yet."""
        answers = [pipe.recv() for pipe in self.pipes]
        for rank, (failed, answer) in enumerate(answers):
            assert not failed, f"rank {rank}:\n{answer}"
        return [answer for _, answer in answers]

    def stop(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(30)
            assert process.exitcode == 0


def _serve(place: Place, pipe: Connection) -> None:
    os.environ["OMP_WAIT_POLICY"] = "passive"
    torch.set_num_threads(1)
    workers: Workers = make_workers(place, torch.device("cpu"))
    workers.meet()
    while (call := pipe.recv()) is not None:
        function, args = call
        try:
            pipe.send((False, function(workers, *args)))
        except Exception:
            pipe.send((True, traceback.format_exc()))
    workers.leave()
