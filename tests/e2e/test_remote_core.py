"""A core on another machine, as far as a front end can tell: over TCP, with a secret."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import threading
from pathlib import Path

import pytest

from async_engine import cli, core_source
from async_engine.async_llm import AsyncLLM
from async_engine.core_client import CoreClient
from async_engine.core_entrance import CoreUnreachableError
from async_engine.kv_watch import CLEARED
from async_engine.outputs import Delta, Summary
from async_engine.request import GenerationRequest
from protos import handshake
from protos.codec import encode_frame
from protos.config import EngineConfig, build
from protos.errors import StartupError
from protos.handshake import Challenge, Welcome
from protos.messages import CoreReady, Ping
from protos.params import SamplingParams
from tests.e2e.serving import ServerProcess, children, run, until
from tests.e2e.test_processes import Streams, wait_gone

SECRET = b"a secret of these tests"
LENGTH = 400


@pytest.fixture(scope="module")
def secret_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("secret") / "secret"
    path.write_bytes(SECRET + b"\n")
    return str(path)


@pytest.fixture(scope="module")
def core(secret_file):
    """`tailrace core`, for all of these tests."""
    arguments = ("null", "--listen", "127.0.0.1:0", "--null-step-ms", "1", "--secret-file", secret_file)
    with ServerProcess(*arguments, command="core") as process:
        yield process.wait_ready()
        child = process.core_pid
        assert process.stop() == 0
        assert wait_gone([child], 10) == []


def requests(count):
    return [
        GenerationRequest(prompt=f"prompt {n}", params=SamplingParams(max_tokens=LENGTH, seed=n)) for n in range(count)
    ]


async def text_of(llm, request):
    parts = []
    async for event in llm.generate(request):
        match event:
            case Delta():
                parts.append(event.text)
            case Summary():
                return "".join(parts)


async def expected_texts(count):
    async with await AsyncLLM.start(build(EngineConfig, model="null")) as llm:
        return await asyncio.gather(*(text_of(llm, request) for request in requests(count)))


class Wire:
    """A network between a front end and a core, which can be cut."""

    def __init__(self, target):
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self._pairs = []
        self.num_connections = 0

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_):
        self._server.close()
        self.cut()

    def cut(self):
        for writer in self._pairs:
            writer.transport.abort()
        self._pairs.clear()

    async def _connected(self, reader, writer):
        self.num_connections += 1
        theirs, ours = await asyncio.open_connection(*self._target)
        self._pairs += [writer, ours]

        async def pump(source, sink):
            with contextlib.suppress(OSError):
                while data := await source.read(1 << 16):
                    sink.write(data)
            sink.close()

        await asyncio.gather(pump(reader, ours), pump(theirs, writer))


def test_server_over_a_remote_core_serves_and_says_what_it_holds(core, secret_file):
    arguments = ("--listen", "127.0.0.1:0", "--core", core.address, "--secret-file", secret_file, "--frontends", "2")
    with ServerProcess(*arguments) as server:
        (line,) = server.wait_ready().lines
        assert "null, scripted tokens" in line
        assert "2 front ends" in line
        (other,) = children(server.process.pid)
        assert "front_end" in Path(f"/proc/{other}/cmdline").read_text()
        for _ in range(4):  # of either
            assert Streams(server.address, 3, max_tokens=20).join() == ["summary"] * 3
        assert server.stop() == 0


def test_streams_go_on_when_the_connection_is_cut_and_the_core_keeps_nothing_of_the_old_one(core):
    async def main():
        expected = await expected_texts(6)
        async with Wire(core.address) as wire, await AsyncLLM.join([wire.address], SECRET) as llm:
            tasks = [asyncio.create_task(text_of(llm, request)) for request in requests(6)]
            for cuts in (1, 2):
                seen = llm.stats.output_tokens
                await until(lambda seen=seen: llm.stats.output_tokens > seen + 100)
                wire.cut()
                await until(lambda cuts=cuts: llm.cores.num_restarts == cuts and not llm.recovering)
            assert await asyncio.gather(*tasks) == expected
            assert await llm.core.call("reset_prefix_cache") == [1]
            assert wire.num_connections == 3

    run(main)


def test_who_watches_the_prefix_cache_is_told_of_the_cut_and_then_what_the_core_still_holds(core):
    async def main():
        async with Wire(core.address) as wire, await AsyncLLM.join([wire.address], SECRET) as llm:
            await text_of(llm, GenerationRequest(prompt="w" * 40, params=SamplingParams(max_tokens=1)))
            with llm.cores.kv_watches.open("blocks", with_all=True) as watch:
                told = [await watch.next()]
                wire.cut()
                told += [await watch.next(), await watch.next()]
            return told

    before, cut, after = run(main)
    assert [told.sequence for told in (before, cut, after)] == [0, 1, 2]
    assert before.changes.is_all
    assert cut.changes == CLEARED
    assert after.changes == before.changes
    assert before.changes.stored


def test_streams_go_on_when_the_core_is_killed_and_replaced_by_its_own_server(core):
    async def main():
        expected = await expected_texts(4)
        async with await AsyncLLM.join([core.address], SECRET) as llm, asyncio.TaskGroup() as tasks:
            streams = [tasks.create_task(text_of(llm, request)) for request in requests(4)]
            await until(lambda: llm.stats.output_tokens > 100)
            first = core.core_pid
            os.kill(first, signal.SIGKILL)
            await until(lambda: llm.recovering)
            assert [await stream for stream in streams] == expected
            assert core.core_pid != first

    run(main)


def test_connection_that_is_lost_again_and_again_while_nothing_is_asked_is_made_again(core):
    async def main():
        async with await AsyncLLM.join([core.address], SECRET, max_core_restarts=1) as llm:
            for cuts in range(1, 5):
                llm.core._cut_off()
                await until(lambda cuts=cuts: llm.cores.num_restarts == cuts and not llm.recovering)
            assert await text_of(llm, requests(1)[0])

    run(main)


def test_core_that_is_away_is_waited_for_once_it_was_there(core, monkeypatch):
    monkeypatch.setattr(core_source, "RETRY_SECONDS", 0)
    join, attempts = CoreClient.join, []

    async def unreachable_at_first(*arguments):
        attempts.append(arguments)
        if len(attempts) < 20:
            raise CoreUnreachableError("nobody there")
        return await join(*arguments)

    async def main():
        async with await AsyncLLM.join([core.address], SECRET) as llm:
            monkeypatch.setattr(CoreClient, "join", unreachable_at_first)
            llm.core._cut_off()
            await until(lambda: llm.cores.num_restarts == 1 and not llm.recovering)
            assert len(attempts) == 20

    run(main)


def test_two_front_ends_of_a_core_do_not_notice_one_another(core):
    async def main():
        expected = await expected_texts(3)
        async with await AsyncLLM.join([core.address], SECRET) as one:
            async with await AsyncLLM.join([core.address], SECRET) as other:
                theirs = asyncio.create_task(text_of(other, requests(1)[0]))
                ours = [asyncio.create_task(text_of(one, request)) for request in requests(3)]
                await until(lambda: other.stats.running == 4)
                theirs.cancel()
                await asyncio.wait([theirs])
            assert await asyncio.gather(*ours) == expected
            await until(lambda: one.stats.running == 0)

    run(main)


def test_strangers_at_the_door_disturb_no_stream(core):
    host, _, port = core.address.rpartition(":")

    async def main():
        (expected,) = await expected_texts(1)
        async with await AsyncLLM.join([core.address], SECRET) as llm:
            stream = asyncio.create_task(text_of(llm, requests(1)[0]))
            for words in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(1 << 16), b"", encode_frame(Ping()) * 100):
                with socket.create_connection((host, int(port))) as stranger, contextlib.suppress(OSError):
                    stranger.sendall(words)
                await asyncio.sleep(0)
            assert await stream == expected

    run(main)


# What does not start ------------------------------------------------------------------------------


def refusal(*arguments, command="serve"):
    """The one line of a command that cannot start."""
    with ServerProcess(*arguments, command=command) as server:
        _, errors = server.process.communicate(timeout=60)
    assert server.process.returncode == 2
    (line,) = errors.strip().splitlines()
    return line


def test_wrong_secret_is_one_line(core, tmp_path):
    other = tmp_path / "secret"
    other.write_text("another secret, as long")
    line = refusal("--listen", "127.0.0.1:0", "--core", core.address, "--secret-file", str(other))
    expected = f"the core at {core.address} refused: the secret is not the core's; check --secret-file"
    assert line == f"tailrace: {expected}"


@pytest.mark.parametrize(
    ("command", "arguments", "problem"),
    [
        ("serve", ["--core", "127.0.0.1:1"], "--secret-file: is needed with --core"),
        ("serve", ["--secret-file", "x"], "--secret-file: is of use with --core only"),
        ("serve", ["--core", "somewhere", "--secret-file", "x"], "--core must be HOST:PORT, not 'somewhere'"),
        ("serve", ["--core", "h:1", "--secret-file", "/no/such"], "--secret-file: cannot read /no/such: No such file"),
        ("core", ["null"], "--secret-file: is needed: who knows it may use the core"),
        ("core", ["null", "--secret-file", "/dev/null"], "--secret-file: /dev/null must hold at least 16 bytes"),
        ("core", ["/no/such/model", "--secret-file", "SECRET"], "/no/such/model: no such file or directory"),
        (
            "core",
            ["null", "--secret-file", "SECRET", "--listen", "unix:/x"],
            "--listen must be HOST:PORT, not 'unix:/x'",
        ),
    ],
)
def test_bad_options_are_one_line(command, arguments, problem, secret_file, capsys):
    arguments = [secret_file if argument == "SECRET" else argument for argument in arguments]
    if "--listen" not in arguments:
        arguments += ["--listen", "127.0.0.1:0"]
    assert cli.main([command, *arguments]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("tailrace: ")
    assert problem in line


def test_port_in_use_and_nobody_there_are_one_line_each(core, secret_file):
    line = refusal("null", "--listen", core.address, "--secret-file", secret_file, command="core")
    assert line == f"tailrace: cannot listen on {core.address}; is it in use? choose another --listen"
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(StartupError, match=f"cannot reach a core at {address}: "):
            asyncio.run(AsyncLLM.join([address], SECRET))


def test_files_of_another_model_are_refused(core, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(StartupError, match=f"the core at {core.address} serves another model than the files of"):
        asyncio.run(AsyncLLM.join([core.address], SECRET, str(tmp_path)))


OURS = Challenge(handshake.version(), b"nonce")
READY = CoreReady(100, 100, 16, 1, "", "", 0, 0)
WELCOME = Welcome(b"no proof", build(EngineConfig, model="null"), (), "null")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (handshake.frame(Challenge("0.0.1-abc", b"")), "is of version 0.0.1-abc, this front end of "),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "is not a tailrace core"),
        (b"", "hung up"),
        (encode_frame(READY), "is not a tailrace core"),
        (handshake.frame(OURS) + handshake.frame(WELCOME) + encode_frame(READY), "does not know the secret"),
        (handshake.frame(OURS) + b"\x04\x00\x00\x00abcd", "is not a tailrace core"),
    ],
)
def test_what_is_not_our_core_is_told_apart(words, problem):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            # Who does not like the words may hang up at once.
            with listener.accept()[0] as sock, contextlib.suppress(OSError):
                sock.sendall(words)
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(1 << 10):
                    pass

        thread = threading.Thread(target=answer)
        thread.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(StartupError, match=problem):
            asyncio.run(AsyncLLM.join([address], SECRET))
        thread.join()


def test_peer_that_says_nothing_has_its_time(monkeypatch):
    monkeypatch.setattr(handshake, "HANDSHAKE_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(StartupError, match=f"no core answers at {address}"):
            asyncio.run(AsyncLLM.join([address], SECRET))
