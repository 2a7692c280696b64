"""What a server takes while it has nothing to do, and what its memory goes to.

    python -m tests.bench.footprint [--seconds 20] [--streams 64] [flags of serve]

CPU of each process at rest; memory by component: proportional set sizes (shared pages are shared out), read from
/proc before and after what each row is about.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from pathlib import Path

import uvloop

from async_engine.bench.load import process_cpu_seconds
from async_engine.bench.table import format_table
from tailrace_client import AsyncClient
from tests.e2e.serving import ServerProcess, children

MIB = 1 << 20
SETTLE_SECONDS = 2.0
"""Until what a start leaves to do is done."""


def memory(pid: int) -> float:
    """Proportional set size in MiB."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024 / MIB
    raise AssertionError("no Pss")


def imports(module: str) -> float:
    """MiB of a process that has imported it."""
    code = f"import {module}, sys; print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        used = memory(process.pid)
        process.kill()
    return used


async def streams(address: str, pid: int, count: int) -> float:
    """MiB that the front end grows by while so many streams are open."""
    running = asyncio.Semaphore(0)
    measured = asyncio.Event()
    async with AsyncClient(address) as client, asyncio.timeout(60), asyncio.TaskGroup() as tasks:

        async def one(number: int) -> None:
            async with client.generate(f"Story {number}:", max_tokens=2000, temperature=0.0) as stream:
                async for _ in stream:
                    break
                running.release()
                await measured.wait()

        before = memory(pid)
        for number in range(count):
            tasks.create_task(one(number))
        for _ in range(count):
            await running.acquire()
        grown = memory(pid) - before
        measured.set()
    return grown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--streams", type=int, default=64)
    arguments, flags = parser.parse_known_args()
    with ServerProcess("--listen", "127.0.0.1:0", "--log-level", "error", *flags) as server:
        address, pid = server.wait_ready().address, server.process.pid
        processes = {"front end": pid}
        processes |= {f"core{number or ''}": child for number, child in enumerate(children(pid))}
        time.sleep(SETTLE_SECONDS)
        before = {name: process_cpu_seconds(each) for name, each in processes.items()}
        time.sleep(arguments.seconds)
        rows: list[list[object]] = [
            [f"{name}, CPU at rest", f"{(process_cpu_seconds(each) - before[name]) / arguments.seconds:.2%}"]
            for name, each in processes.items()
        ]
        rows += [[f"{name}, MiB ready", memory(each)] for name, each in processes.items()]
        core = memory(processes["core"])
        grown = uvloop.run(streams(address, pid, arguments.streams))
        rows.append([f"front end, KiB more per open stream ({arguments.streams})", 1024 * grown / arguments.streams])
        rows.append([f"core, MiB more after {arguments.streams} streams", memory(processes["core"]) - core])
    rows += [
        [f"a process that imported {module}, MiB", imports(module)] for module in ("sys", "core_proc.proc", "torch")
    ]
    sys.stdout.write(format_table(["", ""], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
