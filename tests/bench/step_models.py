"""How long a step takes on devices that are not here: tables of numbers, and where they are from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from tests.core_proc.plant import Plant

if TYPE_CHECKING:
    from collections.abc import Callable

    from protos.step import SchedulerOutput
    from tests.core_proc.harness import ManualClock


class StepModel(Protocol):
    def seconds(self, step: SchedulerOutput) -> float: ...


@dataclass(frozen=True)
class Measured:
    """Straight lines through what was measured: seconds of a step, of a token, and of one that is attended to."""

    step: float
    token: float
    context: float

    def seconds(self, step: SchedulerOutput) -> float:
        return self.step + self.token * step.num_tokens + self.context * float((step.starts + step.counts).sum())


@dataclass(frozen=True)
class Pieces:
    """The parts that a step's time has where prompts are computed in pieces (`core_proc/step_time.py`), in seconds."""

    fixed: float
    draw: float
    token: float
    cell: float
    """Of a token of context that a token attends to."""
    read: float
    """Of one that a row reads, however few its tokens are."""

    def seconds(self, step: SchedulerOutput) -> float:
        counts = step.counts.astype(np.float64)
        cells = float(counts @ step.starts + counts @ counts / 2)
        tokens = self.draw * np.count_nonzero(step.samples) + self.token * float(counts.sum())
        return float(self.fixed + tokens + self.cell * cells + self.read * float(step.starts.sum()))

    def seconds_of_outputs(self, step: SchedulerOutput) -> float:
        """What it would take without prompts: of its rows that compute one token."""
        starts = step.starts[step.counts == 1]
        return float(
            self.fixed + (self.draw + self.token) * len(starts) + (self.cell + self.read) * float(starts.sum())
        )


@dataclass(frozen=True)
class Analytic:
    """A GPU, or several that hold the model together, from data sheets: a step takes as long as its arithmetic or as
    reading weights and keys and values once, whichever is more, at the part of the peak that engines reach."""

    parameters: float
    kv_bytes: float
    """Of a token, all layers."""
    devices: int = 1
    flops: float = 989e12
    """Of one H200 in bfloat16, dense (NVIDIA's data sheet)."""
    bandwidth: float = 4.8e12
    """Bytes a second of its memory (the same)."""
    compute_part: float = 0.5
    bandwidth_part: float = 0.7
    overhead: float = 0.5e-3
    """Seconds of launching, sampling and, over several devices, their sums."""

    def seconds(self, step: SchedulerOutput) -> float:
        arithmetic = 2 * self.parameters * step.num_tokens / (self.flops * self.compute_part)
        context = float((step.starts + step.counts).sum())
        reading = (2 * self.parameters + self.kv_bytes * context) / (self.bandwidth * self.bandwidth_part)
        return self.overhead + max(arithmetic, reading) / self.devices


@dataclass(frozen=True)
class DeviceModel:
    """A core's device, its KV cache and limits, and a load that keeps it busy but not at its limit."""

    about: str
    model: StepModel
    num_blocks: int
    block_size: int
    num_rows: int
    budget: int
    rate: float
    """Requests a second and core that `simulate` offers unless told otherwise."""

    def plant(self, max_model_len: int) -> Callable[[ManualClock], Plant]:
        def make(clock: ManualClock) -> Plant:
            return Plant(
                num_rows=self.num_rows,
                budget=self.budget,
                clock=clock,
                step_seconds=self.model.seconds,
                max_model_len=max_model_len,
                block_size=self.block_size,
                num_blocks=self.num_blocks,
            )

        return make


DEVICES = {
    "h200-8b": DeviceModel(
        "an H200 with a Llama of 8 billion parameters in bfloat16, 17 GB of KV cache",
        Analytic(8.03e9, kv_bytes=131_072),
        *(4096, 32, 256, 2048),
        rate=40.0,
    ),
    "4xh200-70b": DeviceModel(
        "four H200 with a Llama of 70 billion parameters, 160 sums of 20 µs a step, 43 GB of KV cache",
        Analytic(70.6e9, kv_bytes=327_680, devices=4, overhead=3.7e-3),
        *(4096, 32, 256, 2048),
        rate=20.0,
    ),
    "cpu-135m": DeviceModel(
        "two cores of a CPU with SmolLM2-135M (Q4_1), the best of some steps here",
        Measured(step=9e-3, token=1.3e-3, context=2e-6),
        *(1024, 16, 16, 512),
        rate=1.0,
    ),
}
