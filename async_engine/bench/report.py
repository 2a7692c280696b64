"""Reports of `tailrace bench serve`: figures of a load, as text, as a plot, and beside those of another run."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from async_engine.bench.table import format_table
from protos.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from async_engine.bench.client import Record
    from async_engine.bench.options import ServeBenchOptions

Report = dict[str, Any]
PERCENTILES = (50, 90, 99)
LATENCIES = {"ttft_ms": "time to first token", "inter_token_ms": "inter-token latency", "e2e_ms": "end to end"}
_COMPARED = ("requests_per_s", "output_tokens_per_s")


def make_report(options: ServeBenchOptions, records: list[Record], seconds: float) -> Report:
    completed = [record for record in records if record.status == "OK"]
    first_tokens = [record.receipts[0][0] - record.sent for record in completed if record.receipts]
    return {
        "requests": len(records),
        "completed": len(completed),
        "errors": dict(Counter(record.status for record in records if record.status != "OK")),
        "first_error": next((record.message for record in records if record.status != "OK"), ""),
        "seconds": round(seconds, 3),
        "requests_per_s": round(len(completed) / seconds, 3),
        "prompt_tokens_per_s": round(sum(record.prompt_tokens for record in completed) / seconds, 1),
        "output_tokens_per_s": round(sum(record.num_tokens for record in completed) / seconds, 1),
        "ttft_ms": _distribution(first_tokens),
        "inter_token_ms": _distribution([gap for record in completed for gap in inter_token_gaps(record)]),
        "e2e_ms": _distribution([record.ended - record.sent for record in completed]),
        "options": msgspec.structs.asdict(options),
    }


def inter_token_gaps(record: Record) -> Iterator[float]:
    """Seconds per token after the first message. Tokens that come together share the wait for them."""
    for (before, _), (now, num_tokens) in zip(record.receipts, record.receipts[1:], strict=False):
        for _ in range(num_tokens):
            yield (now - before) / num_tokens


def _distribution(seconds: list[float]) -> dict[str, float]:
    """Milliseconds; empty where there is nothing to tell."""
    if not seconds:
        return {}
    values = np.array(seconds) * 1e3
    figures = {"mean": values.mean(), **{f"p{p}": np.percentile(values, p) for p in PERCENTILES}}
    return {name: round(float(figure), 3) for name, figure in figures.items()}


def _load(report: Report) -> str:
    options = report["options"]
    return f"{options['rate']:g} requests/s" if options["rate"] else f"{options['concurrency']} at once"


def format_report(report: Report) -> str:
    options = report["options"]
    errors = ", ".join(f"{count} {status}" for status, count in report["errors"].items())
    errors = f"{errors} ({report['first_error']})" if errors else "none"
    if not report["completed"]:
        return f"no request completed in {report['seconds']:.2f} s; errors: {errors}\n"
    names = ("mean", *(f"p{p}" for p in PERCENTILES))
    latencies = format_table(
        ["ms", *names],
        [[text, *(report[key].get(name, "-") for name in names)] for key, text in LATENCIES.items()],
    )
    turns = f" in conversations of {options['turns']}" if options["turns"] > 1 else ""
    return (
        f"{report['completed']} of {report['requests']} requests in {report['seconds']:.2f} s, {_load(report)}, "
        f"{options['prompt_tokens']} + {options['output_tokens']} tokens each{turns}, by {options['method']}; "
        f"errors: {errors}{'; interrupted' * report['interrupted']}\n"
        f"{report['requests_per_s']:.2f} requests/s, {report['prompt_tokens_per_s']:,.0f} prompt tokens/s in, "
        f"{report['output_tokens_per_s']:,.0f} tokens/s out\n\n{latencies}"
    )


def read_reports(path: str) -> list[Report]:
    """Reports that an earlier run wrote. Raises InvalidRequestError if the file holds none."""
    try:
        reports = msgspec.json.decode(Path(path).read_bytes(), type=list[Report])
        for report in reports:
            figures_of(report)
            _load(report)
    except OSError as error:
        raise InvalidRequestError("compare", f"{path} cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, KeyError, TypeError):
        raise InvalidRequestError("compare", f"{path} is not what --output writes") from None
    return reports


def write_reports(path: str, reports: Sequence[Report]) -> None:
    Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(reports)) + b"\n")


def figures_of(report: Report) -> dict[str, float]:
    """What is compared: speeds, and percentiles of latencies where there are any."""
    found = {name: report[name] for name in _COMPARED}
    for key in LATENCIES:
        found |= {f"{key.removesuffix('_ms')} p{p}": report[key][f"p{p}"] for p in (50, 99) if report[key]}
    return found


def format_comparison(reports: Sequence[Report], earlier: Sequence[Report]) -> str:
    """Ratios of these figures to those of the same load in an earlier run."""
    then = {_load(report): figures_of(report) for report in earlier}
    parts = []
    for report in reports:
        known = then.get(_load(report))
        if known is None:
            parts.append(f"{_load(report)}: not in the earlier run, which has {', '.join(then) or 'nothing'}\n")
            continue
        rows = [
            [name, known[name], figure, figure / known[name] if known[name] else "-"]
            for name, figure in figures_of(report).items()
            if name in known
        ]
        parts.append(format_table([_load(report), "then", "now", "now/then"], rows))
    return "\n".join(parts)


def plot(reports: Sequence[Report], path: str) -> None:
    """Latencies and throughput over the load, as PNG."""
    # A window is never opened: no display is needed.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(3, sharex=True, figsize=(7, 8))
    loads = [report["options"]["rate"] or report["options"]["concurrency"] for report in reports]
    for axis, key in zip(axes, ("ttft_ms", "inter_token_ms"), strict=False):
        for percentile in (50, 90, 99):
            axis.plot(loads, [report[key].get(f"p{percentile}") for report in reports], "o-", label=f"p{percentile}")
        axis.set_ylabel(f"{LATENCIES[key]}, ms")
        axis.set_ylim(bottom=0)
        axis.legend()
    axes[2].plot(loads, [report["output_tokens_per_s"] for report in reports], "o-")
    axes[2].set_ylabel("output tokens/s")
    axes[2].set_ylim(bottom=0)
    axes[2].set_xlabel("requests/s" if reports[0]["options"]["rate"] else "requests at once")
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def check_plot(path: str) -> None:
    """Raises InvalidRequestError if a plot cannot be made: before the load runs, not after."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise InvalidRequestError("plot", "needs matplotlib: pip install 'tailrace[plot]'") from None
    if not Path(path).resolve().parent.is_dir():
        raise InvalidRequestError("plot", f"{path}: there is no such folder")


def tell(report: Report, as_json: bool) -> None:
    """On standard output: a line of JSON, or text."""
    sys.stdout.write(msgspec.json.encode(report).decode() + "\n" if as_json else format_report(report))
    sys.stdout.flush()
