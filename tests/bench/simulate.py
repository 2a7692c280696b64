"""A fleet of cores on paper: what the design does with 1, 8, 64 and 512 of them, and where it saturates.

    python -m tests.bench.simulate [--device h200-8b] [--load shared | conversations] [--bursty] [--cores 8 ...]

Scheduling, caching, admission, routing and the processing of outputs are the engine's own code, under a simulated
clock; devices are models (`step_models.py`). What the code takes is measured while it runs: compare it with the time
that passes in the simulation. One front end has all the cores here; the table says how many would be needed.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from typing import Any

import numpy as np

from tests.bench.fleet import Fleet
from tests.bench.fleet_load import Load
from tests.bench.step_models import DEVICES
from tests.core_proc.harness import ManualClock

SIZES = {1: 20.0, 8: 12.0, 64: 6.0, 512: 3.0}
"""Cores, and simulated seconds: fewer where more happens in each."""
GROUPS_PER_CORE = 16
WARM_UP = 1 / 3
STEP = ("core schedule", "core update", "core send")
ATTACH_MICROSECONDS, STREAM_MICROSECONDS = 16.0, 67.0
"""CPU of a front end per token with text, gRPC and all, by `tailrace bench null`."""
LOADS: dict[str, dict[str, Any]] = {
    "shared": {},
    "conversations": {"turns": 4, "prefix": 256, "think": (0.2, 1.0)},
}
COLUMNS = (
    *("cores", "requests/s", "tokens/s", "first token p50 / p99, ms", "between p50 / p99, ms", "hit rate"),
    *("imbalance tokens / sequences", "running per core", "router µs/request", "front end µs/request, µs/token"),
    *("core µs/step", "core loop", "front ends", "with Attach / GenerateStream"),
)


def simulate(device: str, load: str, bursty: bool, num_cores: int, seconds: float, rate: float) -> list[str]:
    """A row of the table; `rate` is of each core."""
    model = DEVICES[device]
    asked = Load(
        rate=rate * num_cores / LOADS[load].get("turns", 1),
        seconds=seconds,
        groups=GROUPS_PER_CORE * num_cores,
        bursty=bursty,
        **LOADS[load],
    )
    fleet = Fleet(num_cores, model.plant(asked.longest + 1), ManualClock(), warm_up=WARM_UP * seconds)
    fleet.run(asked.visits())
    return row(fleet, num_cores, seconds)


def row(fleet: Fleet, num_cores: int, seconds: float) -> list[str]:
    watch, times, results = fleet.watch, fleet.times, fleet.results()
    first, gaps = np.array(times.first) * 1e3, np.array(times.gaps) * 1e3
    window = seconds * (1 - WARM_UP)
    requests, tokens = watch.counts["submit"], watch.counts["outputs"]
    routing = watch.microseconds("hash", "route", "map", per=requests)
    # Shown by itself; what follows has it in it: what is sent on with requests, and taken in with outputs.
    per_request = watch.microseconds("enter", "hash", "submit", per=requests)
    per_token = watch.microseconds("outputs", per=tokens)
    step = watch.microseconds(*STEP, per=watch.counts["core schedule"])
    core_loop = sum(map(watch.seconds, (*STEP, "core request"))) / sum(c.busy_seconds for c in fleet.cores)
    arriving, drawn = len(first) / window, fleet.tokens_counted / window
    busy = (arriving * per_request + drawn * per_token) / 1e6
    with_grpc = [(arriving * per_request + drawn * each) / 1e6 for each in (ATTACH_MICROSECONDS, STREAM_MICROSECONDS)]
    return [
        f"{num_cores}",
        f"{arriving:,.0f}",
        f"{drawn:,.0f}",
        "{:.0f} / {:.0f}".format(*np.percentile(first, (50, 99))),
        "{:.1f} / {:.1f}".format(*np.percentile(gaps, (50, 99))),
        f"{results.hit_rate:.1%}",
        f"{results.imbalance:.1%} / {results.row_imbalance:.1%}",
        f"{results.running:.0f}",
        f"{routing:.0f}" if fleet.router is not None else "-",
        f"{per_request:.0f}, {per_token:.1f}",
        f"{step:.0f}",
        f"{core_loop:.1%}",
        f"{busy:.3g}",
        "{:.3g} / {:.3g}".format(*with_grpc),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=DEVICES, default="h200-8b")
    parser.add_argument("--load", choices=LOADS, default="shared")
    parser.add_argument("--bursty", action="store_true", help="three times the rate in one second of four")
    parser.add_argument("--cores", type=int, action="append", help=f"default: {', '.join(map(str, SIZES))}")
    parser.add_argument("--seconds", type=float, help="simulated; default: fewer for more cores")
    parser.add_argument("--rate", type=float, help="requests a second and core; default: the device's")
    parser.add_argument("--quick", action="store_true", help="4 cores for a second: whether it works")
    options = parser.parse_args()
    gc.set_threshold(10_000, 20, 50)  # as the processes do that this stands for
    device = DEVICES[options.device]
    rate = options.rate or device.rate
    sizes = options.cores or list(SIZES)
    if options.quick:
        sizes, options.seconds = [4], 1.0
    sys.stdout.write(
        f"{device.about}\n{options.load}, {rate:g} requests/s and core{', in bursts' * options.bursty}\n\n"
    )
    sys.stdout.write(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}\n")
    for num_cores in sizes:
        began = time.monotonic()
        seconds = options.seconds or SIZES.get(num_cores, 6.0)
        cells = simulate(options.device, options.load, options.bursty, num_cores, seconds, rate)
        sys.stdout.write(f"| {' | '.join(cells)} |\n")
        sys.stdout.flush()
        sys.stderr.write(f"{num_cores} cores, {seconds:g} s: took {time.monotonic() - began:.0f} s\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
