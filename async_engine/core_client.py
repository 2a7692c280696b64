"""CoreClient: exchanges messages with a core, and notices its death."""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import time
from collections import deque
from typing import TYPE_CHECKING, cast

from async_engine.core_entrance import enter
from async_engine.core_process import CoreProcess, Door, explain_exit
from protos import codec
from protos.errors import CoreDiedError, StartupError, TailraceError
from protos.messages import (
    Adapters,
    Control,
    ControlOp,
    ControlReply,
    CoreFailed,
    CoreReady,
    EngineCoreOutputs,
    Hello,
    LoadAdapter,
    LoadProgress,
    Ping,
    Pong,
    Shutdown,
    ToCore,
    ToFrontEnd,
    UnloadAdapter,
)

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from protos.adapter import Adapter
    from protos.config import EngineConfig
    from protos.handshake import Welcome

logger = logging.getLogger(__name__)

PING_INTERVAL = 1.0
"""Seconds between two questions to the main loop of the core."""
SHUTDOWN_SECONDS = 5.0
NO_ADAPTERS = Adapters()
MAX_QUEUED_OUTPUTS = 8
"""Messages read ahead of the output processor. What it cannot take in stays in the core, which then waits."""


class CoreClient(asyncio.Protocol):
    """A connection to a core and its health: one that we started, and which ends with us, or one that lets us in.

    After `start` or `join`, `outputs` waits for what the core produced; it raises CoreDiedError once the core, or the
    connection to it, is gone.
    """

    def __init__(self, on_progress: Callable[[int, int], None] | None = None, hang_timeout: float = math.inf) -> None:
        self._on_progress = on_progress
        self._hang_timeout = hang_timeout
        self._decoder = codec.FrameDecoder(codec.to_front_end)
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[CoreReady] = self._loop.create_future()
        self._outputs: deque[EngineCoreOutputs] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._calls: dict[int, asyncio.Future[ControlReply]] = {}
        self._num_calls = 0
        self._death: TailraceError | None = None
        self._closing = False
        self._disconnected = False
        self._hung = False
        self.was_killed = False
        """Whether it ended by a SIGKILL that was not ours, or might have."""
        self._last_heard = time.monotonic()
        self._pinger: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport
        self._process: CoreProcess | None = None
        """Of a core that we started."""
        self._name = "the core"
        self.ready: CoreReady
        self.adapters = Adapters()
        """What the core told last that it holds beside the model; it is there with `ready`."""
        self.welcome: Welcome
        """What a core that we joined serves."""

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        eos_token_ids: tuple[int, ...],
        process: CoreProcess,
        on_progress: Callable[[int, int], None] | None = None,
        hang_timeout: float = math.inf,
        door: Door | None = None,
        adapters: Adapters = NO_ADAPTERS,
    ) -> CoreClient:
        """Tells a process what to hold, and waits until it can serve. From now on the process is the client's.

        `on_progress(done, total)` tells bytes of weights. A core that then is silent for `hang_timeout` seconds is
        killed. Others reach it at `door`. Raises StartupError with the core's root cause.
        """
        self = cls(on_progress, hang_timeout)
        self._process = process
        hello = Hello(config, eos_token_ids, adapters=adapters)
        if door is not None:
            hello = Hello(config, eos_token_ids, door.secret, door.model_digest, adapters)
        await self._connect(process.take_socket(), hello)
        return self

    @classmethod
    async def join(
        cls,
        address: str,
        secret: bytes,
        on_progress: Callable[[int, int], None] | None = None,
        hang_timeout: float = math.inf,
    ) -> CoreClient:
        """Connects to a core that somebody else started, and waits until it can serve.

        The connection to a core that then is silent for `hang_timeout` seconds is given up. Raises
        CoreUnreachableError, or another StartupError.
        """
        self = cls(on_progress, hang_timeout)
        self._name = f"the core at {address}"
        sock, self.welcome = await enter(address, secret)
        self.was_killed = True
        await self._connect(sock)
        return self

    async def _connect(self, sock: socket.socket, *first: ToCore) -> None:
        try:
            await self._loop.create_connection(lambda: self, sock=sock)
            for message in first:
                self.send(message)
            self.ready = await self._ready
        except BaseException:
            await self.close(grace=0)
            raise
        self._ping()

    @property
    def pid(self) -> int:
        assert self._process is not None, "others' processes are not known"
        return self._process.pid

    @property
    def entering(self) -> list[int] | None:
        """Handles of the requests that were new to the batch in the steps a dead core was at; asked before `close`.
        None: nobody knows."""
        return None if self._process is None else self._process.entering

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
        return (await self._ask(lambda call_id: Control(call_id, op, argument))).result

    async def stop_profile(self) -> dict[str, bytes]:
        """Likewise; the files of what the core recorded for us, by their names."""
        return (await self._ask(lambda call_id: Control(call_id, "stop_profile"))).files

    async def load_adapter(self, adapter: Adapter) -> ControlReply:
        """Likewise; the reply has [0] if it is there already, and the reason if it cannot be loaded."""
        return await self._ask(lambda call_id: LoadAdapter(call_id, adapter))

    async def unload_adapter(self, name: str) -> None:
        """Returns when the last request for it is over and it is gone, be it that it never was there."""
        await self._ask(lambda call_id: UnloadAdapter(call_id, name))

    async def _ask(self, question: Callable[[int], ToCore]) -> ControlReply:
        if self._death is not None:
            raise self._death
        self._num_calls += 1
        call_id = self._num_calls
        reply: asyncio.Future[ControlReply] = self._loop.create_future()
        self._calls[call_id] = reply
        try:
            self.send(question(call_id))
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
        """Leaves the core. One of ours is asked to leave, then made to: it is gone on return. Idempotent."""
        self._closing = True
        if self._pinger is not None:
            self._pinger.cancel()
        if self._process is not None:
            if self._process.is_running and grace > 0:
                self.send(Shutdown())
                await asyncio.to_thread(self._process.wait, grace)
            await asyncio.to_thread(self._process.reap)
        if hasattr(self, "_transport"):
            self._transport.close()
        self._answer_no_more(CoreDiedError(f"the connection to {self._name} was closed"))

    # asyncio.Protocol -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one by its methods only

    def data_received(self, data: bytes) -> None:
        self._last_heard = time.monotonic()
        try:
            for message in self._decoder.feed(data):
                self._received(message)
        except codec.FrameError as error:
            self._died(CoreDiedError(f"{self._name} sent something unreadable: {error}"))
            self._cut_off()

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
                self.was_killed = message.was_killed
                self._died(StartupError(message.message) if not self._ready.done() else CoreDiedError(message.message))
            case Adapters():
                self.adapters = message
            case ControlReply():
                reply = self._calls.get(message.call_id)
                if reply is not None and not reply.done():
                    reply.set_result(message)
            case Pong():
                pass

    def _cut_off(self) -> None:
        if self._process is None:
            self._transport.abort()
        else:
            self._process.kill()

    async def _explain_death(self) -> None:
        """The socket ended: says why."""
        kind = CoreDiedError if self._ready.done() else StartupError
        if self._process is None:
            reason = "it was silent for too long" if self._hung else "it hung up"
            self._died(kind(f"the connection to {self._name} is lost: {reason}"))
            return
        code = await asyncio.to_thread(self._process.wait)
        assert code is not None
        if self._death is None:
            self.was_killed = code == -signal.SIGKILL and not self._hung
        self._died(kind(f"the core process ended by {explain_exit(code)}"))

    def _died(self, error: TailraceError) -> None:
        """The first reason counts; it reaches everyone who waits."""
        if self._death is not None:
            return
        self._death = error
        if not self._ready.done():
            self._ready.set_exception(error)
        self._answer_no_more(error)
        self._wake()

    def _answer_no_more(self, error: TailraceError) -> None:
        for reply in self._calls.values():
            if not reply.done():
                reply.set_exception(error)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _ping(self) -> None:
        if self.silent_seconds > self._hang_timeout:
            logger.error("%s has been silent for %.1f s: it is given up", self._name, self.silent_seconds)
            self._hung = True
            self._cut_off()
            return
        self.send(Ping())
        self._pinger = self._loop.call_later(PING_INTERVAL, self._ping)
