"""CoreClient: starts a core process and exchanges messages with it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from typing import TYPE_CHECKING, cast

import msgspec

from core_proc.black_box import BlackBox, make_box
from core_proc.connection import OWNER
from protos import codec
from protos.child_process import child_environment
from protos.errors import CoreDiedError, StartupError, TailraceError
from protos.messages import (
    Control,
    ControlOp,
    ControlReply,
    CoreFailed,
    CoreReady,
    EngineCoreOutputs,
    Hello,
    LoadProgress,
    Ping,
    Pong,
    Shutdown,
    ToCore,
    ToFrontEnd,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from protos.config import EngineConfig

logger = logging.getLogger(__name__)

PING_INTERVAL = 1.0
"""Seconds between two questions to the main loop of the core."""
SHUTDOWN_SECONDS = 5.0
MAX_QUEUED_OUTPUTS = 8
"""Messages read ahead of the output processor. What it cannot take in stays in the core, which then waits."""


class CoreClient(asyncio.Protocol):
    """One core process, its socket and its health.

    After `start`, `outputs` waits for what the core produced; it raises CoreDiedError once the core is gone.
    """

    def __init__(self, on_progress: Callable[[int, int], None] | None = None, hang_timeout: float = math.inf) -> None:
        self._on_progress = on_progress
        self._hang_timeout = hang_timeout
        self._decoder = codec.FrameDecoder(codec.to_front_end)
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[CoreReady] = self._loop.create_future()
        self._outputs: deque[EngineCoreOutputs] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._calls: dict[int, asyncio.Future[list[int]]] = {}
        self._num_calls = 0
        self._death: TailraceError | None = None
        self._closing = False
        self._disconnected = False
        self._hung = False
        self.was_killed = False
        """Whether it ended by a SIGKILL that was not ours."""
        self._is_closed = False
        self._last_heard = time.monotonic()
        self._pinger: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport
        self._black_box: BlackBox
        self._process: subprocess.Popen[bytes]
        self.ready: CoreReady

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        eos_token_ids: tuple[int, ...],
        on_progress: Callable[[int, int], None] | None = None,
        hang_timeout: float = math.inf,
    ) -> CoreClient:
        """Starts the process and waits until it can serve.

        `on_progress(done, total)` tells bytes of weights. A core that then is silent for `hang_timeout` seconds is
        killed. Raises StartupError with the core's root cause.
        """
        self = cls(on_progress, hang_timeout)
        box = make_box()
        try:
            self._black_box = BlackBox(box)
            self._process, ours = _spawn_core(box)
        finally:
            os.close(box)
        try:
            await self._loop.create_connection(lambda: self, sock=ours)
            self.send(Hello(config, eos_token_ids))
            self.ready = await self._ready
        except BaseException:
            await self.close(grace=0)
            raise
        self._ping()
        return self

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def entering(self) -> list[int]:
        """Handles of the requests that were new to the batch in the steps a dead core was at; asked before `close`."""
        return [handle for client, handle in self._black_box.read() if client == OWNER]

    @property
    def silent_seconds(self) -> float:
        """Since the core was last heard of. Between steps it answers pings: silence is one long step, or a hang."""
        return time.monotonic() - self._last_heard

    @property
    def death(self) -> TailraceError | None:
        return self._death

    def send(self, message: ToCore) -> None:
        """Queues a message; after the core's death, known or not yet, it goes nowhere."""
        if not self._disconnected:
            self._transport.write(codec.encode_frame(message))

    async def call(self, op: ControlOp, argument: int = 0) -> list[int]:
        """Runs a control command between two steps. Raises CoreDiedError if the core ends before it answers."""
        if self._death is not None:
            raise self._death
        self._num_calls += 1
        call_id = self._num_calls
        reply: asyncio.Future[list[int]] = self._loop.create_future()
        self._calls[call_id] = reply
        try:
            self.send(Control(call_id, op, argument))
            return await reply
        finally:
            del self._calls[call_id]

    async def outputs(self) -> EngineCoreOutputs:
        """The next message of outputs. For one reader."""
        while not self._outputs:
            if self._death is not None:
                raise self._death
            self._waiter = self._loop.create_future()
            await self._waiter
        if len(self._outputs) == MAX_QUEUED_OUTPUTS:
            self._transport.resume_reading()
        return self._outputs.popleft()

    async def close(self, grace: float = SHUTDOWN_SECONDS) -> None:
        """Asks the core to leave, then makes it; returns when the process is gone. Idempotent."""
        self._closing = True
        if self._pinger is not None:
            self._pinger.cancel()
        if self._process.poll() is None and grace > 0:
            self.send(Shutdown())
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._process.wait, grace)
        if self._process.poll() is None:
            self._process.kill()
        await asyncio.to_thread(self._process.wait)
        if hasattr(self, "_transport"):
            self._transport.close()
        if not self._is_closed:
            self._is_closed = True
            self._black_box.close()

    # asyncio.Protocol -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one by its methods only

    def data_received(self, data: bytes) -> None:
        self._last_heard = time.monotonic()
        try:
            for message in self._decoder.feed(data):
                self._received(message)
        except codec.FrameError as error:
            self._died(CoreDiedError(f"the core sent something unreadable: {error}"))
            self._process.kill()

    def connection_lost(self, error: Exception | None) -> None:
        self._disconnected = True
        if not self._closing:
            self._loop.create_task(self._explain_death())

    # ------------------------------------------------------------------------------------------

    def _received(self, message: ToFrontEnd) -> None:
        match message:
            case EngineCoreOutputs():
                self._outputs.append(message)
                if len(self._outputs) == MAX_QUEUED_OUTPUTS:
                    self._transport.pause_reading()
                self._wake()
            case LoadProgress():
                if self._on_progress:
                    self._on_progress(message.done, message.total)
            case CoreReady():
                if not self._ready.done():
                    self._ready.set_result(message)
            case CoreFailed():
                self._died(StartupError(message.message) if not self._ready.done() else CoreDiedError(message.message))
            case ControlReply():
                reply = self._calls.get(message.call_id)
                if reply is not None and not reply.done():
                    reply.set_result(message.result)
            case Pong():
                pass

    async def _explain_death(self) -> None:
        """The socket ended: says how the process did."""
        code = await asyncio.to_thread(self._process.wait)
        self.was_killed = code == -signal.SIGKILL and not self._hung
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        kind = CoreDiedError if self._ready.done() else StartupError
        self._died(kind(f"the core process ended by {how}"))

    def _died(self, error: TailraceError) -> None:
        """The first reason counts; it reaches everyone who waits."""
        if self._death is not None:
            return
        self._death = error
        if not self._ready.done():
            self._ready.set_exception(error)
        for reply in self._calls.values():
            if not reply.done():
                reply.set_exception(error)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _ping(self) -> None:
        if self.silent_seconds > self._hang_timeout:
            logger.error("the core has been silent for %.1f s: it is killed", self.silent_seconds)
            self._hung = True
            self._process.kill()
            return
        self.send(Ping())
        self._pinger = self._loop.call_later(PING_INTERVAL, self._ping)


def _spawn_core(box: int) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """The process, and our end of the socket that is its only tie to us."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "core_proc.proc", str(theirs.fileno()), str(box)],
            pass_fds=[theirs.fileno(), box],
            env=child_environment(),
            stdin=subprocess.DEVNULL,
            # A session of its own: what the terminal sends to all of us, Ctrl-C above all, is for the front end.
            start_new_session=True,
        )
    return process, ours


def pinned(config: EngineConfig, ready: CoreReady) -> EngineConfig:
    """The config of a core that holds what this one does: what was accepted for one must fit the next."""
    replace = msgspec.structs.replace
    return replace(
        config,
        model=replace(config.model, max_model_len=ready.max_model_len),
        cache=replace(config.cache, num_kv_blocks=ready.kv_capacity_tokens // ready.block_size + 1),
    )
