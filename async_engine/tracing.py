"""Tracing: OpenTelemetry spans, of each call and of each request in it. Imported only where it is wanted."""

from __future__ import annotations

import contextvars
import os
import time
import weakref
from typing import TYPE_CHECKING, Any

import grpc

from async_engine.interceptors import HandlerInterceptor, with_behavior
from protos.errors import StartupError, TailraceError

try:
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError:
    raise StartupError("tracing needs OpenTelemetry: pip install 'tailrace[tracing]'") from None

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span

    from async_engine.async_llm import AsyncLLM
    from async_engine.request_state import RequestState
    from protos.messages import Finished

_call: contextvars.ContextVar[Span | None] = contextvars.ContextVar("call", default=None)
"""The span of the call that is being handled."""
_PROPAGATOR = TraceContextTextMapPropagator()
_HEADERS = ("traceparent", "tracestate")


def otlp_provider(endpoint: str) -> TracerProvider:
    """Sends spans to a collector, from a thread of its own. What OpenTelemetry reads from OTEL_ variables holds;
    an endpoint that is given goes before."""
    name = os.environ.get("OTEL_SERVICE_NAME", "tailrace")
    provider = TracerProvider(resource=Resource.create({SERVICE_NAME: name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint or None)))
    return provider


class TraceInterceptor(HandlerInterceptor):
    """A span per call, below the caller's `traceparent`, and below it one per request, made when that is over from the
    times the engine took anyway: nothing is done per message."""

    def __init__(self, provider: TracerProvider) -> None:
        self._llm: AsyncLLM
        self._provider = provider
        self._tracer = provider.get_tracer("tailrace")
        self._parents: weakref.WeakKeyDictionary[RequestState, tuple[Context, int]] = weakref.WeakKeyDictionary()
        """Of live requests: the context of their call, and when they came, in Unix nanoseconds."""

    def observe(self, llm: AsyncLLM) -> None:
        """From now on calls bring requests."""
        self._llm = llm
        llm.on_begin.append(self._begun)
        llm.on_end.append(self._ended)

    def close(self) -> None:
        """Sends what there is; takes seconds where no collector answers."""
        self._provider.shutdown()

    def wrap(
        self, handler: grpc.RpcMethodHandler[Any, Any], details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[Any, Any]:
        method, metadata = details.method, details.invocation_metadata
        carrier = {key: value for key, value in metadata or () if key in _HEADERS}
        parent = _PROPAGATOR.extract(carrier)

        def around(_: str, behavior: Any) -> Any:
            async def traced(request: Any, context: Any) -> Any:
                span = self._tracer.start_span(method[1:], parent, trace.SpanKind.SERVER, _call_attributes(method))
                _call.set(span)
                code = grpc.StatusCode.CANCELLED
                try:
                    answer = await behavior(request, context)
                    code = grpc.StatusCode.OK
                    return answer
                except TailraceError as error:
                    code = grpc.StatusCode[error.status]
                    span.set_attribute("error.type", error.reason)
                    raise
                except grpc.aio.AbortError:
                    code = grpc.StatusCode.UNKNOWN
                    raise
                except Exception:
                    code = grpc.StatusCode.INTERNAL
                    raise
                finally:
                    span.set_attribute("rpc.grpc.status_code", code.value[0])
                    if code is not grpc.StatusCode.OK:
                        span.set_status(trace.StatusCode.ERROR, code.name)
                    span.end()

            return traced

        return with_behavior(handler, around, handler.request_deserializer)

    def _begun(self, state: RequestState) -> None:
        span = _call.get()
        if span is not None and span.is_recording():
            self._parents[state] = trace.set_span_in_context(span), time.time_ns()

    def _ended(self, state: RequestState, finished: Finished) -> None:
        parent, start = self._parents.pop(state, (None, 0))
        if parent is None:
            return
        span = self._tracer.start_span(
            "request", parent, attributes=self._attributes(state, finished), start_time=start
        )
        # As they followed one another: queued, prefill, decode.
        if state.started:
            admitted = start + round(finished.queue_seconds * 1e9)
            span.add_event("admitted", timestamp=admitted)
            if state.first_token_time:
                span.add_event("first_token", timestamp=admitted + round(finished.prefill_seconds * 1e9))
        if finished.reason.is_failure:
            span.set_status(trace.StatusCode.ERROR, finished.reason.name)
        span.end(start + round((time.monotonic() - state.arrival_time) * 1e9))

    def _attributes(self, state: RequestState, finished: Finished) -> dict[str, str | int | float | list[str]]:
        adapter = {"tailrace.adapter": state.adapter} if state.adapter else {}
        return {
            **adapter,
            "gen_ai.provider.name": "tailrace",
            "gen_ai.request.model": self._llm.model.names[0],
            "gen_ai.response.id": state.request_id,
            "gen_ai.response.finish_reasons": [finished.reason.name.lower()],
            "gen_ai.usage.input_tokens": state.prompt_tokens,
            "gen_ai.usage.output_tokens": state.output_tokens,
            "tailrace.cached_tokens": finished.cached_tokens,
            "tailrace.preemptions": finished.preemptions,
            "tailrace.queue_seconds": finished.queue_seconds,
            "tailrace.prefill_seconds": finished.prefill_seconds,
            "tailrace.decode_seconds": finished.decode_seconds,
        }


def _call_attributes(method: str) -> dict[str, str]:
    service, _, name = method[1:].partition("/")
    return {"rpc.system": "grpc", "rpc.service": service, "rpc.method": name}
