"""enter: the front end's side of the handshake with a core that another process started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from typing import TYPE_CHECKING

from protos import handshake
from protos.errors import InvalidRequestError, StartupError
from protos.handshake import Challenge, HandshakeError, Join
from protos.messages import CoreFailed

if TYPE_CHECKING:
    from pathlib import Path

    from protos.handshake import Welcome

UNACKNOWLEDGED_MS = 20_000
"""After so long without a sign of the other machine a connection to it is lost. We ping every second."""
ABSTRACT = "unix:@"
"""Begins the address of a unix socket that has a name, but no file."""


class CoreUnreachableError(StartupError):
    """Nobody answers there, now."""


def read_secret(path: Path) -> bytes:
    """What a file holds but for white space around it. Raises InvalidRequestError naming the option."""
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise InvalidRequestError("secret_file", f"cannot read {path}: {error.strerror}") from None
    if len(secret) < handshake.MIN_SECRET:
        raise InvalidRequestError("secret_file", f"{path} must hold at least {handshake.MIN_SECRET} bytes")
    return secret


async def enter(address: str, secret: bytes) -> tuple[socket.socket, Welcome]:
    """A connection to the core at HOST:PORT, or `unix:@NAME`, that has let us in and shown that it knows the secret.

    Raises CoreUnreachableError, or StartupError if who answers is not one to talk to; one line.
    """
    sock: socket.socket | None = None
    try:
        async with asyncio.timeout(handshake.HANDSHAKE_SECONDS):
            sock = await _connect(address)
            return sock, await _shake_hands(sock, address, secret)
    except BaseException as error:
        if sock is not None:
            sock.close()
        if isinstance(error, TimeoutError):
            raise CoreUnreachableError(f"no core answers at {address}") from None
        if isinstance(error, EOFError | ConnectionResetError | BrokenPipeError):
            raise CoreUnreachableError(f"who answers at {address} hung up") from None
        if isinstance(error, HandshakeError):
            raise StartupError(f"what answers at {address} is not a tailrace core") from None
        if isinstance(error, OSError):
            raise CoreUnreachableError(f"cannot reach a core at {address}: {error.strerror or error}") from None
        raise


async def _connect(address: str) -> socket.socket:
    loop = asyncio.get_running_loop()
    if address.startswith(ABSTRACT):
        return await _connected(socket.AF_UNIX, "\0" + address.removeprefix(ABSTRACT))
    host, _, port = address.rpartition(":")
    found = await loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    for family, _, _, _, target in found[:-1]:
        with contextlib.suppress(OSError):
            return _resilient(await _connected(family, target))
    return _resilient(await _connected(found[-1][0], found[-1][4]))


async def _connected(family: int, target: object) -> socket.socket:
    sock = socket.socket(family)
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, target)  # type: ignore[arg-type]  # as getaddrinfo says
    except BaseException:
        sock.close()
        raise
    return sock


def _resilient(sock: socket.socket) -> socket.socket:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_MS)
    return sock


async def _shake_hands(sock: socket.socket, address: str, secret: bytes) -> Welcome:
    loop = asyncio.get_running_loop()
    challenge: Challenge = handshake.decode(handshake.challenges, await _frame(sock))
    if challenge.version != handshake.version():
        raise StartupError(
            f"the core at {address} is of version {challenge.version[:40]}, this front end of {handshake.version()}; "
            "they must be the same"
        )
    nonce = handshake.new_nonce()
    await loop.sock_sendall(sock, handshake.frame(Join(nonce, handshake.prove(secret, "front end", challenge, nonce))))
    answer: Welcome | CoreFailed = handshake.decode(handshake.answers, await _frame(sock))
    if isinstance(answer, CoreFailed):
        raise StartupError(f"the core at {address} refused: {answer.message}; check --secret-file")
    if not handshake.is_proven(answer.proof, secret, "core", challenge, nonce):
        raise StartupError(f"what answers at {address} does not know the secret; check --secret-file")
    return answer


async def _frame(sock: socket.socket) -> bytes:
    """The body of the next frame, and not a byte more."""
    length = handshake.frame_length(await _exactly(sock, handshake.HEADER_BYTES))
    return await _exactly(sock, length)


async def _exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        if not (more := await asyncio.get_running_loop().sock_recv(sock, count - len(data))):
            raise EOFError
        data += more
    return data


def abstract_address() -> str:
    """One that nobody has, for a listener on this machine."""
    return f"{ABSTRACT}tailrace-{os.urandom(8).hex()}"


def listen_at(address: str) -> socket.socket:
    """Raises OSError."""
    if address.startswith(ABSTRACT):
        listener = socket.socket(socket.AF_UNIX)
        listener.bind("\0" + address.removeprefix(ABSTRACT))
        listener.listen()
        return listener
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    return socket.create_server((host, int(port)), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
