"""What it costs that outputs wait little for prompts: each gap that may be aimed at, in simulated time.

    python -m tests.bench.gap_curve [--prompt-tokens 8000] [--streams 16] [--tokens 700] [--noise 0.1]

The scheduler and what it learns of steps are the engine's, the device is a model of the CPU here. Gaps are steps with a
part of the prompt over what each would take without; the loss is of the time until all is done, over that without a
limit. With `--noise` each step is longer or shorter by chance, log-normally.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from async_engine.bench.table import format_table
from tests.bench.step_models import Pieces
from tests.core_proc.plant import Plant, Visit

if TYPE_CHECKING:
    from protos.step import SchedulerOutput

CPU = Pieces(fixed=1.5e-3, draw=0.15e-3, token=0.46e-3, cell=0.18e-6, read=1.07e-6)
"""Two threads, a float32 cache. Relations of the parts are a fit to steps of one thread (PROFILE.md); the scale is that
of a quiet run, 9.5 s for a prompt of 8,000 in whole steps; and so is reading, which two threads do not do twice as
fast: 8 ms for the 6,400 keys of 32 outputs."""
AIMS = (1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0)
ARRIVES = 4.0


class Device:
    """Steps with a part of the prompt beside outputs, and what was expected of them."""

    def __init__(self, model: Pieces, noise: float) -> None:
        self.gaps: list[float] = []
        """In times of the step without the prompt."""
        self.errors: list[float] = []
        """Times that were expected, over those that it took."""
        self._model = model
        self._noise = noise
        self._random = random.Random(0)
        self.plant = Plant(budget=2048, max_model_len=4 * 8192, step_seconds=self.seconds)
        self._chunks = self.plant.scheduler._chunks

    def seconds(self, step: SchedulerOutput) -> float:
        seconds = self._model.seconds(step) * self._random.lognormvariate(0.0, self._noise)
        outputs = step.counts == 1
        if self.plant.clock.now >= ARRIVES and outputs.any() and not outputs.all():
            self.gaps.append(seconds / self._model.seconds_of_outputs(step))
            self.errors.append(self._chunks.times.of_step(step) / seconds)
        return seconds

    def run(self, aim: float, arguments: argparse.Namespace) -> tuple[float, float]:
        """Seconds until the prompt's first token, and until all is done."""
        self._chunks.GAP_STEPS = aim
        streams = [Visit(0.0, 128, arguments.tokens, None, ignore_eos=True) for _ in range(arguments.streams)]
        late = Visit(ARRIVES, arguments.prompt_tokens, 16, None, ignore_eos=True)
        self.plant.run([*streams, late])
        assert late.first_token_at is not None
        return late.first_token_at - ARRIVES, max(visit.ended_at for visit in [*streams, late])


def rows(model: Pieces, arguments: argparse.Namespace) -> list[list[object]]:
    found: list[list[object]] = []
    without_limit = 0.0
    for aim in (math.inf, *AIMS):
        device = Device(model, arguments.noise)
        first_token, end = device.run(aim, arguments)
        without_limit = without_limit or end
        gaps = np.quantile(device.gaps, (0.5, 0.99, 1.0))
        low, high = np.quantile(device.errors, (0.01, 0.99))
        found.append(
            [
                f"{aim:g}",
                " / ".join(f"{gap:.2f}" for gap in gaps),
                f"{low:.2f} to {high:.2f}",
                first_token,
                end,
                f"{end / without_limit - 1:.1%}",
            ]
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-tokens", type=int, default=8000)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=700, help="of each stream")
    parser.add_argument("--noise", type=float, default=0.0, help="standard deviation of the logarithm of a step's time")
    arguments = parser.parse_args()
    headings = ["aim, times", "p50 / p99 / worst gap", "expected over taken", "first token, s", "all done, s", "loss"]
    for name, model in (("", CPU), (", keys and values of half the bytes", replace(CPU, read=CPU.read / 2))):
        sys.stdout.write(f"{arguments.streams} outputs, a prompt of {arguments.prompt_tokens} tokens{name}\n\n")
        sys.stdout.write(format_table(headings, rows(model, arguments)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
