"""AdminServicer: how the engine does, and what operators make it do."""

from __future__ import annotations

import importlib.metadata
import logging
import time
from typing import TYPE_CHECKING, Any

from google.protobuf.duration_pb2 import Duration

from async_engine import from_proto
from async_engine.engine_state import engine_state
from async_engine.recent import Recent, percentiles
from protos.errors import BusyError, InvalidRequestError
from protos.tailrace.v1 import admin_pb2 as pb
from protos.tailrace.v1 import admin_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from async_engine.async_llm import AsyncLLM
    from async_engine.request_state import RequestState
    from protos.config import ServerOptions

logger = logging.getLogger(__name__)

DEFAULT_PAGE, MAX_PAGE = 100, 10_000
MAX_DRAIN_SECONDS = 1e6


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """`tailrace.v1.AdminService` over an AsyncLLM. `drain(seconds)` takes the server out of service and returns how
    many requests it had to cut."""

    def __init__(self, llm: AsyncLLM, options: ServerOptions, drain: Callable[[float], Awaitable[int]]) -> None:
        self._llm = llm
        self._options = options
        self._drain = drain
        self._started = time.monotonic()
        self._recent = Recent()
        llm.on_end.append(self._recent)

    async def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.GetStatusResponse:
        llm, stats, recent = self._llm, self._llm.stats, self._recent
        return pb.GetStatusResponse(
            state=pb.EngineState.Name(engine_state(llm, self._options.step_timeout)),
            model=llm.model.names[0],
            version=importlib.metadata.version("tailrace"),
            uptime=_duration(time.monotonic() - self._started),
            live_requests=llm.num_live,
            running_sequences=stats.running,
            waiting_sequences=stats.waiting,
            queue_wait=_duration(stats.queue_seconds),
            kv_usage=stats.kv_usage,
            kv_capacity_tokens=llm.ready.kv_capacity_tokens,
            prompt_tokens=stats.prompt_tokens,
            output_tokens=stats.output_tokens,
            prefix_queries=stats.prefix_queries,
            prefix_hits=stats.prefix_hits,
            preemptions=stats.preemptions,
            steps=stats.steps,
            core_restarts=llm.cores.num_restarts,
            core_silence=_duration(llm.cores.silent_seconds),
            finished_requests=recent.finished,
            time_to_first_token=_latency(recent.time_to_first_token),
            inter_token=_latency(recent.inter_token),
            end_to_end=_latency(recent.end_to_end),
        )

    async def ListRequests(self, request: pb.ListRequestsRequest, context: Any) -> pb.ListRequestsResponse:
        live = self._llm.live_requests
        shown = live[: min(request.page_size or DEFAULT_PAGE, MAX_PAGE)]
        now = time.monotonic()
        return pb.ListRequestsResponse(
            requests=[_live_request(state, now) for state in shown], omitted=len(live) - len(shown)
        )

    async def Pause(self, request: pb.PauseRequest, context: Any) -> pb.PauseResponse:
        logger.info("paused by an operator%s", ", with what runs" if request.freeze else "")
        await self._llm.pause(freeze=request.freeze)
        return pb.PauseResponse()

    async def Resume(self, request: pb.ResumeRequest, context: Any) -> pb.ResumeResponse:
        logger.info("resumed by an operator")
        await self._llm.resume()
        return pb.ResumeResponse()

    async def ResetPrefixCache(self, request: pb.ResetPrefixCacheRequest, context: Any) -> pb.ResetPrefixCacheResponse:
        if not await self._llm.reset_prefix_cache(request.restart_running):
            raise BusyError("a block of the prefix cache is in use; wait, pause, or set restart_running")
        logger.info("prefix cache reset by an operator")
        return pb.ResetPrefixCacheResponse()

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainResponse:
        limit = from_proto.seconds(request, "time_limit", "time_limit")
        if limit is not None and limit > MAX_DRAIN_SECONDS:
            raise InvalidRequestError("time_limit", f"must be at most {MAX_DRAIN_SECONDS:g} s, not {limit:g} s")
        logger.info("draining, asked by an operator")
        return pb.DrainResponse(cut_requests=await self._drain(self._options.drain_timeout if limit is None else limit))


def _live_request(state: RequestState, now: float) -> pb.LiveRequest:
    if state.first_token_time:
        phase = pb.REQUEST_PHASE_DECODE
    else:
        phase = pb.REQUEST_PHASE_PREFILL if state.started else pb.REQUEST_PHASE_QUEUED
    return pb.LiveRequest(
        request_id=state.request_id,
        caller=state.caller,
        phase=phase,
        age=_duration(now - state.arrival_time),
        prompt_tokens=state.prompt_tokens,
        output_tokens=state.output_tokens,
        sequences=len(state.sequences),
    )


def _latency(seconds: Sequence[float]) -> pb.LatencyPercentiles | None:
    found = percentiles(seconds)
    if found is None:
        return None
    p50, p90, p99 = map(_duration, found)
    return pb.LatencyPercentiles(p50=p50, p90=p90, p99=p99)


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration
