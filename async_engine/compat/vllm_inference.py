"""`vllm.Inference` and `vllm.Control`: what vllm-router and dynamo's sidecar ask of a worker.

They cancel by resetting the stream, mean the deadlines they set, and expect greedy outputs where no temperature is set.
"""

from __future__ import annotations

import importlib.metadata
import json
import uuid
from typing import TYPE_CHECKING, Any

from async_engine.auth import caller
from async_engine.compat.adapter import LENGTH_REASONS, Adapter, abort, grammar, opened, refuse, unless_zero
from async_engine.from_proto import token_ids
from async_engine.outputs import Delta, PromptLogprobs
from async_engine.request import GenerationRequest
from async_engine.results import Whole
from protos.compat import vllm_control_pb2 as control
from protos.compat import vllm_control_pb2_grpc, vllm_inference_pb2_grpc
from protos.compat import vllm_inference_pb2 as pb
from protos.errors import InvalidRequestError, UnsupportedFeatureError
from protos.messages import FinishReason
from protos.params import SamplingParams

if TYPE_CHECKING:
    import grpc

    from async_engine.async_llm import AsyncLLM
    from async_engine.input_processor import Accepted
    from async_engine.logprobs import Logprobs
    from async_engine.outputs import SequenceFinish
    from async_engine.profiler import Profiler
    from protos.messages import GrammarSpec
    from protos.server_config import ServerOptions

API_VERSION = "vllm"
"""Clients refuse any other."""


class InferenceServicer(vllm_inference_pb2_grpc.InferenceServicer):
    """`vllm.Inference` over an AsyncLLM."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm

    async def GenerateStream(self, request: pb.GenerateRequest, context: Any) -> None:
        async with opened(self._llm, self._generation(request, context), request.request_id, whole=False) as (
            stream,
            accepted,
        ):
            whole, has_told_prompt = Whole(), False
            async for event in stream:
                match event:
                    case PromptLogprobs():
                        whole.add(event)
                    case Delta():
                        if not has_told_prompt:
                            info = prompt_info(request.response, accepted, whole.prompt_logprobs)
                            await context.write(pb.GenerateResponse(prompt_info=info))
                            has_told_prompt = True
                        await context.write(pb.GenerateResponse(outputs=sequence_output(request.response, event)))

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> pb.GenerateResponse:
        if request.sampling.num_sequences > 1:
            raise UnsupportedFeatureError("sampling.num_sequences", "one answer has room for one; stream")
        async with opened(self._llm, self._generation(request, context), request.request_id, whole=True) as (
            stream,
            accepted,
        ):
            whole = Whole()
            async for event in stream:
                if isinstance(event, Delta | PromptLogprobs):
                    whole.add(event)
            (delta,) = whole.sequences()
            return pb.GenerateResponse(
                prompt_info=prompt_info(request.response, accepted, whole.prompt_logprobs),
                outputs=sequence_output(request.response, delta),
            )

    def _generation(self, request: pb.GenerateRequest, context: Any) -> GenerationRequest:
        # We tell them the path for the model's id.
        model = "" if request.model == self._llm.model.path else request.model
        who, limit = caller(context, request.session_id, "session_id"), self._llm.ready.max_model_len
        return to_request(request, model, who, context.time_remaining(), limit)


class ControlServicer(vllm_control_pb2_grpc.ControlServicer):
    """`vllm.Control` over an AsyncLLM, without what changes an engine."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._instance_id = uuid.uuid4().hex

    async def GetServerInfo(self, request: control.GetServerInfoRequest, context: Any) -> control.ServerInfo:
        core = self._llm.ready
        return control.ServerInfo(
            engine_version=importlib.metadata.version("tailrace"),
            api_version=API_VERSION,
            instance_id=self._instance_id,
            parallelism=control.ParallelismInfo(
                tensor_parallel_size=1,
                pipeline_parallel_size=1,
                data_parallel_size=1,
                decode_context_parallel_size=1,
                world_size=1,
                data_parallel_size_local=1,
            ),
            max_model_len=core.max_model_len,
            kv_block_size=core.block_size,
            total_kv_blocks=core.kv_capacity_tokens // core.block_size,
            max_running_requests=core.max_num_seqs,
            max_loras=core.max_adapters,
        )

    async def GetModelInfo(self, request: control.GetModelInfoRequest, context: Any) -> control.ModelInfo:
        model = self._llm.model
        return control.ModelInfo(
            model_id=model.path,
            served_model_name=model.names[0],
            served_model_aliases=model.names[1:],
            supports_text_input=True,
            supports_token_ids_input=True,
            supports_lora=self._llm.ready.max_adapters > 0,
        )

    async def Abort(self, request: control.AbortRequest, context: Any) -> control.AbortResponse:
        await abort(self._llm, request.request_ids)
        return control.AbortResponse()

    async def ListLoras(self, request: control.ListLorasRequest, context: Any) -> control.ListLorasResponse:
        found = map(self._llm.cores.adapters.find, self._llm.cores.adapters.names)
        return control.ListLorasResponse(
            adapters=[
                # A number that is positive, and the same where the content is.
                control.LoraAdapter(lora_id=int(adapter.digest[:15], 16) + 1, lora_name=adapter.name)
                for adapter in found
                if adapter is not None
            ]
        )

    async def GetKvEventSources(
        self, request: control.GetKvEventSourcesRequest, context: Any
    ) -> control.GetKvEventSourcesResponse:
        return control.GetKvEventSourcesResponse()

    async def IsPaused(self, request: control.IsPausedRequest, context: Any) -> control.IsPausedResponse:
        return control.IsPausedResponse(paused=self._llm.paused)


def _add(llm: AsyncLLM, options: ServerOptions, profiler: Profiler, server: grpc.aio.Server) -> None:
    vllm_inference_pb2_grpc.add_InferenceServicer_to_server(InferenceServicer(llm), server)
    vllm_control_pb2_grpc.add_ControlServicer_to_server(ControlServicer(llm), server)


ADAPTER = Adapter(
    (
        pb.DESCRIPTOR.services_by_name["Inference"].full_name,
        control.DESCRIPTOR.services_by_name["Control"].full_name,
    ),
    _add,
)


def to_request(
    request: pb.GenerateRequest, model: str, caller: str, deadline: float | None, max_model_len: int
) -> GenerationRequest:
    """The request a message describes; `deadline` in seconds from now, `max_model_len` in tokens.

    Raises InvalidRequestError, UnsupportedFeatureError for what is not offered."""
    refuse(request, "media")
    refuse(request.kv, "kv_transfer_params", "ec_transfer_params")
    match request.WhichOneof("prompt"):
        case "text":
            prompt: str | list[int] = request.text
        case "token_ids":
            last = unless_zero(request.truncate_prompt_tokens)
            prompt = token_ids("token_ids", request.token_ids.ids, max_model_len, last)
        case _:
            raise InvalidRequestError("prompt", "one of text and token_ids is required")
    response = request.response
    return GenerationRequest(
        prompt=prompt,
        params=_params(request),
        model=model,
        wants_text=response.output_text if response.HasField("output_text") else True,
        adapter=request.lora_name,
        priority=request.priority,
        cache_salt=request.kv.cache_salt,
        bypass_cache=request.kv.bypass_prefix_cache,
        caller=caller,
        deadline=deadline,
    )


def _params(request: pb.GenerateRequest) -> SamplingParams:
    sampling, decoding, stopping, response = request.sampling, request.decoding, request.stopping, request.response
    logprobs, logprob_token_ids = _candidates(response.output_logprobs, response.output_candidates)
    prompt_logprobs, ids_of_prompt = _candidates(response.prompt_logprobs, response.prompt_candidates)
    if ids_of_prompt:
        raise UnsupportedFeatureError("response.prompt_candidates.token_ids", "is not supported by this server")
    return SamplingParams(
        temperature=request.temperature,  # unset is 0
        top_p=unless_zero(sampling.top_p),
        top_k=unless_zero(sampling.top_k),
        min_p=unless_zero(sampling.min_p),
        seed=sampling.seed % (1 << 64) if sampling.HasField("seed") else None,
        n=sampling.num_sequences or 1,
        presence_penalty=decoding.presence_penalty,
        frequency_penalty=decoding.frequency_penalty,
        repetition_penalty=decoding.repetition_penalty or 1.0,
        logit_bias=dict(decoding.logit_bias),
        allowed_token_ids=tuple(decoding.allowed_token_ids) or None,
        grammar=_grammar(decoding),
        max_tokens=unless_zero(stopping.max_new_tokens),
        min_tokens=stopping.min_new_tokens,
        stop=tuple(stopping.stop_strings),
        stop_token_ids=tuple(stopping.stop_token_ids),
        include_match=stopping.include_stop_strings,
        ignore_eos=stopping.ignore_eos,
        skip_special_tokens=response.skip_special_tokens if response.HasField("skip_special_tokens") else True,
        truncate_prompt_tokens=unless_zero(request.truncate_prompt_tokens),
        logprobs=logprobs,
        logprob_token_ids=logprob_token_ids,
        prompt_logprobs=prompt_logprobs,
    )


def _candidates(wanted: bool, candidates: pb.CandidateTokens) -> tuple[int | None, tuple[int, ...]]:
    """How many to report beside each token, None for not even that, and which ids."""
    if not wanted:
        return None, ()
    match candidates.WhichOneof("select"):
        case "top_n":
            return candidates.top_n, ()
        case "token_ids":
            return 0, tuple(candidates.token_ids.ids)
        case "all" if candidates.all:
            raise UnsupportedFeatureError("response.candidates.all", "is not supported by this server; ask for top_n")
    return 0, ()


def _grammar(decoding: pb.DecodingParameters) -> GrammarSpec | None:
    kind = decoding.WhichOneof("structured_output")
    match kind:
        case None:
            return None
        case "choice":
            return grammar("choices", json.dumps(list(decoding.choice.choices)))
        case "json":
            return grammar("json_schema", decoding.json)
    return grammar(kind, getattr(decoding, kind))


def prompt_info(options: pb.ResponseOptions, accepted: Accepted, told: PromptLogprobs | None) -> pb.PromptInfo:
    prompt = accepted.prompt_token_ids
    info = pb.PromptInfo(num_prompt_tokens=len(prompt))
    if options.prompt_token_ids:
        info.token_ids.extend(prompt)
    if told is not None:
        info.logprobs.append(0.0)
        info.ranks.append(0)
        info.candidate_tokens.add()
        _fill_logprobs(info, prompt[1:], told.logprobs)
    return info


def sequence_output(options: pb.ResponseOptions, delta: Delta) -> pb.SequenceOutput:
    output = pb.SequenceOutput(index=delta.index, text=delta.text, num_tokens=len(delta.token_ids))
    if options.output_token_ids:
        output.token_ids.extend(delta.token_ids)
    if delta.extra is not None and delta.extra.logprobs is not None:
        is_ranked = options.output_candidates.WhichOneof("select") != "token_ids"
        _fill_logprobs(output, delta.token_ids, delta.extra.logprobs, is_ranked)
    if delta.finish is not None:
        output.finish_info.CopyFrom(_finish_info(delta.finish))
    return output


def _fill_logprobs(
    message: pb.PromptInfo | pb.SequenceOutput, token_ids: list[int], logprobs: Logprobs, is_ranked: bool = True
) -> None:
    """The candidates of a token are those beside it: the likeliest, or ids that were asked for, without ranks."""
    message.logprobs.extend(logprobs.logprobs)
    message.ranks.extend(logprobs.ranks)
    for row, token_id in enumerate(token_ids):
        told = message.candidate_tokens.add()
        for place, (candidate, logprob) in enumerate(logprobs.candidates(row).items(), 1):
            if candidate != token_id:
                told.tokens.add(id=candidate, logprob=logprob, rank=place * is_ranked)


def _finish_info(finish: SequenceFinish) -> pb.FinishInfo:
    info = pb.FinishInfo(num_output_tokens=finish.output_tokens, finish_reason=pb.FinishInfo.STOP)
    if finish.reason is FinishReason.ABORTED:
        info.finish_reason = pb.FinishInfo.ABORTED
    elif finish.reason in LENGTH_REASONS:
        info.finish_reason = pb.FinishInfo.LENGTH
    elif finish.matched_string is not None:
        info.stop_string = finish.matched_string
    elif finish.matched_token_id is not None:
        if finish.reason is FinishReason.EOS:
            info.eos_token_id = finish.matched_token_id
        else:
            info.stop_token_id = finish.matched_token_id
    return info
