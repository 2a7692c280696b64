"""`vllm.grpc.engine.VllmEngine`: what the smg gateway asks of a worker.

The gateway has the tokenizer: it sends ids, reads text from chunks of ids and the end from `complete` alone. Once it
has a chunk it cancels by Abort, and leaves the stream to end by itself.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.metadata
import io
import json
import time
import zipfile
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_engine.auth import caller
from async_engine.compat.adapter import LENGTH_REASONS, Adapter, abort, grammar, opened, refuse, unless_zero
from async_engine.compat.vllm_kv_events import KvEventStream, hit_rate
from async_engine.engine_state import EngineState, engine_state
from async_engine.from_proto import token_ids
from async_engine.model_servicer import PIECE_BYTES
from async_engine.outputs import Delta, PromptLogprobs, Started, Summary
from async_engine.profiler import MAX_SECONDS, Profiler
from async_engine.request import GenerationRequest
from async_engine.results import Whole
from protos.compat import smg_common_pb2 as common
from protos.compat import vllm_engine_pb2 as pb
from protos.compat import vllm_engine_pb2_grpc
from protos.errors import BusyError, InvalidRequestError, UnsupportedFeatureError, WrongStateError
from protos.messages import FinishReason
from protos.params import SamplingParams

if TYPE_CHECKING:
    import grpc

    from async_engine.async_llm import AsyncLLM
    from async_engine.logprobs import Logprobs
    from async_engine.outputs import SequenceFinish
    from protos.messages import GrammarSpec
    from protos.server_config import ServerOptions


class VllmEngineServicer(vllm_engine_pb2_grpc.VllmEngineServicer):
    """The service over an AsyncLLM."""

    def __init__(self, llm: AsyncLLM, options: ServerOptions, profiler: Profiler) -> None:
        self._llm = llm
        self._options = options
        self._profiler = profiler
        self._started = time.monotonic()

    # Generation -------------------------------------------------------------------------------

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:
        limit = self._llm.ready.max_model_len
        generation = to_request(request, caller(context), context.time_remaining(), limit)
        async with opened(self._llm, generation, request.request_id, whole=not request.stream) as (stream, accepted):
            answer = Answer(accepted.prompt_token_ids)
            whole = Whole()
            async for event in stream:
                match event:
                    case Started():
                        answer.cached_tokens = event.cached_tokens or 0
                    case PromptLogprobs():
                        whole.add(event)
                        answer.prompt_logprobs = whole.prompt_logprobs
                    case Delta() if request.stream:
                        for message in answer.from_delta(event):
                            await context.write(message)
                    case Delta():
                        whole.add(event)
                    case Summary():
                        for delta in whole.sequences():
                            await context.write(answer.complete(delta, with_output=True))

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        await abort(self._llm, request.request_ids)
        return pb.AbortResponse()

    async def FlushCache(self, request: common.FlushCacheRequest, context: Any) -> common.FlushCacheResponse:
        if not await self._llm.reset_prefix_cache(restart_running=False):
            return common.FlushCacheResponse(message="a block of the prefix cache is in use")
        return common.FlushCacheResponse(success=True)

    async def StartProfile(self, request: common.StartProfileRequest, context: Any) -> common.ProfileResponse:
        refuse(request, *(field.name for field in request.DESCRIPTOR.fields))
        try:
            await self._profiler.start()
        except (BusyError, WrongStateError) as error:
            return common.ProfileResponse(message=str(error))
        return common.ProfileResponse(success=True, message=f"it ends by itself after {MAX_SECONDS:g} s")

    async def StopProfile(self, request: common.StopProfileRequest, context: Any) -> common.ProfileResponse:
        try:
            files = await self._profiler.stop()
        except WrongStateError as error:
            return common.ProfileResponse(message=str(error))
        return common.ProfileResponse(success=True, message=", ".join(file.path for file in files))

    # Discovery --------------------------------------------------------------------------------

    async def HealthCheck(self, request: pb.HealthCheckRequest, context: Any) -> pb.HealthCheckResponse:
        state = engine_state(self._llm, self._options.step_timeout)
        return pb.HealthCheckResponse(healthy=state is EngineState.SERVING, message=state.name.lower())

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Any) -> pb.GetModelInfoResponse:
        model, limit = self._llm.model, self._llm.ready.max_model_len
        defaults = {name: getattr(model.defaults, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        is_directory = await asyncio.to_thread(Path(model.path).is_dir)
        return pb.GetModelInfoResponse(
            model_path=model.path,
            is_generation=True,
            max_context_length=limit,
            vocab_size=model.vocab_size,
            served_model_name=model.names[0],
            # Where there is no such directory, nor a model of that name on a hub, gateways ask for GetTokenizer.
            tokenizer_path=model.path if is_directory else str(Path("/", model.path, "tokenizer")),
            eos_token_ids=model.eos_token_ids,
            pad_token_id=model.eos_token_ids[0] if model.eos_token_ids else 0,
            bos_token_id=model.tokenizer.bos_token_id or 0,
            max_req_input_len=limit - 1,
            default_sampling_params_json=json.dumps(defaults),
        )

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Any) -> pb.GetServerInfoResponse:
        core = self._llm.ready
        return pb.GetServerInfoResponse(
            active_requests=self._llm.num_live,
            is_paused=self._llm.paused,
            uptime_seconds=time.monotonic() - self._started,
            server_type="vllm-grpc",
            data_parallel_size=1,
            block_size=core.block_size,
            model_dtype=core.dtype,
            max_num_seqs=core.max_num_seqs,
        )

    async def GetTokenizer(self, request: common.GetTokenizerRequest, context: Any) -> None:
        archive = await asyncio.to_thread(zipped, self._llm.model.tokenizer.files())
        digest = hashlib.sha256(archive).hexdigest()
        for start in range(0, len(archive), PIECE_BYTES):
            is_last = start + PIECE_BYTES >= len(archive)
            piece = archive[start : start + PIECE_BYTES]
            await context.write(common.GetTokenizerChunk(data=piece, sha256=digest if is_last else ""))

    # Load -------------------------------------------------------------------------------------

    async def GetLoads(self, request: pb.GetLoadsRequest, context: Any) -> pb.GetLoadsResponse:
        stats, core = self._llm.stats, self._llm.ready
        load = pb.SchedulerLoad(
            num_running_reqs=stats.running,
            num_waiting_reqs=stats.waiting,
            num_total_reqs=stats.running + stats.waiting,
            num_used_tokens=int(stats.kv_usage * core.kv_capacity_tokens),
            max_total_num_tokens=core.kv_capacity_tokens,
            token_usage=stats.kv_usage,
            cache_hit_rate=hit_rate(self._llm),
            utilization=stats.running / core.max_num_seqs,
            max_running_requests=core.max_num_seqs,
        )
        return pb.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=importlib.metadata.version("tailrace"),
            dp_rank_count=1,
            loads=[load],
        )

    async def SubscribeKvEvents(self, request: common.SubscribeKvEventsRequest, context: Any) -> None:
        await KvEventStream(self._llm, request.start_sequence_number).write(context, self._options.kv_events)


def _add(llm: AsyncLLM, options: ServerOptions, profiler: Profiler, server: grpc.aio.Server) -> None:
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(VllmEngineServicer(llm, options, profiler), server)


ADAPTER = Adapter((pb.DESCRIPTOR.services_by_name["VllmEngine"].full_name,), _add)


def to_request(
    request: pb.GenerateRequest, caller: str, deadline: float | None, max_model_len: int
) -> GenerationRequest:
    """The request a message describes; `deadline` in seconds from now, `max_model_len` in tokens.

    Raises InvalidRequestError, UnsupportedFeatureError for what is not offered."""
    refuse(request, "kv_transfer_params", "kv_transfer_params_json", "mm_inputs", "extra_mm_inputs", "media_refs")
    if request.data_parallel_rank > 0:
        raise UnsupportedFeatureError("data_parallel_rank", "there is one rank here")
    params = _params(request.sampling_params)
    match request.WhichOneof("input"):
        case "tokenized":
            ids, last = request.tokenized.input_ids, params.truncate_prompt_tokens
            prompt: str | list[int] = token_ids("tokenized.input_ids", ids, max_model_len, last)
        case "text":
            prompt = request.text
        case _:
            raise InvalidRequestError("input", "one of tokenized and text is required")
    return GenerationRequest(prompt=prompt, params=params, wants_text=False, caller=caller, deadline=deadline)


def _params(given: pb.SamplingParams) -> SamplingParams:
    def optional(name: str) -> Any:
        return getattr(given, name) if given.HasField(name) else None

    seed = optional("seed")
    return SamplingParams(
        temperature=optional("temperature"),
        top_p=unless_zero(given.top_p),
        top_k=unless_zero(given.top_k),
        min_p=unless_zero(given.min_p),
        frequency_penalty=given.frequency_penalty,
        presence_penalty=given.presence_penalty,
        repetition_penalty=given.repetition_penalty or 1.0,
        logit_bias=dict(given.logit_bias),
        seed=None if seed is None else seed % (1 << 64),
        max_tokens=optional("max_tokens"),
        min_tokens=given.min_tokens,
        stop=tuple(given.stop),
        stop_token_ids=tuple(given.stop_token_ids),
        include_match=given.include_stop_str_in_output,
        ignore_eos=given.ignore_eos,
        skip_special_tokens=given.skip_special_tokens,
        truncate_prompt_tokens=optional("truncate_prompt_tokens"),
        n=given.n or 1,
        grammar=_grammar(given),
        logprobs=optional("logprobs"),
        prompt_logprobs=optional("prompt_logprobs"),
    )


def _grammar(given: pb.SamplingParams) -> GrammarSpec | None:
    kind = given.WhichOneof("constraint")
    match kind:
        case None:
            return None
        case "choice":
            return grammar("choices", json.dumps(list(given.choice.choices)))
    return grammar(kind, getattr(given, kind))


class Answer:
    """What one request's messages are made from."""

    def __init__(self, prompt_token_ids: list[int]) -> None:
        self._prompt_token_ids = prompt_token_ids
        self.cached_tokens = 0
        self.prompt_logprobs: PromptLogprobs | None = None
        """To go with the next message."""

    def from_delta(self, delta: Delta) -> list[pb.GenerateResponse]:
        """A chunk if there are tokens, `complete` at the end. Their tokens go once: some clients would add them up."""
        messages = []
        if delta.token_ids:
            chunk = pb.GenerateStreamChunk(
                token_ids=delta.token_ids,
                prompt_tokens=len(self._prompt_token_ids),
                completion_tokens=len(delta.token_ids),
                cached_tokens=self.cached_tokens,
                index=delta.index,
            )
            self._fill_logprobs(chunk, delta)
            messages.append(pb.GenerateResponse(chunk=chunk))
        if delta.finish is not None:
            messages.append(self.complete(delta, with_output=False))
        return messages

    def complete(self, delta: Delta, *, with_output: bool) -> pb.GenerateResponse:
        finish = delta.finish
        assert finish is not None
        complete = pb.GenerateComplete(
            finish_reason=_finish_reason(finish),
            prompt_tokens=len(self._prompt_token_ids),
            completion_tokens=finish.output_tokens,
            cached_tokens=self.cached_tokens,
            index=delta.index,
        )
        if finish.matched_string is not None:
            complete.matched_stop_str = finish.matched_string
        elif finish.reason is FinishReason.STOP_TOKEN and finish.matched_token_id is not None:
            complete.matched_token_id = finish.matched_token_id
        if with_output:
            complete.output_ids.extend(delta.token_ids)
            self._fill_logprobs(complete, delta)
        return pb.GenerateResponse(complete=complete)

    def _fill_logprobs(self, message: pb.GenerateStreamChunk | pb.GenerateComplete, delta: Delta) -> None:
        if delta.extra is not None and delta.extra.logprobs is not None:
            told = message.output_logprobs
            told.token_logprobs.extend(delta.extra.logprobs.logprobs)
            told.token_ids.extend(delta.token_ids)
            _fill_candidates(told, delta.token_ids, delta.extra.logprobs)
        if self.prompt_logprobs is not None:
            of_prompt, logprobs = message.input_logprobs, self.prompt_logprobs.logprobs
            of_prompt.token_ids.extend(self._prompt_token_ids)
            of_prompt.token_logprobs.add()
            of_prompt.top_logprobs.add()
            for logprob in logprobs.logprobs:
                of_prompt.token_logprobs.add(value=logprob)
            _fill_candidates(of_prompt, self._prompt_token_ids[1:], logprobs)
            self.prompt_logprobs = None


def _fill_candidates(message: pb.OutputLogProbs | pb.InputLogProbs, token_ids: list[int], logprobs: Logprobs) -> None:
    """The token itself is always among its candidates, where clients look for it."""
    for row, token_id in enumerate(token_ids):
        candidates = logprobs.candidates(row)
        candidates.setdefault(token_id, logprobs.logprobs[row])
        message.top_logprobs.add(values=candidates.values(), token_ids=candidates)


def _finish_reason(finish: SequenceFinish) -> str:
    if finish.reason is FinishReason.ABORTED:
        return "abort"
    return "length" if finish.reason in LENGTH_REASONS else "stop"


def zipped(files: dict[str, bytes]) -> bytes:
    """An archive of the files; equal files give equal bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()
