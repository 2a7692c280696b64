"""GenerationServicer: the RPC methods. Protobuf in, deltas out, no logic of their own."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from async_engine import convert
from async_engine.attach import AttachCall
from async_engine.outputs import Delta, Started, Summary
from async_engine.stream import RequestStream
from protos.tailrace.v1 import generation_pb2 as pb
from protos.tailrace.v1 import generation_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from async_engine.async_llm import AsyncLLM

REQUEST_ID_METADATA = "x-request-id"


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """`tailrace.v1.GenerationService` over an AsyncLLM."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm

    async def GenerateStream(self, request: pb.GenerateStreamRequest, context: Any) -> None:
        async with self._open(request.spec, context) as (stream, answer):
            writer = convert.StreamWriter(answer)
            while not stream.ended:
                event = stream.take()
                if event is None:
                    await stream.ready()
                else:
                    await context.write(writer.message(event))

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> pb.GenerateResponse:
        response = pb.GenerateResponse()
        async with self._open(request.spec, context) as (stream, answer):
            deltas: list[Delta] = []
            async for event in stream:
                match event:
                    case Started():
                        response.started.CopyFrom(convert.from_started(event, answer))
                    case Delta():
                        deltas.append(event)
                    case Summary():
                        response.summary.CopyFrom(convert.from_summary(event))
            response.output.CopyFrom(convert.from_delta(Delta.join(deltas), answer))
        return response

    async def Attach(self, request_iterator: AsyncIterator[pb.AttachRequest], context: Any) -> None:
        await AttachCall(self._llm, context).run(request_iterator)

    async def Cancel(self, request: pb.CancelRequest, context: Any) -> pb.CancelResponse:
        return pb.CancelResponse(cancelled_request_ids=[i for i in request.request_ids if self._llm.cancel(i)])

    @contextlib.asynccontextmanager
    async def _open(self, spec: pb.GenerationSpec, context: Any) -> AsyncIterator[tuple[RequestStream, convert.Answer]]:
        """One request's events, and what turns them into messages; the request is aborted on exit."""
        request = convert.to_request(spec, context.time_remaining())
        stream = RequestStream(len(request.resume_token_ids), convert.coalesce(spec), convert.progress_interval(spec))
        async with self._llm.open(request, stream, spec.request_id) as (state, accepted):
            stream.poll_progress = lambda: self._llm.progress(state)
            await context.send_initial_metadata(((REQUEST_ID_METADATA, state.request_id),))
            yield stream, convert.Answer(state.request_id, spec, accepted)
