"""A server for end-to-end tests: in this process for speed, or as the command users run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc

import async_engine  # noqa: F401  first, so that grpc is imported as the server imports it
from async_engine.async_llm import AsyncLLM
from async_engine.server import Server
from protos.config import EngineConfig, build
from protos.server_config import AdmissionOptions, ServerOptions
from protos.tailrace.v1 import generation_pb2 as pb
from protos.tailrace.v1 import generation_pb2_grpc

ROOT = Path(__file__).parents[2]
READY = re.compile(r"tailrace (?:core )?ready on ([^ ]+): ")


@contextlib.asynccontextmanager
async def serving(
    *,
    server: dict[str, Any] | None = None,
    admission: dict[str, Any] | None = None,
    credentials: grpc.ChannelCredentials | None = None,
    **engine: Any,
):
    """(AsyncLLM, stub, channel) of a server in this process, with scripted tokens unless a model is named."""
    config = build(EngineConfig, **({"model": "null"} | engine))
    options = ServerOptions(**({"listen": "127.0.0.1:0"} | (server or {})))
    async with await AsyncLLM.start(
        config,
        admission=AdmissionOptions(**(admission or {})),
        max_core_restarts=options.max_core_restarts,
        hang_timeout=options.hang_timeout,
    ) as llm:
        grpc_server = Server(options)
        await grpc_server.listen()
        await grpc_server.start(llm)
        try:
            async with open_channel(grpc_server.address, credentials) as channel:
                channel.address = grpc_server.address
                channel.health_address = grpc_server.health_address
                channel.admin_address = grpc_server.admin_address
                yield llm, generation_pb2_grpc.GenerationServiceStub(channel), channel
        finally:
            await grpc_server.stop(drain_seconds=0)


def open_channel(address: str, credentials: grpc.ChannelCredentials | None = None) -> Any:
    if credentials is None:
        return grpc.aio.insecure_channel(address)
    return grpc.aio.secure_channel(address, credentials)


def run(main) -> Any:
    """Runs an async test with a limit that only a hang reaches."""

    async def limited():
        async with asyncio.timeout(60):
            return await main()

    return asyncio.run(limited())


async def until(condition, *values) -> None:
    """Lets the loop run until a condition holds; the test's limit catches one that never does."""
    while not condition(*values):  # noqa: ASYNC110  there is no one event for every condition
        await asyncio.sleep(0)


def stream_request(text: str = "hi", max_tokens: int = 4, **fields: Any) -> pb.GenerateStreamRequest:
    fields.setdefault("stop", pb.StopOptions(max_tokens=max_tokens))
    return pb.GenerateStreamRequest(spec=pb.GenerationSpec(text=text, **fields))


class ServerProcess:
    """`tailrace serve`, or `core`, as users run it."""

    def __init__(self, *arguments: str, env: dict[str, str] | None = None, command: str = "serve") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "async_engine.cli", command, *arguments],
            cwd=ROOT,
            env={**os.environ, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self.address = ""

    def wait_ready(self) -> ServerProcess:
        """Reads stdout until the ready line. Raises with stderr if the process ends instead."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if match := READY.match(line):
                self.address = match[1]
                return self
        raise RuntimeError(self.process.communicate()[1])

    @property
    def core_pid(self) -> int:
        (pid,) = children(self.process.pid)
        return pid

    def stop(self) -> int:
        """SIGTERM and wait; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=30)
        return self.process.returncode

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate(timeout=30)


def children(pid: int) -> list[int]:
    """Processes whose parent is `pid`."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
