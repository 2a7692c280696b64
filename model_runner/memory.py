"""MemoryPlan: what of a device's memory is left for the KV cache, by what was measured; how a GPU is measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

GIB = 1 << 30
MOST_USABLE = 0.98
"""Share of a device's memory that we propose to use at most: drivers and libraries take some later."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Of one device, in bytes."""

    total: int
    utilization: float
    """Share of it that all of us may use together."""
    used: int
    """By weights, tables, the driver and whoever else is on the device."""
    step: int = 0
    """What the largest step takes while it runs."""
    graphs: int = 0
    """What recorded steps keep."""

    @property
    def cache(self) -> int:
        """Left for the KV cache."""
        return max(0, int(self.total * self.utilization) - self.used - self.step - self.graphs)

    def utilization_for(self, num_bytes: int) -> float | None:
        """Smallest share, in hundredths, that leaves so much for the KV cache; None if the device is too small."""
        needed = self.used + self.step + self.graphs + num_bytes
        share = -(-needed * 100 // self.total) / 100
        return share if share <= MOST_USABLE else None

    def __str__(self) -> str:
        parts = {"used by weights and others": self.used, "for a step": self.step, "for graphs": self.graphs}
        told = ", ".join(f"{size / GIB:.2f} {what}" for what, size in parts.items() if size)
        return f"of {self.total / GIB:.2f} GiB {self.utilization:.0%} may be used: {told}"


class MemoryMeter(Protocol):
    """What can be seen of a device that has memory of its own."""

    def used(self) -> tuple[int, int]:
        """(used, total) bytes, without what is merely kept for later."""
        ...

    def peak(self, run: Callable[[], None]) -> int:
        """Bytes that are allocated at most while it runs, beyond those before."""
        ...


class CudaMemory:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def used(self) -> tuple[int, int]:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free, total

    def peak(self, run: Callable[[], None]) -> int:
        torch.cuda.synchronize(self._device)
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        run()
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) - before
