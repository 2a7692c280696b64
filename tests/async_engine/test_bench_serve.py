"""`tailrace bench serve`: what it sends, what it makes of the answers, and the command against a real server."""

import asyncio
import json
import signal
import subprocess
import sys

import grpc
import msgspec
import pytest

from async_engine import cli
from async_engine.bench.client import AttachSender, Milestone, Record, StreamSender
from async_engine.bench.options import ServeBenchOptions
from async_engine.bench.report import format_comparison, format_report, inter_token_gaps, make_report
from async_engine.bench.serve import measure
from async_engine.bench.table import format_table
from async_engine.bench.workload import make_conversations
from async_engine.connect import open_channel
from async_engine.connect_options import ConnectOptions
from async_engine.flags import parse
from protos.errors import InvalidRequestError
from protos.tailrace.v1 import generation_pb2 as pb
from protos.tailrace.v1 import generation_pb2_grpc
from tests.certificates import Authority
from tests.e2e.serving import ROOT, ServerProcess, run, serving, until

LATENCIES = {"ttft_ms", "inter_token_ms", "e2e_ms"}


def make_specs(options):
    return [spec for conversation in make_conversations(options) for spec in conversation.specs()]


def record(sent, receipts, ended, status="OK", message=""):
    made = Record(prompt_tokens=8)
    made.sent = sent
    for now, count in receipts:
        made.add(now, [1] * count)
    made.end(status, message)
    made.ended = ended
    return made


def test_prompts_share_their_prefix_and_nothing_else():
    options = ServeBenchOptions(num_requests=3, prompt_tokens=20, shared_prefix_tokens=12, vocab_size=50)
    specs = list(make_specs(options))
    prompts = [list(spec.token_ids.ids) for spec in specs]
    assert {len(prompt) for prompt in prompts} == {20}
    assert len({tuple(prompt[:12]) for prompt in prompts}) == 1
    assert len({tuple(prompt[12:]) for prompt in prompts}) == 3
    assert max(map(max, prompts)) < 50
    assert len({spec.request_id for spec in specs}) == 3
    assert prompts == [list(spec.token_ids.ids) for spec in make_specs(options)], "a seed gives the same prompts"


def test_a_turn_goes_on_behind_the_answer_to_the_one_before():
    options = ServeBenchOptions(num_requests=5, turns=3, prompt_tokens=4, shared_prefix_tokens=2)
    first, second = make_conversations(options)
    prompts = []
    for conversation in (first, second):
        for spec in conversation.specs():
            prompts.append(list(spec.token_ids.ids))
            conversation.answered([7, 8])
    assert [len(prompt) for prompt in prompts] == [4, 10, 16, 4, 10]
    assert prompts[2][:12] == [*prompts[1], 7, 8]
    assert prompts[1][:6] == [*prompts[0], 7, 8]
    assert prompts[0][:2] == prompts[3][:2]
    sessions = [{spec.scheduling.session_id for spec in each.specs()} for each in make_conversations(options)]
    assert len(sessions[0]) == len(sessions[1]) == 1
    assert sessions[0] != sessions[1]


def test_outputs_have_exactly_the_length_asked_for():
    (spec,) = make_specs(ServeBenchOptions(num_requests=1, output_tokens=7, text=False))
    assert spec.stop.max_tokens == 7
    assert spec.stop.ignore_eos
    assert not spec.output.text


def test_tokens_that_come_together_share_the_wait():
    assert list(inter_token_gaps(record(0.0, [(1.0, 1), (1.5, 1), (2.5, 2)], 3.0))) == [0.5, 0.5, 0.5]
    assert list(inter_token_gaps(record(0.0, [(1.0, 5)], 3.0))) == []


def test_the_report_counts_what_completed_and_what_failed():
    records = [
        record(10.0, [(10.25, 1), (10.5, 1)], 11.0),
        record(10.0, [(10.75, 2)], 12.0),
        record(10.0, [(10.1, 1)], 10.2, "UNAVAILABLE", "gone"),
    ]
    report = make_report(ServeBenchOptions(), records, 2.0)
    assert report["completed"] == 2
    assert report["errors"] == {"UNAVAILABLE": 1}
    assert report["first_error"] == "gone"
    assert report["output_tokens_per_s"] == 2.0
    assert report["prompt_tokens_per_s"] == 8.0
    assert report["ttft_ms"]["mean"] == 500.0
    assert report["inter_token_ms"]["p99"] == 250.0
    assert report["e2e_ms"]["p50"] == 1500.0


def test_a_report_without_results_has_no_latencies():
    report = make_report(ServeBenchOptions(), [record(0.0, [], 1.0, "INTERNAL")], 1.0)
    assert all(report[key] == {} for key in LATENCIES)


@pytest.mark.parametrize("method", ["stream", "attach"])
@pytest.mark.parametrize("text", [True, False])
def test_the_loop_is_closed_by_concurrency(tmp_path, method, text):
    async def main():
        address, most = f"unix:{tmp_path}/socket", 0
        async with serving(server={"listen": address}, null_step_ms=2) as (llm, _, _):
            register = llm.register

            def count(*arguments):
                nonlocal most
                state = register(*arguments)
                most = max(most, llm.num_live)
                return state

            llm.register = count
            options = ServeBenchOptions(
                address=address, num_requests=12, concurrency=3, output_tokens=9, method=method, text=text
            )
            return await measure(options), most

    report, most = run(main)
    assert report["completed"] == 12
    assert report["errors"] == {}
    assert report["output_tokens_per_s"] == pytest.approx(12 * 9 / report["seconds"], rel=0.05)
    assert 1 < most <= 6, "three at once, and at most as many that are just being released"
    assert all(report[key]["mean"] > 0 for key in LATENCIES)


def test_an_open_loop_does_not_wait_for_answers(tmp_path):
    async def main():
        address = f"unix:{tmp_path}/socket"
        async with serving(server={"listen": address}) as (llm, _, _):
            await llm.core.call("freeze")
            options = ServeBenchOptions(address=address, num_requests=20, concurrency=1, rate=1000.0)
            task = asyncio.create_task(measure(options))
            await until(lambda: llm.num_live == 20)
            await llm.core.call("resume")
            return await task

    assert run(main)["completed"] == 20


@pytest.mark.parametrize("method", ["stream", "attach"])
def test_conversations_find_their_turns_in_the_prefix_cache(tmp_path, method):
    async def main():
        address = f"unix:{tmp_path}/socket"
        async with serving(server={"listen": address}) as (llm, _, _):
            options = ServeBenchOptions(
                address=address, num_requests=9, turns=3, prompt_tokens=32, output_tokens=16, method=method
            )
            report = await measure(options)
            await until(lambda: llm.stats.output_tokens == 9 * 16)  # the core tells every now and then
            return report, llm.stats

    report, stats = run(main)
    assert (report["completed"], report["errors"]) == (9, {})
    prompts = 3 * (32 + 80 + 128)
    assert report["prompt_tokens_per_s"] == pytest.approx(prompts / report["seconds"], rel=0.05)
    assert stats.prompt_tokens == prompts
    # Whole blocks of 16 of what was there, but for the last token, which was not computed.
    assert stats.prefix_hits == 3 * (32 + 80)


@pytest.mark.parametrize("method", ["stream", "attach"])
def test_refused_requests_are_counted(tmp_path, method):
    async def main():
        address = f"unix:{tmp_path}/socket"
        async with serving(server={"listen": address}):
            return await measure(ServeBenchOptions(address=address, num_requests=5, vocab_size=10**6, method=method))

    report = run(main)
    assert report["errors"] == {"INVALID_ARGUMENT": 5}
    assert "outside the vocabulary" in report["first_error"]


class Leaver(generation_pb2_grpc.GenerationServiceServicer):
    """Ends each call after three messages."""

    def __init__(self, code):
        self._code = code

    async def Attach(self, request_iterator, context):
        for _ in range(3):
            await anext(aiter(request_iterator))
        if self._code is not None:
            await context.abort(self._code, "gone")


@pytest.mark.parametrize(
    ("code", "status"), [(grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE gone"), (None, "UNKNOWN the server ended the call")]
)
def test_all_requests_end_with_their_attach_call(tmp_path, code, status):
    async def main():
        server = grpc.aio.server()
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(Leaver(code), server)
        server.add_insecure_port(f"unix:{tmp_path}/socket")
        await server.start()
        records = [Record() for _ in range(4)]
        async with (
            open_channel(grpc.aio, ConnectOptions(address=f"unix:{tmp_path}/socket")) as channel,
            AttachSender(channel) as sender,
        ):
            for chunk in (records[:3], records[3:]):  # at once, and when the call is over
                runs = [sender.run(pb.GenerationSpec(request_id=str(id(each))), each) for each in chunk]
                await asyncio.gather(*runs)
        await server.stop(0)
        return {f"{each.status} {each.message}" for each in records}

    assert run(main) == {status}


def test_a_milestone_is_passed_when_the_last_record_is_there():
    async def main():
        first, second = Record(), Record()
        first.add(0.0, [1] * 5)
        milestone = Milestone([first, second], 2)
        first.add(0.0, [1] * 1)
        second.add(0.0, [1] * 2)
        assert not milestone.passed.is_set()
        first.add(0.0, [1] * 3)
        assert milestone.passed.is_set()

    run(main)


def test_a_record_is_open_when_the_server_has_the_request(tmp_path):
    async def main():
        address = f"unix:{tmp_path}/socket"
        async with (
            serving(server={"listen": address}) as (llm, _, _),
            open_channel(grpc.aio, ConnectOptions(address=address)) as channel,
        ):
            await llm.core.call("freeze")
            record = Record()
            spec = pb.GenerationSpec(text="hi")
            task = asyncio.create_task(StreamSender(channel).run(spec, record))
            await record.opened.wait()
            assert llm.num_live == 1
            task.cancel()
            await asyncio.wait([task])
            await until(lambda: llm.num_live == 0)

    run(main)


@pytest.mark.parametrize("method", ["stream", "attach"])
def test_a_load_cut_short_reports_what_is_over(tmp_path, method):
    async def main():
        address = f"unix:{tmp_path}/socket"
        async with serving(server={"listen": address}, null_step_ms=1) as (llm, _, _):
            options = ServeBenchOptions(address=address, num_requests=10**6, concurrency=2, method=method)
            ended = []
            llm.on_end.append(lambda *_: ended.append(1))
            task = asyncio.create_task(measure(options))
            await until(lambda: len(ended) > 4)
            task.cancel()
            return await task

    report = run(main)
    assert report["interrupted"]
    assert report["completed"] == report["requests"] >= 3
    assert report["errors"] == {}
    assert "errors: none; interrupted\n" in format_report(report)


def test_ctrl_c_reports_and_exits_with_130():
    with ServerProcess("null", "--listen", "127.0.0.1:0", "--null-step-ms", "1") as server:
        address = server.wait_ready().address
        command = [sys.executable, "-m", "async_engine.cli", "bench", "serve", "--address", address, "--json"]
        bench = subprocess.Popen(
            [*command, "--num-requests", "100000"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert server.process.stderr is not None
        server.process.stderr.readline()  # a request is over
        bench.send_signal(signal.SIGINT)
        output, errors = bench.communicate(timeout=30)
    assert (bench.returncode, errors) == (130, b"")
    assert json.loads(output)["interrupted"]


def test_options_are_validated():
    arguments = cli.make_parser().parse_args(["bench", "serve", "--concurrency", "0"])
    with pytest.raises(InvalidRequestError, match="concurrency: must be at least 1, not 0"):
        parse(ServeBenchOptions, arguments)


def test_the_command_prints_one_line_of_json(capsys):
    with ServerProcess("null", "--listen", "127.0.0.1:0") as server:
        address = server.wait_ready().address
        load = ["--num-requests", "4", "--prompt-tokens", "8", "--output-tokens", "4"]
        assert cli.main(["bench", "serve", "--address", address, "--json", *load]) == 0
        (line,) = capsys.readouterr().out.splitlines()
        report = json.loads(line)
        assert report["completed"] == 4
        assert report["options"] == msgspec.structs.asdict(
            ServeBenchOptions(address=address, json=True, num_requests=4, prompt_tokens=8, output_tokens=4)
        ) | {"sweep": []}
        assert cli.main(["bench", "serve", "--address", address, "--method", "attach", *load]) == 0
        table = capsys.readouterr().out
        assert "4 of 4 requests" in table
        assert "time to first token" in table
        assert cli.main(["bench", "serve", "--address", address, "--vocab-size", "1000000", *load]) == 1
        (line,) = capsys.readouterr().out.splitlines()
        assert line.startswith("no request completed in ")
        assert "4 INVALID_ARGUMENT (token_ids: " in line
        assert server.stop() == 0


def test_a_sweep_is_written_drawn_and_compared(tmp_path, capsys):
    written, drawn = tmp_path / "now.json", tmp_path / "now.png"
    with ServerProcess("null", "--listen", "127.0.0.1:0") as server:
        load = ["bench", "serve", "--address", server.wait_ready().address, "--num-requests", "5"]
        load += ["--prompt-tokens", "8", "--output-tokens", "4"]
        sweep = ["--sweep", "200", "--sweep", "400"]
        assert cli.main([*load, *sweep, "--output", str(written), "--plot", str(drawn)]) == 0
        assert capsys.readouterr().out.count("5 of 5 requests") == 2
        assert cli.main([*load, "--rate", "400", "--compare", str(written), "--json"]) == 0
        report, _, *table = capsys.readouterr().out.splitlines()
    assert [each["options"]["rate"] for each in json.loads(written.read_text())] == [200, 400]
    assert drawn.read_bytes().startswith(b"\x89PNG")
    now, then = json.loads(report)["requests_per_s"], json.loads(written.read_text())[1]["requests_per_s"]
    assert table[0].split() == ["400", "requests/s", "then", "now", "now/then"]
    (row,) = [line.split() for line in table if line.startswith("requests_per_s")]
    assert float(row[-1]) == pytest.approx(now / then, rel=0.02)


def test_ratios_are_of_the_same_load_and_of_what_both_have():
    def report(rate, first_token):
        made = make_report(ServeBenchOptions(rate=rate), [record(0.0, [(first_token, 1)], 2.0)], 2.0)
        return made

    lines = format_comparison([report(4.0, 1.5), report(8.0, 1.0)], [report(4.0, 0.5)]).splitlines()
    (row,) = [line.split() for line in lines if line.startswith("ttft p50")]
    assert row[-3:] == ["500", "1,500", "3.00"]
    assert not any(line.startswith("inter_token") for line in lines)
    assert lines[-1] == "8 requests/s: not in the earlier run, which has 4 requests/s"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--plot", "/nowhere/x.png"], "--plot"),
        (["--output", "/nowhere/x.json"], "--output: /nowhere/x.json: there is no such folder"),
        (["--compare", "/nowhere/x.json"], "--compare: /nowhere/x.json cannot be read: No such file or directory"),
        (["--compare", __file__], f"--compare: {__file__} is not what --output writes"),
        (["--sweep", "1", "--sweep", "0"], "--sweep: rates must be more than 0"),
        (["--turns", "0"], "--turns must be at least 1, not 0"),
    ],
)
def test_what_could_only_fail_after_the_load_fails_before(arguments, problem, capsys):
    assert cli.main(["bench", "serve", *arguments]) == 2
    assert problem in capsys.readouterr().err


def test_errors_of_the_command_are_one_line(tmp_path, capsys):
    assert cli.main(["bench", "serve", "--shared-prefix-tokens", "500"]) == 2
    assert "--shared-prefix-tokens must be at most --prompt-tokens, which is 128" in capsys.readouterr().err
    assert cli.main(["bench", "serve", "--address", "http://127.0.0.1:1"]) == 2
    assert capsys.readouterr().err == "tailrace: --address must be HOST:PORT, without http://\n"


def test_nobody_there_is_one_line(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("async_engine.bench.serve.CONNECT_SECONDS", 0.2)
    assert cli.main(["bench", "serve", "--address", f"unix:{tmp_path}/nobody"]) == 2
    assert capsys.readouterr().err.startswith("tailrace: nothing serves gRPC on unix:")


def test_tables_align():
    table = format_table(["name", "a", "long head"], [["x", 1.0, 12345.678], ["longer", 23.456, "-"]])
    assert table.splitlines() == ["name       a  long head", "x       1.00     12,346", "longer  23.5          -"]


@pytest.mark.parametrize("method", ["stream", "attach"])
def test_a_server_with_mutual_tls_and_tokens_is_measured_too(tmp_path, method):
    authority = Authority(tmp_path)
    (cert, key), (own_cert, own_key) = authority.issue("server"), authority.issue("bench")
    (tmp_path / "tokens").write_text(f"bench:{'t' * 32}\n")
    (tmp_path / "token").write_text("t" * 32 + "\n")
    server = {"tls_cert": cert, "tls_key": key, "tls_client_ca": authority.ca, "auth_tokens": tmp_path / "tokens"}
    ours = {"tls_ca": authority.ca, "tls_cert": own_cert, "tls_key": own_key, "token_file": tmp_path / "token"}
    ours = {name: str(path) for name, path in ours.items()}
    load = {"method": method, "num_requests": 3, "output_tokens": 2}

    async def main():
        credentials = grpc.ssl_channel_credentials(
            authority.ca.read_bytes(), own_key.read_bytes(), own_cert.read_bytes()
        )
        options = {name: str(path) for name, path in server.items()}
        async with serving(server=options, credentials=credentials) as (_, _, channel):
            whole = await measure(ServeBenchOptions(address=channel.address, **load, **ours))
            no_token = await measure(ServeBenchOptions(address=channel.address, **load, **ours | {"token_file": ""}))
            return whole["completed"], no_token["completed"], sum(no_token["errors"].values())

    assert run(main) == (3, 0, 3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tls_cert": "x"}, "tls_cert: needs --tls-ca"),
        ({"tls_ca": "nowhere"}, "tls_ca: nowhere: No such file"),
        ({"tls_ca": __file__, "tls_cert": __file__}, "tls_key: is required"),
        ({"token_file": "nowhere"}, "token_file: nowhere: No such file"),
        ({"token_file": __file__}, "not one token"),
    ],
)
def test_files_of_no_use_are_named(options, words):
    with pytest.raises(InvalidRequestError, match=words):
        run(lambda: measure(ServeBenchOptions(**options)))
