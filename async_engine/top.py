"""`tailrace top`: a running engine on the terminal, from its operators' service."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TYPE_CHECKING, Any

import grpc

from async_engine.connect import authorization, open_channel
from protos.errors import UnavailableError
from protos.tailrace.v1 import admin_pb2 as pb
from protos.tailrace.v1 import admin_pb2_grpc

if TYPE_CHECKING:
    from google.protobuf.duration_pb2 import Duration

    from async_engine.top_options import TopOptions

CONNECT_SECONDS = 5.0
_HOME, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"
_HIDE, _SHOW = "\x1b[?25l\x1b[2J", "\x1b[?25h\n"
BAR_WIDTH = 30


def main(options: TopOptions) -> int:
    """Shows the engine until Ctrl-C, or once. Raises UnavailableError if nothing answers, and
    InvalidRequestError for a file that is of no use."""
    metadata = authorization(options)
    with open_channel(grpc, options) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        is_live = not options.once and sys.stdout.isatty()
        before: tuple[float, pb.GetStatusResponse] | None = None
        try:
            while True:
                status, requests = _ask(stub, metadata, options.address)
                now = time.monotonic()
                lines = screen(status, requests, *_since(before, now), shutil.get_terminal_size())
                before = now, status
                _show(lines, is_live)
                if options.once:
                    return 0
                time.sleep(options.interval)
        finally:
            if is_live:
                sys.stdout.write(_SHOW)


def _ask(
    stub: admin_pb2_grpc.AdminServiceStub, metadata: Any, address: str
) -> tuple[pb.GetStatusResponse, pb.ListRequestsResponse]:
    try:
        status = stub.GetStatus(pb.GetStatusRequest(), timeout=CONNECT_SECONDS, wait_for_ready=True, metadata=metadata)
        return status, stub.ListRequests(
            pb.ListRequestsRequest(page_size=200), timeout=CONNECT_SECONDS, metadata=metadata
        )
    except grpc.RpcError as error:
        hint = f"nothing answers on {address}; start the server with --admin-listen, and name that address"
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            hint = f"{address} is not the operators' address; see the server's --admin-listen"
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            hint = f"{address} wants a token of its --admin-auth-tokens; name a --token-file"
        raise UnavailableError(hint) from None


def _since(before: tuple[float, pb.GetStatusResponse] | None, now: float) -> tuple[pb.GetStatusResponse | None, float]:
    return (None, 0.0) if before is None else (before[1], now - before[0])


def _show(lines: list[str], is_live: bool) -> None:
    if is_live:
        sys.stdout.write(_HOME + "".join(f"{line}{_CLEAR_LINE}\n" for line in lines)[:-1] + _CLEAR_BELOW)
    else:
        sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


def screen(
    status: pb.GetStatusResponse,
    requests: pb.ListRequestsResponse,
    before: pb.GetStatusResponse | None,
    seconds: float,
    size: tuple[int, int],
) -> list[str]:
    """Lines that fit a terminal of (columns, lines). Rates are over the `seconds` since the status `before`; without
    one, over the engine's life."""
    columns, height = size
    if before is None:
        before, seconds = pb.GetStatusResponse(), _seconds(status.uptime)
    seconds = max(seconds, 1e-3)
    drawn, prompted = (
        (getattr(status, name) - getattr(before, name)) / seconds for name in ("output_tokens", "prompt_tokens")
    )
    state = pb.EngineState.Name(status.state).removeprefix("ENGINE_STATE_").lower()
    hit_rate = status.prefix_hits / status.prefix_queries if status.prefix_queries else 0.0
    ended = ", ".join(f"{count} {reason}" for reason, count in sorted(status.finished_requests.items()))
    lines = [
        f"tailrace {status.version}  {status.model}  {state}  up {_age(status.uptime)}"
        + (f"  {status.core_restarts} core restarts" if status.core_restarts else ""),
        f"running {status.running_sequences}  waiting {status.waiting_sequences}  "
        f"queue {_seconds(status.queue_wait):.1f} s  preemptions {status.preemptions}",
        f"tokens/s  out {drawn:.1f}  in {prompted:.1f}    prefix hits {hit_rate:.0%}",
        f"KV cache  {_bar(status.kv_usage)} {status.kv_usage:.0%} of {status.kv_capacity_tokens} tokens",
        f"{'latency ms':<22}{'p50':>10}{'p90':>10}{'p99':>10}",
        *_latencies(status),
        f"ended  {ended or 'none'}",
        "",
        f"{'request':<36}{'phase':<9}{'age':>8}{'prompt':>8}{'output':>8}  caller",
    ]
    room = max(0, height - len(lines) - 2)
    lines += [_row(request) for request in requests.requests[:room]]
    more = len(requests.requests) - room + requests.omitted
    if more > 0:
        lines.append(f"and {more} more")
    return [line[:columns] for line in lines]


def _latencies(status: pb.GetStatusResponse) -> list[str]:
    rows = []
    for title, name in (
        ("time to first token", "time_to_first_token"),
        ("between tokens", "inter_token"),
        ("end to end", "end_to_end"),
    ):
        told = getattr(status, name)
        cells = [
            f"{_seconds(getattr(told, percentile)) * 1e3:>10.1f}" if status.HasField(name) else f"{'-':>10}"
            for percentile in ("p50", "p90", "p99")
        ]
        rows.append(f"  {title:<20}{''.join(cells)}")
    return rows


def _row(request: pb.LiveRequest) -> str:
    phase = pb.RequestPhase.Name(request.phase).removeprefix("REQUEST_PHASE_").lower()
    sequences = f" x{request.sequences}" if request.sequences > 1 else ""
    return (
        f"{_plain(request.request_id)[:34]:<36}{phase:<9}{_age(request.age):>8}{request.prompt_tokens:>8}"
        f"{request.output_tokens:>8}  {_plain(request.caller)}{sequences}"
    )


def _plain(text: str) -> str:
    """What a caller named may hold no control characters of the terminal."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _bar(share: float) -> str:
    full = round(min(max(share, 0.0), 1.0) * BAR_WIDTH)
    return f"[{'#' * full}{'.' * (BAR_WIDTH - full)}]"


def _age(duration: Duration) -> str:
    seconds = _seconds(duration)
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    return f"{minutes}m{int(seconds % 60):02}s" if hours == 0 else f"{hours}h{minutes % 60:02}m"


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9
