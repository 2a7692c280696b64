"""The server: starts everything, keeps health true, drains and stops in one written-down order."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec
from grpc_channelz.v1 import channelz, channelz_pb2

from async_engine.admin_servicer import AdminServicer
from async_engine.async_llm import AsyncLLM
from async_engine.compat.services import ADAPTERS
from async_engine.core_entrance import abstract_address, listen_at, read_secret
from async_engine.core_process import Door
from async_engine.endpoint import Endpoint, check_address, check_files, split_address
from async_engine.engine_state import EngineState, engine_state
from async_engine.front_ends import FrontEnds
from async_engine.health import HealthServicer
from async_engine.load_report import LoadReportInterceptor
from async_engine.metrics import MergedRegistry, Metrics, MetricsServer, Totals
from async_engine.model_servicer import ModelServicer
from async_engine.own_process import settle
from async_engine.profiler import Profiler
from async_engine.request_log import RequestLog
from async_engine.served_model import digest_model
from async_engine.servicer import GenerationServicer
from protos.errors import InvalidRequestError
from protos.front_ends import Begin, Drain
from protos.server_config import service_names
from protos.tailrace.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    import grpc.aio

    from async_engine.tracing import TraceInterceptor
    from protos.config import ServeConfig
    from protos.front_ends import Question
    from protos.server_config import ServerOptions

logger = logging.getLogger(__name__)

HEALTH_INTERVAL = 0.25
"""Seconds between two looks at the engine's heartbeat."""
SCRAPE_SECONDS = 2.0
"""What other front ends have to tell their metrics in."""
HANDLER_GRACE = 2.0
"""Seconds for handlers to say their last word once their requests are over."""
GENERATION = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name
MODEL = model_pb2.DESCRIPTOR.services_by_name["ModelService"].full_name
OTLP_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""OpenTelemetry's own way to name a collector."""
CHANNELZ = channelz_pb2.DESCRIPTOR.services_by_name["Channelz"].full_name
ADMIN = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name


class Server:
    """The gRPC services around an AsyncLLM: those of callers on one address, those of operators on another. It listens
    before there is one."""

    def __init__(self, options: ServerOptions, shares_port: bool = False) -> None:
        self._llm: AsyncLLM | None = None
        self._shares_port = shares_port
        self.others: FrontEnds | None = None
        """Other front ends, for whom this one speaks."""
        self._options = options
        self._adapters = [ADAPTERS[name] for name in service_names(options.services)]
        public = (GENERATION, MODEL, *(name for adapter in self._adapters for name in adapter.names))
        self._health = HealthServicer((*public, ADMIN))
        self._monitor: asyncio.Task[None] | None = None
        self._metrics_server: MetricsServer | None = None
        self._profiler: Profiler | None = None
        self._load_reports = LoadReportInterceptor() if options.load_reports else None
        self._tracing = _tracing(options)
        observers = [observer for observer in (self._load_reports, self._tracing) if observer is not None]
        self._public = Endpoint("listen", options, self._health, public, observers, shares_port)
        self._admin: Endpoint | None = None
        if options.admin_listen:
            services = (ADMIN, CHANNELZ) if options.channelz else (ADMIN,)
            self._admin = Endpoint("admin_listen", options, self._health, services)
        self._probed = Endpoint("health_listen", options, self._health, ()) if options.health_listen else None

    @property
    def address(self) -> str:
        """Of the callers' services."""
        return self._public.address

    @property
    def admin_address(self) -> str:
        """Of the operators' service; empty if it is not served."""
        return self._admin.address if self._admin else ""

    @property
    def health_address(self) -> str:
        """Of health alone; empty if it has no address of its own."""
        return self._probed.address if self._probed else ""

    @property
    def _endpoints(self) -> list[Endpoint]:
        return [endpoint for endpoint in (self._public, self._admin, self._probed) if endpoint is not None]

    async def listen(self) -> None:
        """Takes calls: health is NOT_SERVING, and other services answer that the model is loading. Raises StartupError
        or InvalidRequestError if an address is no good."""
        for endpoint in self._endpoints:
            endpoint.bind()
        for endpoint in self._endpoints:
            await endpoint.grpc.start()

    async def start(self, llm: AsyncLLM) -> None:
        """Serves what `llm` does, and turns health to SERVING."""
        options = self._options
        self._llm = llm
        llm.keep_text = options.log_prompts
        llm.on_end.append(RequestLog(options.log_prompts))
        for observer in (self._load_reports, self._tracing):
            if observer is not None:
                observer.observe(llm)
        if options.metrics_listen:
            host, metrics_port = split_address("metrics_listen", options.metrics_listen)
            registry = Metrics(llm).registry
            if self._shares_port:
                registry = MergedRegistry(registry, self._scrape_others())
            self._metrics_server = MetricsServer(f"{host}:{metrics_port}", registry)
        self._add_services(llm)
        self._set_health(llm)
        self._monitor = asyncio.create_task(self._watch_health(llm), name="health")

    def _add_services(self, llm: AsyncLLM) -> None:
        profiler = self._profiler = Profiler(llm, self._options.profile_dir)
        public = cast("grpc.aio.Server", self._public.late)
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(GenerationServicer(llm), public)
        model_pb2_grpc.add_ModelServiceServicer_to_server(ModelServicer(llm), public)
        for adapter in self._adapters:
            adapter.add(llm, self._options, profiler, public)
        if self._admin is not None:
            admin = cast("grpc.aio.Server", self._admin.late)
            if self._options.channelz:
                channelz.add_channelz_servicer(admin)
            servicer = AdminServicer(llm, self._options, profiler, self.drain, self._ask_others)
            admin_pb2_grpc.add_AdminServiceServicer_to_server(servicer, admin)
        for endpoint in self._endpoints:
            endpoint.late.is_loading = False

    async def drain(self, seconds: float) -> int:
        """NOT_SERVING; no new requests; live streams get their time. How many were cut."""
        if self._llm is None:
            return 0
        self._llm.draining = True
        self._set_health(self._llm)
        cut, elsewhere = await asyncio.gather(self._llm.drain(seconds), self._ask_others(Drain(seconds)))
        return sum([cut, *elsewhere])

    async def _ask_others(self, question: Question) -> list[Any]:
        return [] if self.others is None else await self.others.ask(question)

    def _scrape_others(self) -> Callable[[], Totals]:
        """For another thread. What does not answer in time is left out."""
        loop = asyncio.get_running_loop()

        def scrape() -> Totals:
            if self.others is None:
                return Totals()
            asking = asyncio.run_coroutine_threadsafe(self.others.scrape(), loop)
            try:
                return asking.result(SCRAPE_SECONDS)
            except TimeoutError:
                asking.cancel()
                return self.others.past

        return scrape

    async def stop(self, drain_seconds: float) -> None:
        """NOT_SERVING; no new requests; live streams get their time; handlers end; the port closes. Idempotent.

        The engine is closed by its owner afterwards.
        """
        await self.drain(drain_seconds)
        if self._monitor is not None:
            self._monitor.cancel()
            await asyncio.wait([self._monitor])
        self._health.close()
        if self._profiler is not None:
            await self._profiler.close()
        if self.others is not None:
            await self.others.close()
        # The handlers of requests that are over have only their last writes left.
        for endpoint in self._endpoints:
            await endpoint.grpc.stop(HANDLER_GRACE)
        if self._metrics_server is not None:
            await asyncio.to_thread(self._metrics_server.close)
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)

    async def _watch_health(self, llm: AsyncLLM) -> None:
        while True:
            await asyncio.sleep(HEALTH_INTERVAL)
            self._set_health(llm)

    def _set_health(self, llm: AsyncLLM) -> None:
        state = engine_state(llm, self._options.step_timeout)
        serving = state is EngineState.SERVING
        if serving is self._health.is_serving:
            return
        if state is EngineState.HUNG:
            logger.error("the core has been silent for %.1f s", llm.cores.silent_seconds)
        self._health.set(serving)


def _tracing(options: ServerOptions) -> TraceInterceptor | None:
    """None unless a collector is named. Raises StartupError if OpenTelemetry is not installed."""
    if not wants_tracing(options):
        return None
    from async_engine.tracing import TraceInterceptor, otlp_provider

    return TraceInterceptor(otlp_provider(options.otlp_endpoint))


def wants_tracing(options: ServerOptions) -> bool:
    return bool(options.otlp_endpoint) or any(map(os.environ.get, OTLP_VARIABLES))


def _for_each(config: ServeConfig) -> ServeConfig:
    """What is for all front ends together, in parts."""
    admission = config.admission
    share = -(-admission.max_queued_tokens // config.scale.frontends)
    return msgspec.structs.replace(config, admission=msgspec.structs.replace(admission, max_queued_tokens=share))


class Cores(NamedTuple):
    """How front ends reach the cores, where others than the first do."""

    addresses: tuple[str, ...] = ()
    secret: bytes = b""
    doors: tuple[Door, ...] = ()
    """Of cores of our own."""


async def find_cores(config: ServeConfig) -> Cores:
    """Raises InvalidRequestError, or StartupError."""
    options = config.scale
    if options.frontends > 1 and config.server.listen.startswith("unix:"):
        raise InvalidRequestError("frontends", "a unix socket is for one; several need HOST:PORT in --listen")
    if options.core:
        for address in options.core:
            split_address("core", address)
        if config.adapters.adapters:
            raise InvalidRequestError("adapters", "is for who starts the core; this one has its own")
        if not options.secret_file:
            raise InvalidRequestError("secret_file", "is needed with --core")
        return Cores(options.core, read_secret(Path(options.secret_file)))
    if options.secret_file:
        raise InvalidRequestError("secret_file", "is of use with --core only")
    if options.frontends == 1:
        return Cores()
    secret, digest = secrets.token_bytes(32), await digest_model(config.model.model)
    addresses = tuple(abstract_address() for _ in range(config.parallel.data_parallel_size))
    return Cores(addresses, secret, tuple(Door(listen_at(address), secret, digest) for address in addresses))


async def _make_engine(config: ServeConfig, cores: Cores, on_progress: Callable[[int, int], None] | None) -> AsyncLLM:
    server = config.server
    common: dict[str, Any] = {
        "served_name": server.served_model_name,
        "admission": config.admission,
        "max_core_restarts": server.max_core_restarts,
        "hang_timeout": server.hang_timeout,
        "on_progress": on_progress,
    }
    if config.scale.core:
        return await AsyncLLM.join(cores.addresses, cores.secret, config.model.model, **common)
    return await AsyncLLM.start(config.engine, doors=cores.doors, **common)


async def serve(
    config: ServeConfig,
    on_progress: Callable[[int, int], None] | None = None,
    on_ready: Callable[[AsyncLLM, Server], None] = lambda llm, server: None,
) -> int:
    """Runs a server until a signal or the engine's death; the exit code.

    SIGTERM or SIGINT drains; a second SIGINT (not SIGTERM: managers repeat it) ends at once. Raises StartupError,
    or InvalidRequestError for an address that is none, before the model loads where that can be known.
    """
    config = _for_each(config)
    check_address("listen", config.server.listen)
    for option in ("metrics_listen", "admin_listen", "health_listen"):
        if address := getattr(config.server, option):
            check_address(option, address)
    check_files(config.server)
    cores = await find_cores(config)
    if wants_tracing(config.server):
        import async_engine.tracing  # noqa: F401  says so if it cannot be had
    signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, signals.put_nowait, signum)
    interrupted = asyncio.create_task(signals.get())
    server = Server(config.server, shares_port=config.scale.frontends > 1)
    try:
        await server.listen()
        starting = asyncio.create_task(_make_engine(config, cores, on_progress))
        await asyncio.wait([starting, interrupted], return_when=asyncio.FIRST_COMPLETED)
        llm = await starting if starting.done() else None
        if llm is None:
            starting.cancel()
            await asyncio.wait([starting])
    except BaseException:
        await server.stop(drain_seconds=0)
        raise
    if llm is None:
        await server.stop(drain_seconds=0)
        return 130
    async with llm:
        try:
            await server.start(llm)
            if config.scale.frontends > 1:
                listening = msgspec.structs.replace(config.server, listen=server.address)
                begin = Begin(msgspec.structs.replace(config, server=listening), cores.addresses, cores.secret)
                server.others = FrontEnds(llm, begin, config.scale.frontends - 1)
                await server.others.start()
        except BaseException:
            await server.stop(drain_seconds=0)
            raise
        settle()
        on_ready(llm, server)
        return await _until_signal(llm, server, config.server.drain_timeout, interrupted, signals)


async def _until_signal(
    llm: AsyncLLM,
    server: Server,
    drain_timeout: float,
    interrupted: asyncio.Task[signal.Signals],
    signals: asyncio.Queue[signal.Signals],
) -> int:
    """Stops the server at the first one, or when the engine has died; the exit code."""
    died = asyncio.create_task(llm.died())
    await asyncio.wait([interrupted, died], return_when=asyncio.FIRST_COMPLETED)
    if died.done():
        logger.error("%s", await died)
        await server.stop(drain_seconds=0)
        return 1
    if llm.num_live:
        logger.info("draining %d requests, at most %g s; Ctrl-C again to stop now", llm.num_live, drain_timeout)
    stopping = asyncio.create_task(server.stop(drain_timeout))
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
