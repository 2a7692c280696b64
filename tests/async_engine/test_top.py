"""What `tailrace top` shows, and what it says when there is nothing to show."""

import asyncio
import threading

import pytest
from google.protobuf.duration_pb2 import Duration

from async_engine import cli, top
from async_engine.async_llm import AsyncLLM
from async_engine.server import Server
from async_engine.top import screen
from protos.config import EngineConfig, build
from protos.server_config import ServerOptions
from protos.tailrace.v1 import admin_pb2 as pb
from tests.certificates import Authority

LATENCY = pb.LatencyPercentiles(p50=Duration(nanos=12_300_000), p90=Duration(nanos=50_000_000), p99=Duration(seconds=2))


def status(**fields):
    return pb.GetStatusResponse(
        **{
            "state": pb.ENGINE_STATE_SERVING,
            "model": "m",
            "version": "9",
            "uptime": Duration(seconds=100),
            "output_tokens": 5000,
            "kv_usage": 0.5,
            "kv_capacity_tokens": 1000,
            "prefix_queries": 100,
            "prefix_hits": 25,
        }
        | fields
    )


def live(number, **fields):
    return pb.LiveRequest(request_id=f"r{number}", caller="session s", phase=pb.REQUEST_PHASE_DECODE, **fields)


def test_rates_are_over_the_time_between_two_looks():
    before = status(output_tokens=4000, prompt_tokens=7)
    text = "\n".join(screen(status(prompt_tokens=107), pb.ListRequestsResponse(), before, 2.0, (100, 40)))
    assert "out 500.0  in 50.0" in text
    first = "\n".join(screen(status(), pb.ListRequestsResponse(), None, 0.0, (100, 40)))
    assert "out 50.0  in 0.0" in first
    assert "prefix hits 25%" in first
    assert "[###############...............] 50% of 1000 tokens" in first


def test_latencies_and_ends_are_shown_where_there_are_any():
    lines = screen(status(time_to_first_token=LATENCY), pb.ListRequestsResponse(), None, 0.0, (100, 40))
    (row,) = [line for line in lines if "time to first token" in line]
    assert row.split()[-3:] == ["12.3", "50.0", "2000.0"]
    (row,) = [line for line in lines if "between tokens" in line]
    assert row.split()[-3:] == ["-", "-", "-"]
    ended = screen(status(finished_requests={"eos": 3, "shed": 1}), pb.ListRequestsResponse(), None, 0.0, (100, 40))
    assert "ended  3 eos, 1 shed" in ended


@pytest.mark.parametrize("height", [5, 14, 20, 60])
def test_no_more_lines_than_the_terminal_has(height):
    requests = pb.ListRequestsResponse(requests=[live(number) for number in range(50)], omitted=7)
    lines = screen(status(), requests, None, 0.0, (60, height))
    assert len(lines) <= max(height, 12)
    assert max(map(len, lines)) <= 60
    shown = sum(line.startswith("r") and "decode" in line for line in lines)
    assert lines[-1] == f"and {57 - shown} more"


def test_rows_tell_the_request_and_no_control_characters():
    request = live(1, age=Duration(seconds=75), prompt_tokens=12, output_tokens=34, sequences=2)
    request.caller = "session \x1b[31mred"
    lines = screen(status(), pb.ListRequestsResponse(requests=[request]), None, 0.0, (120, 40))
    (row,) = [line for line in lines if line.startswith("r1")]
    assert row.split() == ["r1", "decode", "1m15s", "12", "34", "session", "?[31mred", "x2"]


def test_ages_are_short():
    told = [top._age(Duration(seconds=seconds)) for seconds in (5, 65, 3600 * 5 + 61)]
    assert told == ["5.0s", "1m05s", "5h01m"]


class Served:
    """A server with an operators' address, on a loop of its own."""

    def __init__(self, **options):
        self.options = ServerOptions(listen="127.0.0.1:0", admin_listen="127.0.0.1:0", **options)

    def __enter__(self):
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        asyncio.run_coroutine_threadsafe(self.start(), self.loop).result(30)
        return self.server

    async def start(self):
        self.llm = await AsyncLLM.start(build(EngineConfig, model="null"))
        self.server = Server(self.options)
        await self.server.listen()
        await self.server.start(self.llm)

    async def stop(self):
        await self.server.stop(0)
        await self.llm.close()

    def __exit__(self, *_):
        asyncio.run_coroutine_threadsafe(self.stop(), self.loop).result(30)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


def test_a_running_engine_is_shown_once(capsys):
    with Served() as server:
        assert cli.main(["top", "--address", server.admin_address, "--once"]) == 0
        shown = capsys.readouterr().out
        assert cli.main(["top", "--address", server.address, "--once"]) == 2
        refused = capsys.readouterr().err
    assert "null  serving" in shown
    assert "\x1b" not in shown
    assert "is not the operators' address" in refused


def test_operators_have_tokens_of_their_own(capsys, tmp_path):
    authority = Authority(tmp_path)
    cert, key = map(str, authority.issue("server"))
    for name in ("callers", "operators"):
        (tmp_path / name).write_text(f"somebody:{name * 3}\n")
        (tmp_path / f"{name}.token").write_text(name * 3)
    files = {"auth_tokens": str(tmp_path / "callers"), "admin_auth_tokens": str(tmp_path / "operators")}
    with Served(tls_cert=cert, tls_key=key, **files) as server:
        command = ["top", "--once", "--address", server.admin_address, "--tls-ca", str(authority.ca)]
        codes = [
            cli.main([*command, "--token-file", str(tmp_path / f"{name}.token")]) for name in ("callers", "operators")
        ]
        told = capsys.readouterr()
    assert codes == [2, 0]
    assert "wants a token of its --admin-auth-tokens" in told.err
    assert "null  serving" in told.out


def test_nothing_there_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr(top, "CONNECT_SECONDS", 0.1)
    assert cli.main(["top", "--address", "127.0.0.1:1", "--once"]) == 2
    assert "nothing answers on 127.0.0.1:1; start the server with --admin-listen" in capsys.readouterr().err


def test_an_interval_out_of_bounds_is_refused(capsys):
    assert cli.main(["top", "--interval", "0"]) == 2
    assert "--interval must be at least 0.1" in capsys.readouterr().err
