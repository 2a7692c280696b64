"""StepTrace: what a worker's first steps do on its device, over time."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

MAX_TRACED_STEPS = 20
"""What comes later is like it, and each step is a thousand operations."""


class StepTrace:
    """Records torch's operations, on the thread that makes it, and the kernels of a GPU."""

    def __init__(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._num_steps = 0
        self._profile = profile(activities=activities)
        self._profile.start()
        self._is_running = True

    def step_begins(self) -> None:
        """The first MAX_TRACED_STEPS are recorded."""
        self._num_steps += 1
        if self._num_steps > MAX_TRACED_STEPS:
            self._end()

    def finish(self) -> bytes:
        """On the same thread, once: a gzipped file for chrome://tracing and Perfetto."""
        self._end()
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "trace.json.gz"
            self._profile.export_chrome_trace(str(path))
            return path.read_bytes()

    def _end(self) -> None:
        if self._is_running:
            self._is_running = False
            self._profile.stop()
