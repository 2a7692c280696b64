"""Authentication: bearer tokens, and the principals they stand for."""

from __future__ import annotations

import contextvars
import hashlib
import secrets
from typing import TYPE_CHECKING, Any

import grpc

from async_engine import from_proto
from async_engine.interceptors import abort
from async_engine.reloaded import Reloaded
from protos.errors import StartupError, UnauthenticatedError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    Handler = grpc.RpcMethodHandler[Any, Any]

HEALTH = "/grpc.health.v1.Health/"
"""Stays open: probes have no tokens."""
MAX_PRINCIPAL = 128
MIN_TOKEN, MAX_TOKEN = 16, 4096

principal: contextvars.ContextVar[str] = contextvars.ContextVar("principal", default="")
"""The caller of all requests of the call that is being handled, "principal NAME"; empty without authentication."""


def caller(context: Any, session_id: str = "", field: str = "scheduling.session_id") -> str:
    """Who takes turns with others for a request of the call being handled: see `from_proto.caller`."""
    return from_proto.caller(session_id, context.peer(), principal.get(), field)


class Tokens:
    """The principals of a file, a line each: `principal:token`. Lines that are empty or begin with # say nothing.

    Tokens are kept and looked up as digests under a key of this process: neither a dump of the table nor the time
    a look-up takes tells one. Raises StartupError if the file is of no use.
    """

    def __init__(self, path: Path) -> None:
        self._key = secrets.token_bytes(32)
        self._principals = Reloaded([path], lambda: self._read(path))

    def principal(self, token: str) -> str | None:
        """Whose token it is, by what the file says now."""
        self._principals.refresh()
        return self._principals.value.get(self._digest(token))

    def _digest(self, token: str) -> bytes:
        return hashlib.blake2b(token.encode(errors="replace"), digest_size=32, key=self._key).digest()

    def _read(self, path: Path) -> dict[bytes, str]:
        try:
            lines = path.read_text("ascii").splitlines()
        except OSError as error:
            raise StartupError(f"{path}: {error.strerror}") from None
        except UnicodeError:
            raise StartupError(f"{path}: principals and tokens are of ASCII characters") from None
        found: dict[bytes, str] = {}
        for number, line in enumerate(map(str.strip, lines), 1):
            if not line or line.startswith("#"):
                continue
            # What a line says stays out of the messages: it may be a token.
            name, colon, token = line.partition(":")
            if not colon or not _is_word(name, 1, MAX_PRINCIPAL):
                raise StartupError(f"{path}: line {number} is not principal:token")
            if not _is_word(token, MIN_TOKEN, MAX_TOKEN):
                raise StartupError(
                    f"{path}: the token in line {number} must have {MIN_TOKEN} to {MAX_TOKEN} printable characters "
                    f"and no spaces; `openssl rand -hex 32` makes one"
                )
            if found.setdefault(self._digest(token), name) != name:
                raise StartupError(f"{path}: the token in line {number} is another principal's, too")
        if not found:
            raise StartupError(f"{path}: no tokens, so that nobody could call")
        return found


def _is_word(text: str, shortest: int, longest: int) -> bool:
    return shortest <= len(text) <= longest and all("!" <= character <= "~" for character in text)


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Calls without a valid token end as UNAUTHENTICATED, before any message of theirs is read; all but health."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        if handler_call_details.method.startswith(HEALTH):
            return await continuation(handler_call_details)
        token = _bearer(handler_call_details.invocation_metadata)
        if token is None:
            return _refuse("no bearer token: the call needs the metadata `authorization: Bearer TOKEN`")
        name = self._tokens.principal(token)
        if name is None:
            return _refuse("the bearer token is not valid here")
        # The handler runs in this task, and so in this context.
        principal.set(f"principal {name}")
        return await continuation(handler_call_details)


def _bearer(metadata: Any) -> str | None:
    for key, value in metadata or ():
        if key == "authorization":
            scheme, _, token = value.partition(" ")
            return token.strip() if scheme.lower() == "bearer" else None
    return None


def _refuse(reason: str) -> Handler:
    async def refuse(_: Any, context: Any) -> None:
        await abort(context, UnauthenticatedError(reason))

    # Of any kind of call: this one reads nothing.
    return grpc.stream_stream_rpc_method_handler(refuse)
