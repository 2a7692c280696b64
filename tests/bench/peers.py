"""This engine beside others on the same work, in turns, and the ratios.

    python -m tests.bench.peers --prompts FILE --peer 'llama.cpp=PYTHON bench_llamacpp.py --repeat 1' \
        [--workload W1] [--rounds 3] [--ours 'default='] [--ours 'floats=--dtype float32']

A peer is a name and a command that takes `--workload W1` and prints, last, a line of JSON with `workload` and `best`,
as tests.bench.workloads does. Each round runs every engine once on a workload, so that all meet the same neighbours.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys

from async_engine.bench.table import format_table
from tests.bench.workloads import NEW_TOKENS

MEASURES = {"W1": "tok_s", "W2": "tok_s", "W3": "tok_s", "W4": "ttft_ms_p50", "W5": "gap_during_ms_max"}
SMALLER_IS_BETTER = {"W4", "W5"}


def measure(command: list[str], workload: str) -> float:
    """What a fresh process measures. Raises RuntimeError with the end of what it says if it fails."""
    result = subprocess.run([*command, "--workload", workload], capture_output=True, text=True, check=False)
    lines = [line for line in result.stdout.splitlines() if line.startswith("{")]
    if result.returncode or not lines:
        raise RuntimeError(f"{shlex.join(command)}: {result.stderr[-400:]}")
    return float(json.loads(lines[-1])["best"][MEASURES[workload]])


def spread(numbers: list[float]) -> str:
    return f"{statistics.median(numbers):.4g} ({min(numbers):.4g} to {max(numbers):.4g})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND")
    parser.add_argument("--ours", action="append", metavar="NAME=FLAGS", help="default: one without flags")
    parser.add_argument("--workload", action="append", choices=sorted(NEW_TOKENS), help="default: all")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    own = [sys.executable, "-m", "tests.bench.workloads", "--prompts", arguments.prompts]
    commands = {}
    for text in arguments.ours or ["tailrace="]:
        name, _, flags = text.partition("=")
        commands[name] = own + shlex.split(flags)
    for text in arguments.peer:
        name, _, command = text.partition("=")
        commands[name] = shlex.split(command)
    first = next(iter(commands))
    rows = []
    for workload in arguments.workload or sorted(NEW_TOKENS):
        found: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(arguments.rounds):
            for name, command in commands.items():
                found[name].append(measure(command, workload))
        for name, numbers in found.items():
            ratios = [theirs / ours for theirs, ours in zip(numbers, found[first], strict=True)]
            if workload not in SMALLER_IS_BETTER:
                ratios = [1 / ratio for ratio in ratios]
            rows.append([f"{workload} {MEASURES[workload]}", name, spread(numbers), spread(ratios)])
    headings = ["workload", "engine", "median (range)", f"{first} is so many times better"]
    sys.stdout.write(format_table(headings, rows) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
