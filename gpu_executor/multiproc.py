"""LocalWorkers: a process for each worker, all on this node, and the ring that steps go through.

             ring (shared memory): every step, once for all
core process ═════════════╤═══════════════╤═══════════════►
                      worker 0        worker 1   ...          each in a process of its own
             ◄────────────┘───────────────┘
             a socket each: loading, failures, the end; what was drawn comes from one of them
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from gpu_executor import wire
from gpu_executor.ring import SPIN_SECONDS, RingWriter
from gpu_executor.worker_process import WorkerProcess
from protos.place import Place

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from protos.config import EngineConfig


class LocalWorkers:
    """The way to workers of this node."""

    def __init__(
        self, config: EngineConfig, eos_token_ids: tuple[int, ...], worker_module: str = "gpu_executor.worker_proc"
    ) -> None:
        """`worker_module` is what a worker's process runs."""
        self._config = config
        self._eos_token_ids = eos_token_ids
        self._worker_module = worker_module
        self._workers: list[WorkerProcess] = []
        self._ring: RingWriter | None = None

    def start(self) -> Sequence[WorkerProcess]:
        parallel = self._config.parallel
        ring = self._ring = RingWriter(parallel.num_workers)
        spin_seconds = SPIN_SECONDS if len(os.sched_getaffinity(0)) > parallel.num_workers else 0.0
        # A file without a name is where torch.distributed lets them meet: there is no port that two engines want.
        meeting = os.memfd_create("tailrace-rendezvous")
        try:
            for rank, wake in enumerate(ring.wakes):
                place = Place(
                    rank=rank,
                    tensor_size=parallel.tensor_parallel_size,
                    pipeline_size=parallel.pipeline_parallel_size,
                    local_rank=rank,
                    local_size=parallel.num_workers,
                    rendezvous=f"file:///proc/self/fd/{meeting}" if parallel.num_workers > 1 else "",
                )
                start = wire.Start(self._config, self._eos_token_ids, place, spin_seconds)
                self._workers.append(WorkerProcess(self._worker_module, start, ring.descriptor, wake, [meeting]))
        finally:
            os.close(meeting)
        return self._workers

    def send(self, message: bytes, wait: Callable[[], None]) -> int:
        assert self._ring is not None, "start comes first"
        self._ring.write(message, wait)
        return self._ring.num_written

    def num_taken(self, rank: int) -> int:
        assert self._ring is not None, "start comes first"
        return self._ring.num_read(rank)

    def close(self, grace: float) -> None:
        end = time.monotonic() + grace
        for worker in self._workers:
            worker.end(max(0.0, end - time.monotonic()))
        if self._ring is not None:
            self._ring.close()
            self._ring = None
