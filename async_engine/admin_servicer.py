"""AdminServicer: how the engine does, and what operators make it do."""

from __future__ import annotations

import importlib.metadata
import logging
import time
from typing import TYPE_CHECKING, Any

import msgspec

from async_engine import from_proto
from async_engine.engine_state import engine_state
from async_engine.front_end_report import FrontEndReport, duration, together
from async_engine.kv_events import kv_events_response
from async_engine.recent import percentiles
from protos.errors import BusyError, InvalidRequestError
from protos.front_ends import GetReport, ListLive, LiveRequests, Pause, Report
from protos.tailrace.v1 import admin_pb2 as pb
from protos.tailrace.v1 import admin_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from async_engine.async_llm import AsyncLLM
    from async_engine.profiler import Profiler
    from protos.adapter import Adapter
    from protos.front_ends import Question
    from protos.server_config import ServerOptions

logger = logging.getLogger(__name__)

DEFAULT_PAGE, MAX_PAGE = 100, 10_000
MAX_DRAIN_SECONDS = 1e6
DEFAULT_PROFILE_SECONDS = 5.0


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """`tailrace.v1.AdminService` over an AsyncLLM, and over the server's other front ends, whose answers `ask_others`
    gets. `drain(seconds)` takes the server out of service and returns how many requests it had to cut."""

    def __init__(
        self,
        llm: AsyncLLM,
        options: ServerOptions,
        profiler: Profiler,
        drain: Callable[[float], Awaitable[int]],
        ask_others: Callable[[Question], Awaitable[list[Any]]],
    ) -> None:
        self._llm = llm
        self._options = options
        self._profiler = profiler
        self._drain = drain
        self._ask_others = ask_others
        self._started = time.monotonic()
        self._own = FrontEndReport(llm)

    async def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.GetStatusResponse:
        llm, stats = self._llm, self._llm.stats
        others = msgspec.convert(await self._ask_others(GetReport()), list[Report])
        all_ends = together([self._own.report(), *others])
        return pb.GetStatusResponse(
            state=pb.EngineState.Name(engine_state(llm, self._options.step_timeout)),
            model=llm.model.names[0],
            version=importlib.metadata.version("tailrace"),
            uptime=duration(time.monotonic() - self._started),
            live_requests=all_ends.live_requests,
            running_sequences=stats.running,
            waiting_sequences=stats.waiting,
            queue_wait=duration(stats.queue_seconds),
            kv_usage=stats.kv_usage,
            kv_capacity_tokens=llm.ready.kv_capacity_tokens,
            prompt_tokens=stats.prompt_tokens,
            output_tokens=stats.output_tokens,
            prefix_queries=stats.prefix_queries,
            prefix_hits=stats.prefix_hits,
            preemptions=stats.preemptions,
            steps=stats.steps,
            core_restarts=llm.cores.num_restarts,
            core_silence=duration(llm.cores.silent_seconds),
            finished_requests=all_ends.finished,
            time_to_first_token=_latency(all_ends.time_to_first_token),
            inter_token=_latency(all_ends.inter_token),
            end_to_end=_latency(all_ends.end_to_end),
        )

    async def ListRequests(self, request: pb.ListRequestsRequest, context: Any) -> pb.ListRequestsResponse:
        limit = min(request.page_size or DEFAULT_PAGE, MAX_PAGE)
        others = msgspec.convert(await self._ask_others(ListLive(limit)), list[LiveRequests])
        parts = [self._own.live(limit), *others]
        live = [pb.LiveRequest.FromString(each) for part in parts for each in part.requests]
        if others:
            live.sort(key=lambda each: -each.age.ToNanoseconds())
        return pb.ListRequestsResponse(
            requests=live[:limit], omitted=sum(part.total for part in parts) - len(live[:limit])
        )

    async def Pause(self, request: pb.PauseRequest, context: Any) -> pb.PauseResponse:
        logger.info("paused by an operator%s", ", with what runs" if request.freeze else "")
        await self._llm.pause(freeze=request.freeze)
        await self._ask_others(Pause("freeze" if request.freeze else "pause"))
        return pb.PauseResponse()

    async def Resume(self, request: pb.ResumeRequest, context: Any) -> pb.ResumeResponse:
        logger.info("resumed by an operator")
        await self._llm.resume()
        await self._ask_others(Pause("resume"))
        return pb.ResumeResponse()

    async def ResetPrefixCache(self, request: pb.ResetPrefixCacheRequest, context: Any) -> pb.ResetPrefixCacheResponse:
        if not await self._llm.reset_prefix_cache(request.restart_running):
            raise BusyError("a block of the prefix cache is in use; wait, pause, or set restart_running")
        logger.info("prefix cache reset by an operator")
        return pb.ResetPrefixCacheResponse()

    async def LoadAdapter(self, request: pb.LoadAdapterRequest, context: Any) -> pb.LoadAdapterResponse:
        adapter = await self._llm.load_adapter(request.name, request.path)
        logger.info("adapter %s loaded by an operator from %s", adapter.name, adapter.path)
        return pb.LoadAdapterResponse(adapter=_adapter(adapter, unloading=False))

    async def UnloadAdapter(self, request: pb.UnloadAdapterRequest, context: Any) -> pb.UnloadAdapterResponse:
        await self._llm.cores.adapters.unload(request.name)
        logger.info("adapter %s unloaded by an operator", request.name)
        return pb.UnloadAdapterResponse()

    async def ListAdapters(self, request: pb.ListAdaptersRequest, context: Any) -> pb.ListAdaptersResponse:
        return pb.ListAdaptersResponse(
            adapters=[_adapter(adapter, unloading) for adapter, unloading in self._llm.cores.adapters.all],
            max_adapters=self._llm.ready.max_adapters,
        )

    async def WatchKvEvents(self, request: pb.WatchKvEventsRequest, context: Any) -> None:
        watches = self._llm.cores.kv_watches
        with watches.open("tokens" if request.token_ids else "blocks", with_all=request.snapshot) as watch:
            while True:
                await context.write(kv_events_response(await watch.next(), self._llm.ready.block_size))

    async def Profile(self, request: pb.ProfileRequest, context: Any) -> pb.ProfileResponse:
        limit = from_proto.seconds(request, "duration", "duration")
        files = await self._profiler.record(DEFAULT_PROFILE_SECONDS if limit is None else limit)
        return pb.ProfileResponse(files=[pb.ProfileFile(path=file.path, size_bytes=file.size) for file in files])

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainResponse:
        limit = from_proto.seconds(request, "time_limit", "time_limit")
        if limit is not None and limit > MAX_DRAIN_SECONDS:
            raise InvalidRequestError("time_limit", f"must be at most {MAX_DRAIN_SECONDS:g} s, not {limit:g} s")
        logger.info("draining, asked by an operator")
        return pb.DrainResponse(cut_requests=await self._drain(self._options.drain_timeout if limit is None else limit))


def _adapter(adapter: Adapter, unloading: bool) -> pb.Adapter:
    return pb.Adapter(
        name=adapter.name,
        path=adapter.path,
        digest=adapter.digest,
        rank=adapter.rank,
        size_bytes=adapter.num_bytes,
        unloading=unloading,
    )


def _latency(seconds: Sequence[float]) -> pb.LatencyPercentiles | None:
    found = percentiles(seconds)
    if found is None:
        return None
    p50, p90, p99 = map(duration, found)
    return pb.LatencyPercentiles(p50=p50, p90=p90, p99=p99)
