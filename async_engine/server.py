"""The server: starts everything, keeps health true, drains and stops in one written-down order."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from async_engine.async_llm import AsyncLLM
from async_engine.health import HealthServicer
from async_engine.interceptors import ErrorInterceptor
from async_engine.metrics import Metrics, MetricsServer
from async_engine.reflection import add_reflection
from async_engine.request_log import RequestLog
from async_engine.servicer import GenerationServicer
from protos.config import MIB
from protos.errors import StartupError
from protos.tailrace.v1 import generation_pb2, generation_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Callable

    from protos.config import ServeConfig, ServerOptions

logger = logging.getLogger(__name__)

HEALTH_INTERVAL = 0.25
"""Seconds between two looks at the engine's heartbeat."""
HANDLER_GRACE = 2.0
"""Seconds for handlers to say their last word once their requests are over."""
MAX_PENDING_CALLS = 65_536
SERVICES = (generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name,)


def channel_options(options: ServerOptions) -> list[tuple[str, Any]]:
    """grpc ignores keys it does not know without a word; tests hold these against the library's own list."""
    return [
        ("grpc.max_receive_message_length", options.max_message_mib * MIB),
        ("grpc.max_send_message_length", options.max_message_mib * MIB),
        # Clients that ping every 10 s, also while nothing streams, are well-behaved: no GOAWAY for them.
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # A window that grows lets a reader that does not read pile up messages here instead of merging them.
        ("grpc.http2.bdp_probe", 0),
        # Beyond 1,000 calls that wait for their handler grpc resets some at random; admission is ours to decide.
        ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", 2 * MAX_PENDING_CALLS),
        # Two servers on one port by mistake is an error, not load balancing.
        ("grpc.so_reuseport", 0),
    ]


class Server:
    """A gRPC server around an AsyncLLM. `address` is what it listens on, the port resolved."""

    def __init__(self, llm: AsyncLLM, options: ServerOptions) -> None:
        self._llm = llm
        self._options = options
        self._health = HealthServicer(SERVICES)
        self._monitor: asyncio.Task[None] | None = None
        self._metrics_server: MetricsServer | None = None
        self.address = options.listen
        self._grpc = grpc.aio.server(interceptors=[ErrorInterceptor()], options=channel_options(options))
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(GenerationServicer(llm), self._grpc)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        add_reflection(self._grpc, (*SERVICES, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name))

    async def start(self) -> None:
        """Listens and turns health to SERVING. Raises StartupError if the address cannot be had."""
        llm, options = self._llm, self._options
        llm.keep_text = options.log_prompts
        llm.on_end.append(RequestLog(options.log_format == "json", options.log_prompts))
        if options.metrics_listen:
            self._metrics_server = MetricsServer(options.metrics_listen, Metrics(llm).registry)
        try:
            port = self._grpc.add_insecure_port(options.listen)
        except RuntimeError:
            raise StartupError(f"cannot listen on {options.listen}; is it in use? choose another --listen") from None
        if not options.listen.startswith("unix:"):
            self.address = f"{options.listen.rpartition(':')[0]}:{port}"
        await self._grpc.start()
        self._set_health()
        self._monitor = asyncio.create_task(self._watch_health(), name="health")

    async def stop(self, drain_seconds: float) -> None:
        """NOT_SERVING; no new requests; live streams get their time; handlers end; the port closes. Idempotent.

        The engine is closed by its owner afterwards.
        """
        self._llm.draining = True
        self._set_health()
        await self._llm.drain(drain_seconds)
        if self._monitor is not None:
            self._monitor.cancel()
            await asyncio.wait([self._monitor])
        self._health.close()
        # The handlers of requests that are over have only their last writes left.
        await self._grpc.stop(HANDLER_GRACE)
        if self._metrics_server is not None:
            await asyncio.to_thread(self._metrics_server.close)

    async def _watch_health(self) -> None:
        while True:
            await asyncio.sleep(HEALTH_INTERVAL)
            self._set_health()

    def _set_health(self) -> None:
        llm = self._llm
        hung = llm.core.silent_seconds > self._options.step_timeout
        serving = not llm.draining and llm.error is None and not hung
        if serving is self._health.is_serving:
            return
        if hung:
            logger.error("the core has been silent for %.1f s", llm.core.silent_seconds)
        self._health.set(serving)


def quiet_gc() -> None:
    """Takes what is here now out of the collector's sight, and lets it look less often.

    By default it runs every 700 objects, that is every few dozen tokens, and each full run visits everything
    that was ever imported: an eighth of the CPU of a stream.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)


async def serve(
    config: ServeConfig,
    on_progress: Callable[[int, int], None] | None = None,
    on_ready: Callable[[AsyncLLM, Server], None] = lambda llm, server: None,
) -> int:
    """Runs a server until a signal or the engine's death; the exit code.

    SIGTERM or SIGINT drains; a second SIGINT (not SIGTERM: managers repeat it) ends at once.
    """
    signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, signals.put_nowait, signum)
    starting = asyncio.create_task(
        AsyncLLM.start(
            config.engine,
            served_name=config.server.served_model_name,
            max_queued_requests=config.server.max_queued_requests,
            on_progress=on_progress,
        )
    )
    interrupted = asyncio.create_task(signals.get())
    await asyncio.wait([starting, interrupted], return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await asyncio.wait([starting])
        return 130
    async with await starting as llm:
        server = Server(llm, config.server)
        await server.start()
        quiet_gc()
        on_ready(llm, server)
        died = asyncio.create_task(llm.died())
        await asyncio.wait([interrupted, died], return_when=asyncio.FIRST_COMPLETED)
        if died.done():
            logger.error("%s", await died)
            await server.stop(drain_seconds=0)
            return 1
        stopping = asyncio.create_task(server.stop(config.server.drain_timeout))
        while not stopping.done():
            again = asyncio.create_task(signals.get())
            await asyncio.wait([stopping, again], return_when=asyncio.FIRST_COMPLETED)
            if again.cancel() or again.result() is not signal.SIGINT:
                continue
            stopping.cancel()
            await asyncio.wait([stopping])
            await server.stop(drain_seconds=0)
        died.cancel()
    return 0
