"""Pure functions between the public protobuf messages and our structs."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import msgspec

from async_engine.input_processor import Accepted
from async_engine.outputs import Delta, Progress, Started, Summary
from async_engine.request import ChatPrompt, GenerationRequest
from protos.errors import InvalidRequestError, UnsupportedFeatureError
from protos.params import SamplingParams
from protos.tailrace.v1 import generation_pb2 as pb

if TYPE_CHECKING:
    from google.protobuf.duration_pb2 import Duration

    from async_engine.outputs import Event, SequenceFinish

MAX_ID_LENGTH = 256

# To ours --------------------------------------------------------------------------------------


def to_request(spec: pb.GenerationSpec, deadline: float | None) -> GenerationRequest:
    """The request a spec describes. `deadline` is in seconds from now.

    Raises InvalidRequestError with the path of the field, UnsupportedFeatureError for what is not offered.
    """
    _check_supported(spec)
    check_id(spec.request_id)
    output, scheduling = spec.output, spec.scheduling
    return GenerationRequest(
        prompt=_prompt(spec),
        params=_params(spec),
        model=spec.model,
        resume_token_ids=list(spec.resume_from.ids),
        resume_text_bytes=spec.resume_text_bytes,
        wants_text=output.text if output.HasField("text") else True,
        priority=scheduling.priority,
        cache_salt=scheduling.cache_salt,
        bypass_cache=scheduling.bypass_cache,
        deadline=deadline,
        queue_timeout=_seconds(scheduling, "queue_timeout", "scheduling.queue_timeout"),
    )


def check_id(request_id: str) -> None:
    """Raises InvalidRequestError unless the id is short and printable: it goes into logs and metadata."""
    if len(request_id) > MAX_ID_LENGTH or not all("!" <= character <= "~" for character in request_id):
        raise InvalidRequestError("request_id", f"must be at most {MAX_ID_LENGTH} printable ASCII characters")


def wants_token_ids(spec: pb.GenerationSpec) -> bool:
    return spec.output.token_ids if spec.output.HasField("token_ids") else True


def coalesce(spec: pb.GenerationSpec) -> int:
    """Tokens to gather into each delta after the first."""
    return max(1, spec.output.coalesce_tokens)


def progress_interval(spec: pb.GenerationSpec) -> float | None:
    """Seconds, or None for no progress messages."""
    interval = _seconds(spec.output, "progress_interval", "output.progress_interval")
    if interval is not None and interval < 0.05:
        raise InvalidRequestError("output.progress_interval", f"must be at least 0.05 s, not {interval:g} s")
    return interval


def _prompt(spec: pb.GenerationSpec) -> str | list[int] | ChatPrompt:
    match spec.WhichOneof("prompt"):
        case "text":
            return spec.text
        case "token_ids":
            return list(spec.token_ids.ids)
        case "chat":
            return _chat(spec.chat)
    raise InvalidRequestError("prompt", "one of text, token_ids and chat is required")


def _chat(chat: pb.ChatPrompt) -> ChatPrompt:
    if not chat.messages:
        raise InvalidRequestError("chat.messages", "at least one is required")
    messages: list[dict[str, Any]] = []
    for index, message in enumerate(chat.messages):
        if not message.role:
            raise InvalidRequestError(f"chat.messages[{index}].role", "is required")
        messages.append({"role": message.role, "content": message.content})
        if message.name:
            messages[-1]["name"] = message.name
    kwargs: Any = {}
    if chat.template_kwargs_json:
        try:
            kwargs = json.loads(chat.template_kwargs_json)
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError("chat.template_kwargs_json", f"is not JSON: {error}") from None
        if not isinstance(kwargs, dict):
            raise InvalidRequestError("chat.template_kwargs_json", "must be one JSON object")
    add = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True
    return ChatPrompt(messages=messages, template_kwargs=kwargs, add_generation_prompt=add)


def _params(spec: pb.GenerationSpec) -> SamplingParams:
    sampling, stop, output = spec.sampling, spec.stop, spec.output
    return SamplingParams(
        temperature=_optional(sampling, "temperature"),
        top_p=_optional(sampling, "top_p"),
        top_k=_optional(sampling, "top_k"),
        min_p=_optional(sampling, "min_p"),
        seed=_optional(sampling, "seed"),
        max_tokens=_optional(stop, "max_tokens"),
        min_tokens=stop.min_tokens,
        stop=tuple(stop.strings),
        stop_token_ids=tuple(stop.token_ids),
        include_match=stop.include_match,
        ignore_eos=stop.ignore_eos,
        skip_special_tokens=output.skip_special_tokens if output.HasField("skip_special_tokens") else True,
        time_limit=_seconds(stop, "time_limit", "stop.time_limit"),
    )


def _check_supported(spec: pb.GenerationSpec) -> None:
    """Refuses what this server does not offer, rather than ignoring it."""
    sampling, output = spec.sampling, spec.output
    neutral = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
    unsupported = {
        "num_sequences": spec.num_sequences > 1,
        "constraint": spec.constraint.WhichOneof("kind") is not None,
        "sampling.logit_bias": bool(sampling.logit_bias),
        "sampling.allowed_token_ids": sampling.HasField("allowed_token_ids"),
        "output.logprobs": output.HasField("logprobs"),
        "output.prompt_logprobs": output.HasField("prompt_logprobs"),
        "output.logprob_token_ids": output.HasField("logprob_token_ids"),
        "scheduling.data_parallel_rank": spec.scheduling.data_parallel_rank > 0,
    }
    for name, value in neutral.items():
        unsupported[f"sampling.{name}"] = sampling.HasField(name) and getattr(sampling, name) != value
    for field, is_set in unsupported.items():
        if is_set:
            raise UnsupportedFeatureError(field, "is not supported by this server")


def _optional(message: Any, field: str) -> Any:
    return getattr(message, field) if message.HasField(field) else None


def _seconds(message: Any, field: str, path: str) -> float | None:
    if not message.HasField(field):
        return None
    duration: Duration = getattr(message, field)
    seconds = duration.seconds + duration.nanos / 1e9
    if not 0 <= seconds < math.inf:
        raise InvalidRequestError(path, f"must not be negative, not {seconds:g} s")
    return seconds


# From ours ------------------------------------------------------------------------------------


class Answer(msgspec.Struct, frozen=True):
    """What the messages about one request need to know of it."""

    request_id: str
    spec: pb.GenerationSpec
    accepted: Accepted


class StreamWriter:
    """Messages of one stream. Each is valid until the next: plain deltas are all written into the same one."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._wants_token_ids = wants_token_ids(answer.spec)
        self._response = pb.GenerateStreamResponse()
        self._sequence = self._response.delta.sequences.add()

    def message(self, event: Event) -> pb.GenerateStreamResponse:
        if type(event) is not Delta or event.finish is not None:
            return from_event(event, self._answer)
        sequence = self._sequence
        sequence.offset = event.offset
        sequence.text = event.text
        if self._wants_token_ids:
            sequence.token_ids[:] = event.token_ids
        return self._response


def from_event(event: Event, answer: Answer) -> pb.GenerateStreamResponse:
    match event:
        case Delta():
            response = pb.GenerateStreamResponse()
            fill_delta(response.delta, event, answer)
            return response
        case Started():
            return pb.GenerateStreamResponse(started=from_started(event, answer))
        case Progress():
            return pb.GenerateStreamResponse(progress=_from_progress(event))
        case Summary():
            return pb.GenerateStreamResponse(summary=from_summary(event))


def from_started(started: Started, answer: Answer) -> pb.RequestStarted:
    message = pb.RequestStarted(
        request_id=answer.request_id,
        prompt_tokens=len(answer.accepted.prompt_token_ids),
        effective=_effective(answer),
    )
    if started.cached_tokens is not None:
        message.cached_tokens = started.cached_tokens
    return message


def _effective(answer: Answer) -> pb.GenerationSpec:
    """The options in force, without the prompt and what was resumed."""
    spec, accepted = answer.spec, answer.accepted
    params = accepted.params
    stop = pb.StopOptions(
        min_tokens=params.min_tokens,
        strings=params.stop,
        token_ids=params.stop_token_ids,
        include_match=params.include_match,
        ignore_eos=params.ignore_eos,
        max_tokens=accepted.max_tokens,
    )
    if spec.stop.HasField("time_limit"):
        stop.time_limit.CopyFrom(spec.stop.time_limit)
    output = pb.OutputOptions(
        text=accepted.request.wants_text,
        token_ids=wants_token_ids(spec),
        skip_special_tokens=params.skip_special_tokens,
        coalesce_tokens=coalesce(spec),
    )
    for field in ("progress_interval", "initial_credit"):
        if spec.output.HasField(field):
            output.MergeFrom(pb.OutputOptions(**{field: getattr(spec.output, field)}))
    scheduling = pb.SchedulingOptions()
    scheduling.CopyFrom(spec.scheduling)
    return pb.GenerationSpec(
        request_id=answer.request_id,
        model=accepted.model_name,
        sampling=pb.SamplingOptions(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            repetition_penalty=1.0,
            seed=params.seed,
        ),
        stop=stop,
        output=output,
        scheduling=scheduling,
        num_sequences=1,
    )


def from_delta(delta: Delta, answer: Answer) -> pb.OutputDelta:
    message = pb.OutputDelta()
    fill_delta(message, delta, answer)
    return message


def fill_delta(message: pb.OutputDelta, delta: Delta, answer: Answer) -> None:
    """Fills an empty message. In place: nested constructors would copy each level into the next, once per token."""
    sequence = message.sequences.add(offset=delta.offset, text=delta.text)
    if wants_token_ids(answer.spec):
        sequence.token_ids.extend(delta.token_ids)
    if delta.finish is not None:
        sequence.finish.CopyFrom(_from_finish(delta.finish))


def _from_finish(finish: SequenceFinish) -> pb.SequenceFinish:
    message = pb.SequenceFinish(reason=pb.FinishReason.Name(finish.reason), output_tokens=finish.output_tokens)
    if finish.matched_string is not None:
        message.matched_string = finish.matched_string
    elif finish.matched_token_id is not None:
        message.matched_token_id = finish.matched_token_id
    return message


def _from_progress(progress: Progress) -> pb.Progress:
    return pb.Progress(queue_position=progress.queue_position, prefilled_tokens=progress.prefilled_tokens)


def from_summary(summary: Summary) -> pb.RequestSummary:
    message = pb.RequestSummary(
        prompt_tokens=summary.prompt_tokens,
        cached_tokens=summary.cached_tokens,
        output_tokens=summary.output_tokens,
        preemptions=summary.preemptions,
    )
    message.queue_time.FromNanoseconds(int(summary.queue_seconds * 1e9))
    message.prefill_time.FromNanoseconds(int(summary.prefill_seconds * 1e9))
    message.decode_time.FromNanoseconds(int(summary.decode_seconds * 1e9))
    return message
