"""GenerationServicer: the RPC methods. Protobuf in, deltas out, no logic of their own."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from async_engine import from_proto, to_proto
from async_engine.attach import AttachCall
from async_engine.auth import caller, principal
from async_engine.outputs import Delta, PromptLogprobs, Started, Summary
from async_engine.results import Whole
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
        self._plain = to_proto.PlainDelta()

    async def GenerateStream(self, request: pb.GenerateStreamRequest, context: Any) -> None:
        async with self._open(request.spec, context) as (stream, answer):
            writer = to_proto.StreamWriter(answer, self._plain)
            while not stream.ended:
                if stream.is_drained:
                    await stream.ready()
                event = stream.take()
                if event is not None:
                    await context.write(writer.message(event, stream.take_delta))

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> pb.GenerateResponse:
        response = pb.GenerateResponse()
        async with self._open(request.spec, context) as (stream, answer):
            whole = Whole()
            async for event in stream:
                match event:
                    case Started():
                        response.started.CopyFrom(to_proto.from_started(event, answer))
                    case PromptLogprobs() | Delta():
                        whole.add(event)
                    case Summary():
                        response.summary.CopyFrom(to_proto.from_summary(event))
            if (told := whole.prompt_logprobs) is not None:
                to_proto.fill_logprobs(response.started.prompt_logprobs, told.logprobs, told.offset)
            for delta in whole.sequences():
                to_proto.fill_delta(response.output, delta, answer)
        return response

    async def Attach(self, request_iterator: AsyncIterator[pb.AttachRequest], context: Any) -> None:
        await AttachCall(self._llm, context).run(request_iterator)

    async def Cancel(self, request: pb.CancelRequest, context: Any) -> pb.CancelResponse:
        return pb.CancelResponse(
            cancelled_request_ids=[
                i for i in dict.fromkeys(request.request_ids) if await self._llm.cancel_anywhere(i, principal.get())
            ]
        )

    @contextlib.asynccontextmanager
    async def _open(
        self, spec: pb.GenerationSpec, context: Any
    ) -> AsyncIterator[tuple[RequestStream, to_proto.Answer]]:
        """One request's events, and what turns them into messages; the request is aborted on exit."""
        who = caller(context, spec.scheduling.session_id)
        request = from_proto.to_request(spec, who, context.time_remaining(), self._llm.ready.max_model_len)
        stream = RequestStream(
            len(request.resume_token_ids),
            from_proto.coalesce(spec),
            from_proto.progress_interval(spec),
            num_sequences=request.params.n,
        )
        async with self._llm.open(request, stream, spec.request_id) as (state, accepted):
            stream.poll_progress = lambda: self._llm.progress(state)
            await context.send_initial_metadata(((REQUEST_ID_METADATA, state.request_id),))
            yield stream, to_proto.Answer(state.request_id, spec, accepted)
