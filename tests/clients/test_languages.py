"""The programs in Go, Node, Java and C++, built and run against a server: what they print, and what is left of them."""

import asyncio
import shutil
import subprocess
from typing import NamedTuple

import pytest

from protos.server_config import ServerOptions
from tailrace_client import AsyncClient
from tests.e2e.serving import ROOT, run, serving, until

# The first test of a language builds its program.
pytestmark = pytest.mark.timeout(600)

CLIENTS = ROOT / "clients"
ENDLESS = 30_000
SLOW = {"null_step_ms": 5}


class Language(NamedTuple):
    tools: tuple[str, ...]
    files: tuple[str, ...] = ()
    """That its packages install."""


LANGUAGES = {
    "go": Language(
        ("make", "go", "protoc", "protoc-gen-go", "protoc-gen-go-grpc"),
        ("/usr/share/gocode/src/google.golang.org/grpc",),
    ),
    "node": Language(("node",), (f"{CLIENTS}/node/node_modules",)),
    "java": Language(
        ("make", "javac", "protoc", "grpc_java_plugin"),
        (
            "/usr/share/java/grpc-netty.jar",
            "/usr/share/java/netty-codec-http2.jar",
            "/usr/share/java/netty-tcnative.jar",
        ),
    ),
    "cpp": Language(("make", "g++", "pkg-config", "protoc", "grpc_cpp_plugin"), ("/usr/include/grpcpp/grpcpp.h",)),
}


@pytest.fixture(scope="module", params=LANGUAGES)
def program(request, tmp_path_factory):
    """The command that runs a language's program."""
    name = request.param
    language = LANGUAGES[name]
    missing = [tool for tool in language.tools if shutil.which(tool) is None]
    missing += [file for file in language.files if not ROOT.joinpath(file).exists()]
    if missing:
        pytest.skip(f"{name}: no {', '.join(missing)}; see clients/{name}/README.md")
    if name == "node":
        return ["node", f"{CLIENTS}/node/chat.js"]
    build = tmp_path_factory.mktemp(name)
    # Quick to build rather than quick.
    command = ["make", "-j2", "-C", f"{CLIENTS}/{name}", f"BUILD={build}", "CXXFLAGS=-O0"]
    made = subprocess.run(command, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    return [f"{build}/chat"]


class Ran(NamedTuple):
    code: int
    out: str
    err: str


async def chat(program, address, *flags, prompt="hello"):
    process = await asyncio.create_subprocess_exec(
        *program, "--address", address, *flags, prompt, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, err = await process.communicate()
    return Ran(process.returncode, out.decode(), err.decode())


async def is_free(llm):
    await until(lambda: llm.num_live == 0 and not llm.output_processor.sequences)


def test_a_chat_is_streamed_as_python_streams_it(program):
    async def main():
        async with serving() as (_, _, channel), AsyncClient(channel.address) as client:
            ran = await chat(program, channel.address, "--max-tokens", "40", "--temperature", "0.7", "--seed", "11")
            messages = [{"role": "user", "content": "hello"}]
            return ran, await client.complete(messages, max_tokens=40, temperature=0.7, seed=11)

    ran, whole = run(main)
    assert ran.code == 0, ran.err
    assert ran.out == whole.text
    assert "FINISH_REASON_MAX_TOKENS, 40 tokens" in ran.err


def test_cancel_frees_the_request(program):
    async def main():
        async with serving(**SLOW) as (llm, _, channel):
            ran = await chat(program, channel.address, "--max-tokens", str(ENDLESS), "--cancel-after", "3")
            await is_free(llm)
            return ran

    ran = run(main)
    assert ran.code == 0, ran.err
    assert "cancelled after 3 deltas" in ran.err
    assert ran.out


def test_a_passed_deadline_is_told_and_frees_the_request(program):
    async def main():
        async with serving(**SLOW) as (llm, _, channel):
            ran = await chat(program, channel.address, "--max-tokens", str(ENDLESS), "--timeout", "1")
            await is_free(llm)
            return ran

    ran = run(main)
    assert ran.code == 1
    assert "DEADLINE_EXCEEDED: " in ran.err


def test_what_the_server_says_of_an_error_is_printed(program):
    async def main():
        async with serving() as (llm, _, channel):
            wrong = await chat(program, channel.address, "--temperature", "200")
            llm.draining = True
            return wrong, await chat(program, channel.address)

    wrong, away = run(main)
    assert wrong.code == away.code == 1
    assert "INVALID_ARGUMENT: sampling.temperature: must be in [0, 100], not 200" in wrong.err
    assert "  reason: INVALID_REQUEST\n" in wrong.err
    assert "  field: sampling.temperature\n" in wrong.err
    assert "retry after" not in wrong.err
    assert "UNAVAILABLE: " in away.err
    assert "  retry after: 1.0 s\n" in away.err


def test_a_server_that_is_not_there_is_unavailable(program):
    async def main():
        return await chat(program, "127.0.0.1:1", "--timeout", "20")

    ran = run(main)
    assert ran.code == 1
    assert "UNAVAILABLE: " in ran.err


def test_a_wrong_flag_is_refused(program):
    async def main():
        return await chat(program, "127.0.0.1:1", "--colour", "red")

    ran = run(main)
    assert ran.code == 2
    assert "colour" in ran.err


@pytest.mark.skipif("tls_cert" not in ServerOptions.__struct_fields__, reason="the server knows no TLS")
def test_mutual_tls(program, tmp_path):
    from tests.certificates import Authority

    authority, stranger = Authority(tmp_path), Authority(tmp_path, "stranger")
    cert, key = map(str, authority.issue("server"))
    own, own_key = map(str, authority.issue("client"))
    mutual = {"tls_cert": cert, "tls_key": key, "tls_client_ca": str(authority.ca)}
    ca, identity = ["--ca", str(authority.ca)], ["--cert", own, "--key", own_key]

    async def main():
        async with serving(server=mutual) as (_, _, channel):
            flags = ["--max-tokens", "9", "--timeout", "20"]
            welcome = await chat(program, channel.address, *flags, *ca, *identity)
            refused = [
                await chat(program, channel.address, *flags, *which)
                for which in (ca, ["--ca", str(stranger.ca), *identity], [])
            ]
            return welcome, refused

    welcome, refused = run(main)
    assert welcome.code == 0, welcome.err
    assert "9 tokens" in welcome.err
    for ran in refused:
        assert ran.code == 1
        assert "UNAVAILABLE: " in ran.err
