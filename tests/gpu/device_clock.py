"""DeviceClock: seconds that a device takes for something, and the limits it is held against."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.gpu.device_sizes import DeviceSizes

FLUSH_BYTES = 256 << 20
"""More than any cache holds: what is timed finds its data in memory."""


class DeviceClock:
    """By the events of the GPU, or by the wall where there is none."""

    def __init__(self, sizes: DeviceSizes) -> None:
        self._device, self._repeats = sizes.device, sizes.repeats
        self._is_gpu = sizes.device.type == "cuda"
        self._flushed = torch.empty(FLUSH_BYTES if self._is_gpu else 1, dtype=torch.int8, device=sizes.device)
        self.copy_rate = self._copy_rate(sizes.copy_bytes)
        """Bytes read and written a second by a copy."""
        self.matrix_rate = self._matrix_rate(sizes.matrix, sizes.dtype)
        """Floating-point operations a second by a product of large matrices, torch's own."""

    def sync(self) -> None:
        if self._is_gpu:
            torch.cuda.synchronize(self._device)

    def seconds(self, run: Callable[[], object], is_cold: bool = True) -> float:
        """Of one call, the median; `is_cold`: what it reads is not in a cache."""
        for _ in range(3):
            run()
        return statistics.median(self._once(run, is_cold) for _ in range(self._repeats))

    def _once(self, run: Callable[[], object], is_cold: bool) -> float:
        if is_cold:
            self._flushed.zero_()
        if not self._is_gpu:
            start = time.perf_counter()
            run()
            return time.perf_counter() - start
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def _copy_rate(self, num_bytes: int) -> float:
        source = torch.zeros(num_bytes, dtype=torch.int8, device=self._device)
        target = torch.empty_like(source)
        return 2 * num_bytes / self.seconds(lambda: target.copy_(source), is_cold=False)

    def _matrix_rate(self, size: int, dtype: torch.dtype) -> float:
        # Random numbers: a GPU multiplies zeros faster.
        left, right = (torch.randn(size, size, device=self._device).to(dtype) for _ in range(2))
        return 2 * size**3 / self.seconds(lambda: left @ right, is_cold=False)
