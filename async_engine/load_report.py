"""Load reports: what balancers that weigh servers by their load are told with each answer."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from async_engine.interceptors import HandlerInterceptor, with_behavior
from protos.tailrace.v1 import load_report_pb2 as pb

if TYPE_CHECKING:
    import grpc

    from async_engine.async_llm import AsyncLLM
    from async_engine.request_state import RequestState
    from protos.messages import Finished

TRAILER = "endpoint-load-metrics-bin"
REFRESH_SECONDS = 0.1
"""For which a report is good: many calls end at once, and share one."""
WINDOW_SECONDS = 10.0


class Rate:
    """Events per second, each of which counts less and less as it grows old."""

    def __init__(self) -> None:
        self._value = 0.0
        self._at = time.monotonic()

    def add(self) -> None:
        self._value = self.value + 1 / WINDOW_SECONDS
        self._at = time.monotonic()

    @property
    def value(self) -> float:
        return self._value * math.exp((self._at - time.monotonic()) / WINDOW_SECONDS)


class LoadReportInterceptor(HandlerInterceptor):
    """Adds the report to the trailers of every call, however it ends; nothing is computed per message."""

    def __init__(self) -> None:
        self._llm: AsyncLLM | None = None
        self._ended, self._failed = Rate(), Rate()
        self._report = b""
        self._good_until = 0.0

    def observe(self, llm: AsyncLLM) -> None:
        """From now on there is a load to tell."""
        self._llm = llm
        llm.on_end.append(self._observe)

    def wrap(
        self, handler: grpc.RpcMethodHandler[Any, Any], details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[Any, Any]:
        return with_behavior(handler, self._around, handler.request_deserializer)

    def _around(self, _: str, behavior: Any) -> Any:
        async def reporting(request: Any, context: Any) -> Any:
            try:
                return await behavior(request, context)
            finally:
                if self._llm is not None:
                    context.set_trailing_metadata((*context.trailing_metadata(), (TRAILER, self._take(self._llm))))

        return reporting

    def _take(self, llm: AsyncLLM) -> bytes:
        now = time.monotonic()
        if now >= self._good_until:
            self._report = self._make(llm).SerializeToString()
            self._good_until = now + REFRESH_SECONDS
        return self._report

    def _make(self, llm: AsyncLLM) -> pb.LoadReport:
        stats, sequences = llm.stats, llm.ready.max_num_seqs
        return pb.LoadReport(
            mem_utilization=stats.kv_usage,
            rps_fractional=self._ended.value,
            eps=self._failed.value,
            application_utilization=max(stats.kv_usage, (stats.running + stats.waiting) / sequences),
            named_metrics={
                "running": stats.running,
                "waiting": stats.waiting,
                "kv_usage": stats.kv_usage,
                "queue_seconds": stats.queue_seconds,
            },
        )

    def _observe(self, _: RequestState, finished: Finished) -> None:
        self._ended.add()
        if finished.reason.is_failure:
            self._failed.add()
