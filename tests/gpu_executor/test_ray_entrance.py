"""Who may connect to a core whose workers are on other nodes; without a cluster."""

from __future__ import annotations

import secrets
import socket

import pytest
import ray

from gpu_executor import ray_executor
from gpu_executor.ray_executor import SECRET_BYTES, RayWorkers
from protos.config import EngineConfig
from protos.errors import StartupError


def test_connections_are_known_by_their_secrets_and_others_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "wait", lambda runs, **options: ([], runs))
    monkeypatch.setattr(ray_executor, "SECRET_SECONDS", 0.05)
    keys = [secrets.token_bytes(SECRET_BYTES) for _ in range(2)]
    told = [b"", bytes(SECRET_BYTES), keys[1][:-1], keys[1], keys[0]]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        comers = [socket.create_connection(listener.getsockname()) for _ in told]
        for comer, secret in zip(comers, told, strict=True):
            comer.sendall(secret)
        accepted = RayWorkers(EngineConfig(), ())._accept(listener, keys)
        for rank, sock in enumerate(accepted):
            sock.sendall(bytes([rank]))
            sock.close()
    for comer in comers:
        comer.settimeout(30)
    assert [comer.recv(1) for comer in comers] == [b"", b"", b"", b"\1", b"\0"]
    for comer in comers:
        comer.close()


def test_worker_that_ends_before_it_connects_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = RayWorkers(EngineConfig(), ())
    workers._runs = ["first", "second"]
    monkeypatch.setattr(ray, "wait", lambda runs, **options: (runs[1:], runs[:1]))
    monkeypatch.setattr(ray, "get", lambda run, **options: 1)
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(StartupError, match="worker 1 left before"):
        workers._accept(listener, [b"", b""])
