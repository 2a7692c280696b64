"""Gpu: what kernels are shaped by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from typing import Self


@dataclass(frozen=True, slots=True)
class Gpu:
    """Numbers of one device, asked once: tiles and grids are pure functions of them and of shapes."""

    capability: int
    """Ten times the major number of NVIDIA's compute capability plus the minor: 80 is Ampere, 90 Hopper."""
    num_sms: int
    """Streaming multiprocessors: what blocks of a grid are spread over."""

    @classmethod
    def of(cls, device: torch.device) -> Self:
        """Initialises CUDA."""
        properties = torch.cuda.get_device_properties(device)
        return cls(10 * properties.major + properties.minor, properties.multi_processor_count)
