"""`tailrace bench null`: what the engine costs above the model, which scripted tokens stand in for.

The front end's CPU is that of its process alone: the core and the load run in processes of their
own. Streams step together and slowly, so that each token is a message; the bare handler gets the
same load in turns with the server, so that a slow moment of the machine hits both.
"""

from __future__ import annotations

import contextlib
import os
import re
import statistics
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from async_engine.bench.child import Child
from async_engine.bench.core import BATCHES, measure_busy, measure_core
from async_engine.bench.load import Job, Result
from async_engine.bench.table import format_table

if TYPE_CHECKING:
    from collections.abc import Callable

    from async_engine.bench.options import NullBenchOptions

ROOM = ("--max-model-len", str(1 << 17), "--num-kv-blocks", str(1 << 18))
"""More than streams without an end get: the first ones run alone, and fast, while the others start."""
SETTLE_SECONDS = 0.25
READY = re.compile(r"ready on ([^ ]+): ")
# By the name in the report: the server, the way to send, and whether text is asked for.
PACED = {
    "generate_stream": ("paced", "stream", True),
    "bare_handler": ("bare", "stream", True),
    "attach": ("paced", "attach", False),
    "attach_text": ("paced", "attach", True),
}
LOGPROBS = {"generate_stream_logprobs": ("paced", "stream", True), "attach_logprobs": ("paced", "attach", True)}
"""The same with five log-probabilities a token; measured once, to be held against those without."""
NUM_LOGPROBS = 5
# In a round, there and back: a drift of the machine's speed evens out between the two that are compared.
ORDER = ("generate_stream", "bare_handler", "attach", "attach_text", "bare_handler", "generate_stream")
"""Those whose ratio is the question get twice the samples, side by side."""
UNPACED = {"generate_stream": ("unpaced", "stream", True), "attach": ("unpaced", "attach", False)}


def main(options: NullBenchOptions) -> int:
    """Measures and prints; the exit code."""
    report = measure(options)
    sys.stdout.write(msgspec.json.encode(report).decode() + "\n" if options.json else format_report(report))
    return 0


def measure(options: NullBenchOptions) -> dict[str, Any]:
    """The whole report. Leaves no process behind, however it ends."""
    with _Servers(options) as servers:
        core = measure_core(options.rounds, options.core_tokens)
        busy = measure_busy(options.rounds, options.device_ms)
        paced: dict[str, list[Result]] = {name: [] for name in [*PACED, *LOGPROBS]}
        unpaced: dict[str, list[Result]] = {name: [] for name in UNPACED}
        for _ in range(options.rounds):
            for name in ORDER:
                paced[name].append(servers.load(*PACED[name], num_tokens=options.steps))
            for name, way in UNPACED.items():
                unpaced[name].append(servers.load(*way, seconds=options.seconds))
        for name, way in LOGPROBS.items():
            paced[name].append(servers.load(*way, num_tokens=options.steps, logprobs=NUM_LOGPROBS))
    return {
        "core_us_per_request_step": {str(batch): round(cost, 3) for batch, cost in core.items()},
        "device_busy": {
            str(depth): {str(batch): round(share, 3) for batch, share in shares.items()}
            for depth, shares in busy.items()
        },
        "front_us_per_token": _medians(paced, lambda result: result.server_cpu / result.num_tokens * 1e6),
        "tokens_per_s": _medians(unpaced, lambda result: result.num_tokens / result.seconds),
        "latency_ms": {
            name: {p: round(statistics.median(result.latency_ms[p] for result in results), 3) for p in ("p50", "p99")}
            for name, results in paced.items()
        },
        "tokens_per_message": _medians(paced, lambda result: result.num_tokens / result.num_messages),
        "tokens_per_message_unpaced": _medians(unpaced, lambda result: result.num_tokens / result.num_messages),
        "load_us_per_token": _medians(paced, lambda result: result.load_cpu / result.num_tokens * 1e6),
        "options": msgspec.structs.asdict(options),
    }


def format_report(report: dict[str, Any]) -> str:
    options = report["options"]
    core = format_table(
        ["core, requests that decode", "us per request and step"],
        [[batch, cost] for batch, cost in report["core_us_per_request_step"].items()],
    )
    busy = format_table(
        [f"device of {options['device_ms']:g} ms a step, busy", *(f"{batch} rows" for batch in BATCHES)],
        [[f"{depth} in flight", *shares.values()] for depth, shares in report["device_busy"].items()],
    )
    columns = ("front_us_per_token", "load_us_per_token", "tokens_per_message")
    front = format_table(
        [f"front end, {options['streams']} streams", "CPU us/token", "client's", "tokens/message", "p50 ms", "p99 ms"],
        [
            [name, *(report[column][name] for column in columns), *report["latency_ms"][name].values()]
            for name in [*PACED, *LOGPROBS]
        ],
    )
    ratio = report["front_us_per_token"]["generate_stream"] / report["front_us_per_token"]["bare_handler"]
    rate = format_table(
        ["as fast as it goes", "tokens/s", "tokens/message"],
        [
            [name, float(rate), report["tokens_per_message_unpaced"][name]]
            for name, rate in report["tokens_per_s"].items()
        ],
    )
    return f"{core}\n{busy}\n{front}\ngenerate_stream / bare_handler: {ratio:.2f}\n\n{rate}"


class _Servers:
    """The processes: a server that steps slowly, one that does not wait, the bare one, and the load on them."""

    def __init__(self, options: NullBenchOptions) -> None:
        self._options = options
        self._stack = contextlib.ExitStack()
        self._servers: dict[str, tuple[Child, str, str]] = {}
        """By name: the process, its address and the file of its stamps."""

    def __enter__(self) -> _Servers:
        options = self._options
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            serve = ["serve", "null", "--listen", "127.0.0.1:0", "--drain-timeout", "0", *ROOM]
            serve += ["--max-num-seqs", str(options.streams)]
            commands = {
                "paced": ("async_engine.bench.server", *serve, "--null-step-ms", str(options.step_ms)),
                "unpaced": ("async_engine.bench.server", *serve),
                "bare": ("async_engine.bench.bare", str(options.step_ms)),
            }
            started = {}
            for name, (module, *arguments) in commands.items():
                stamps = os.path.join(folder, name)
                started[name] = stack.enter_context(Child(module, stamps, *arguments)), stamps
            self._load = stack.enter_context(Child("async_engine.bench.load"))
            for name, (child, stamps) in started.items():
                match = READY.search(line := child.read_line())
                assert match, line
                self._servers[name] = child, match[1], stamps
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def load(self, server: str, method: str, text: bool, **until: Any) -> Result:
        child, address, stamps = self._servers[server]
        job = Job(
            address=address,
            server_pid=child.pid,
            method=method,
            num_streams=self._options.streams,
            text=text,
            **({"stamps": stamps} if server != "unpaced" else self._held(child)),
            **until,
        )
        return msgspec.json.decode(self._load.ask(msgspec.json.encode(job).decode()), type=Result)

    def _held(self, server: Child) -> dict[str, Any]:
        """Streams that run as fast as they can would slow down the opening of the others, so all start together."""
        return {"hold_pid": _core_pid(server.pid), "settle_seconds": SETTLE_SECONDS}


def _core_pid(server_pid: int) -> int:
    """The server's one child."""
    return int(Path(f"/proc/{server_pid}/task/{server_pid}/children").read_text())


def _medians(results: dict[str, list[Result]], figure: Callable[[Result], float]) -> dict[str, float]:
    return {name: round(statistics.median(map(figure, rounds)), 3) for name, rounds in results.items()}
