"""Workers for gateways, and gateways in front of them, as their users run them."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from protos.tailrace.v1 import admin_pb2, admin_pb2_grpc
from tests.e2e.serving import ServerProcess

if TYPE_CHECKING:
    from collections.abc import Iterator

MODEL = "scripted"
"""gateways take the name `null` for none"""
STARTED_WITHIN = 60
"""seconds; only a gateway that never starts takes so long"""
ADMIN = re.compile(r"operators' service on (\S+)")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Worker:
    """A server, of scripted tokens, 2 ms a step, unless told, and its operators' service."""

    def __init__(
        self,
        *arguments: str,
        address: str = "127.0.0.1:0",
        model: tuple[str, ...] = ("null", "--null-step-ms", "2"),
    ) -> None:
        options = (*model, "--served-model-name", MODEL, "--drain-timeout", "0")
        self.server = ServerProcess(*options, "--listen", address, "--admin-listen", "127.0.0.1:0", *arguments)
        self.address = self.server.wait_ready().address
        (admin,) = [match[1] for line in self.server.lines if (match := ADMIN.match(line))]
        self._channel = grpc.insecure_channel(admin)
        self._admin = admin_pb2_grpc.AdminServiceStub(self._channel)

    @property
    def live(self) -> list[admin_pb2.LiveRequest]:
        return list(self._admin.ListRequests(admin_pb2.ListRequestsRequest()).requests)

    @property
    def output_tokens(self) -> int:
        return self._admin.GetStatus(admin_pb2.GetStatusRequest()).output_tokens

    def wait_live(self, count: int) -> None:
        """The test's limit catches a number that never comes."""
        while len(self.live) != count:
            pass

    def kill(self) -> None:
        self._channel.close()
        self.server.process.kill()
        self.server.process.wait()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()
        self.server.__exit__()


def installed(program: str) -> str:
    """Path of a gateway's command; skips the test, and says so, where it cannot be had."""
    found = shutil.which(program, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if found is None:
        pytest.skip(f"{program} is not installed: there is no wheel for this platform")
    return found


class Gateway:
    """A gateway's process, up once a line of its output matches `ready`; an OpenAI HTTP API on `port`."""

    def __init__(self, command: list[str], port: int, ready: str, env: dict[str, str] | None = None) -> None:
        self.port = port
        self._ready = re.compile(ready)
        self._is_up = threading.Event()
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            command,
            env={**os.environ, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._is_up.wait(STARTED_WITHIN) or self.process.poll() is not None:
            self.close()
            raise RuntimeError("".join(self.lines))
        while self._is_deaf():  # it listens a moment before or after it says so
            pass

    def _is_deaf(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port)).close()
        except ConnectionRefusedError:
            return self.process.poll() is None
        return False

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if self._ready.search(line):
                self._is_up.set()
        self._is_up.set()  # it has ended

    def request(self, path: str, **body: Any) -> http.client.HTTPConnection:
        """A request that was sent; whoever closes the connection has left."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("POST", path, json.dumps({"model": MODEL, **body}), {"content-type": "application/json"})
        return connection

    def post(self, path: str, **body: Any) -> tuple[int, Any]:
        """Status and answer, parsed if it is JSON."""
        with contextlib.closing(self.request(path, **body)) as connection:
            response = connection.getresponse()
            text = response.read().decode()
            is_json = response.headers.get("content-type", "").startswith("application/json")
            return response.status, json.loads(text) if is_json else text

    def stream(self, path: str, **body: Any) -> Iterator[Any]:
        """Parsed events; to close the iterator is to leave. Ends at [DONE], and only there."""
        with contextlib.closing(self.request(path, stream=True, **body)) as connection:
            response = connection.getresponse()
            assert response.status == 200, response.read()
            for line in response:
                if line.strip() == b"data: [DONE]":
                    return
                if line.startswith(b"data: "):
                    yield json.loads(line[6:])
        raise AssertionError("the stream ended without [DONE]")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def __enter__(self) -> Gateway:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def chat(content: str = "hi") -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]
