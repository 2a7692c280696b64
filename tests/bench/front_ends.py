"""What more front ends bring: `python -m tests.bench.front_ends [--frontends 1 --frontends 2]`.

A server with scripted tokens, as fast as it goes, under GenerateStream calls from several processes, each with a
connection of its own (`tailrace bench serve`). Rounds take turns, so that a slow moment of the machine hits all. Loads,
front ends and core share the machine: CPU seconds per million tokens tell what each takes of it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from async_engine.bench.load import process_cpu_seconds
from async_engine.bench.table import format_table
from tests.e2e.serving import ROOT, ServerProcess, children

NULL = ("null", "--listen", "127.0.0.1:0", "--log-level", "error")


def load(address: str, concurrency: int, tokens: int) -> tuple[float, float]:
    """(tokens, seconds) of one process of clients."""
    options = ["--address", address, "--concurrency", str(concurrency), "--num-requests", str(4 * concurrency)]
    command = [sys.executable, "-m", "async_engine.cli", "bench", "serve", "--json", "--no-text", *options]
    done = subprocess.run(
        [*command, "--output-tokens", str(tokens), "--prompt-tokens", "16"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    report = json.loads(done.stdout)
    return report["output_tokens_per_s"] * report["seconds"], report["seconds"]


def measure(server: ServerProcess, options: argparse.Namespace) -> tuple[float, float, float]:
    """Tokens per second, and CPU seconds per million tokens of the front ends and of the core."""
    main = server.process.pid
    pids = children(main)
    cores = [pid for pid in pids if "core_proc.proc" in Path(f"/proc/{pid}/cmdline").read_text()]
    front_ends = [main, *(pid for pid in pids if pid not in cores)]
    before = [sum(map(process_cpu_seconds, group)) for group in (front_ends, cores)]
    with ThreadPoolExecutor(options.loads) as pool:
        loads = [pool.submit(load, server.address, options.concurrency, options.tokens) for _ in range(options.loads)]
        results = [each.result() for each in loads]
    tokens = sum(count for count, _ in results)
    after = [sum(map(process_cpu_seconds, group)) for group in (front_ends, cores)]
    used = [end - start for end, start in zip(after, before, strict=True)]
    rate = tokens / statistics.mean(seconds for _, seconds in results)
    return rate, used[0] / tokens * 1e6, used[1] / tokens * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frontends", type=int, action="append")
    parser.add_argument("--loads", type=int, default=4, help="processes of clients")
    parser.add_argument("--concurrency", type=int, default=32, help="requests at once of each")
    parser.add_argument("--tokens", type=int, default=400, help="of an output")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    counts = options.frontends or [1, 2]
    found: dict[int, list[tuple[float, float, float]]] = {count: [] for count in counts}
    for _ in range(options.rounds):
        for count in counts:
            with ServerProcess(*NULL, "--frontends", str(count)) as server:
                found[count].append(measure(server.wait_ready(), options))
    header = ["front ends", "tokens/s", "of the first", "front ends, CPU s / M tokens", "core, CPU s / M tokens"]
    rows: list[list[object]] = []
    first = statistics.median(rate for rate, _, _ in found[counts[0]])
    for count, results in found.items():
        rate, front, core = map(statistics.median, zip(*results, strict=True))
        rows.append([count, rate, rate / first, front, core])
    sys.stdout.write(format_table(header, rows))


if __name__ == "__main__":
    main()
