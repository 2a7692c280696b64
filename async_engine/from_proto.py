"""Requests: from the public protobuf messages to our structs. Pure functions."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from async_engine.request import ChatPrompt, GenerationRequest
from protos.errors import InvalidRequestError, UnsupportedFeatureError
from protos.messages import GrammarKind, GrammarSpec, Repetition
from protos.params import MAX_SEQUENCES, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from google.protobuf.duration_pb2 import Duration

    from protos.tailrace.v1 import generation_pb2 as pb

MAX_ID_LENGTH = 256
MAX_TEMPLATE_KWARGS = 1 << 20
"""Characters of JSON: parsing holds up every stream."""


def to_request(spec: pb.GenerationSpec, caller: str, deadline: float | None, max_model_len: int) -> GenerationRequest:
    """The request a spec describes. `deadline` is in seconds from now, `max_model_len` in tokens.

    Raises InvalidRequestError with the path of the field, UnsupportedFeatureError for what is not offered.
    """
    if spec.scheduling.data_parallel_rank > 0:
        raise UnsupportedFeatureError("scheduling.data_parallel_rank", "is not supported by this server")
    check_id(spec.request_id)
    progress_interval(spec)
    output, scheduling = spec.output, spec.scheduling
    return GenerationRequest(
        prompt=_prompt(spec, max_model_len),
        params=_params(spec),
        model=spec.model,
        resume_token_ids=token_ids("resume_from", spec.resume_from.ids, max_model_len),
        resume_text_bytes=spec.resume_text_bytes if spec.HasField("resume_text_bytes") else None,
        wants_text=wants_text(spec),
        tool_format=output.tool_format,
        reasoning_format=output.reasoning_format,
        adapter=spec.adapter,
        priority=scheduling.priority,
        cache_salt=scheduling.cache_salt,
        bypass_cache=scheduling.bypass_cache,
        caller=caller,
        deadline=deadline,
        queue_timeout=seconds(scheduling, "queue_timeout", "scheduling.queue_timeout"),
    )


def caller(session_id: str, peer: str, principal: str, field: str = "scheduling.session_id") -> str:
    """Who takes turns with others: the principal, if there is one, else the session, else the connection.

    Raises InvalidRequestError, naming the field, for a session's id that is too long.
    """
    if len(session_id) > MAX_ID_LENGTH:
        raise InvalidRequestError(field, f"must be at most {MAX_ID_LENGTH} characters")
    # The kinds apart: nobody is to pass for a connection that is not his.
    return principal or (f"session {session_id}" if session_id else f"peer {peer}")


def check_id(request_id: str) -> None:
    """Raises InvalidRequestError unless the id is short and printable: it goes into logs and metadata."""
    if len(request_id) > MAX_ID_LENGTH or not all("!" <= character <= "~" for character in request_id):
        raise InvalidRequestError("request_id", f"must be at most {MAX_ID_LENGTH} printable ASCII characters")


def wants_token_ids(spec: pb.GenerationSpec) -> bool:
    return spec.output.token_ids if spec.output.HasField("token_ids") else True


def wants_text(spec: pb.GenerationSpec) -> bool:
    return spec.output.text if spec.output.HasField("text") else True


def wants_logprobs(spec: pb.GenerationSpec) -> bool:
    return spec.output.HasField("logprobs") or bool(spec.output.logprob_token_ids.ids)


def coalesce(spec: pb.GenerationSpec) -> int:
    """Tokens to gather into each delta after the first; 0 gathers all, where nothing of a token is wanted."""
    if not wants_text(spec) and not wants_token_ids(spec) and not wants_logprobs(spec):
        return 0
    return max(1, spec.output.coalesce_tokens)


def num_sequences(spec: pb.GenerationSpec) -> int:
    """Checked here: room is made for so many before anything else is looked at."""
    count = spec.num_sequences if spec.HasField("num_sequences") else 1
    if not 1 <= count <= MAX_SEQUENCES:
        raise InvalidRequestError("num_sequences", f"must be in [1, {MAX_SEQUENCES}], not {count}")
    return count


def progress_interval(spec: pb.GenerationSpec) -> float | None:
    """Seconds, or None for no progress messages."""
    interval = seconds(spec.output, "progress_interval", "output.progress_interval")
    if interval is not None and interval < 0.05:
        raise InvalidRequestError("output.progress_interval", f"must be at least 0.05 s, not {interval:g} s")
    return interval


def token_ids(field: str, ids: Sequence[int], max_model_len: int, last: int | None = None) -> list[int]:
    """All of them, or the last. Refused by their number alone where they cannot fit: copying millions of them holds
    up every stream."""
    count = len(ids) if last is None else min(max(1, last), len(ids))
    if count >= max_model_len:
        raise InvalidRequestError(field, f"{count} tokens leave no room in the context of {max_model_len} tokens")
    return list(ids[-count:]) if count else []


def _prompt(spec: pb.GenerationSpec, max_model_len: int) -> str | list[int] | ChatPrompt:
    match spec.WhichOneof("prompt"):
        case "text":
            return spec.text
        case "token_ids":
            return token_ids("token_ids", spec.token_ids.ids, max_model_len, _optional(spec, "truncate_prompt_tokens"))
        case "chat":
            return to_chat(spec.chat)
    raise InvalidRequestError("prompt", "one of text, token_ids and chat is required")


def to_chat(chat: pb.ChatPrompt) -> ChatPrompt:
    """Raises InvalidRequestError with the path of the field."""
    if not chat.messages:
        raise InvalidRequestError("chat.messages", "at least one is required")
    messages: list[dict[str, Any]] = []
    for index, message in enumerate(chat.messages):
        if not message.role:
            raise InvalidRequestError(f"chat.messages[{index}].role", "is required")
        messages.append(_chat_message(message, f"chat.messages[{index}]"))
    kwargs: Any = {}
    if chat.template_kwargs_json:
        kwargs = _json("chat.template_kwargs_json", chat.template_kwargs_json)
        if not isinstance(kwargs, dict):
            raise InvalidRequestError("chat.template_kwargs_json", "must be one JSON object")
    add = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True
    return ChatPrompt(messages=messages, template_kwargs=kwargs, add_generation_prompt=add)


def _chat_message(message: pb.ChatMessage, path: str) -> dict[str, Any]:
    """As templates know it: the form of the OpenAI chat API, arguments parsed."""
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name:
        turn["name"] = message.name
    if message.reasoning:
        turn["reasoning_content"] = message.reasoning
    if message.tool_call_id:
        turn["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": _json(f"{path}.tool_calls[{index}].arguments_json", call.arguments_json or "{}"),
                },
            }
            for index, call in enumerate(message.tool_calls)
        ]
    return turn


def _json(field: str, text: str) -> Any:
    if len(text) > MAX_TEMPLATE_KWARGS:
        raise InvalidRequestError(field, f"must be at most {MAX_TEMPLATE_KWARGS} characters, not {len(text)}")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(field, f"is not JSON: {error}") from None


def _params(spec: pb.GenerationSpec) -> SamplingParams:
    sampling, stop, output = spec.sampling, spec.stop, spec.output
    return SamplingParams(
        temperature=_optional(sampling, "temperature"),
        top_p=_optional(sampling, "top_p"),
        top_k=_optional(sampling, "top_k"),
        min_p=_optional(sampling, "min_p"),
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0,
        logit_bias=dict(sampling.logit_bias),
        allowed_token_ids=tuple(sampling.allowed_token_ids.ids) if sampling.HasField("allowed_token_ids") else None,
        bad_words=tuple(sampling.bad_words),
        bad_token_sequences=tuple(tuple(sequence.ids) for sequence in sampling.bad_token_sequences),
        seed=_optional(sampling, "seed"),
        max_tokens=_optional(stop, "max_tokens"),
        min_tokens=stop.min_tokens,
        stop=tuple(stop.strings),
        stop_token_ids=tuple(stop.token_ids),
        include_match=stop.include_match,
        ignore_eos=stop.ignore_eos,
        skip_special_tokens=output.skip_special_tokens if output.HasField("skip_special_tokens") else True,
        time_limit=seconds(stop, "time_limit", "stop.time_limit"),
        truncate_prompt_tokens=_optional(spec, "truncate_prompt_tokens"),
        n=num_sequences(spec),
        repetition=_repetition(stop.repetition) if stop.HasField("repetition") else None,
        grammar=_grammar(spec.constraint),
        logprobs=_optional(output, "logprobs"),
        prompt_logprobs=_optional(output, "prompt_logprobs"),
        logprob_token_ids=tuple(output.logprob_token_ids.ids),
        processed_logprobs=output.processed_logprobs,
    )


def _repetition(stop: pb.RepetitionStop) -> Repetition:
    low = stop.min_pattern_tokens if stop.HasField("min_pattern_tokens") else 1
    return Repetition(low, stop.max_pattern_tokens, stop.count)


def _grammar(constraint: pb.Constraint) -> GrammarSpec | None:
    kind: GrammarKind | None = constraint.WhichOneof("kind")
    match kind:
        case None:
            return None
        case "json_object":
            return GrammarSpec(kind) if constraint.json_object else None
        case "choices":
            return GrammarSpec(kind, json.dumps(list(constraint.choices.values)))
    return GrammarSpec(kind, getattr(constraint, kind))


def _optional(message: Any, field: str) -> Any:
    return getattr(message, field) if message.HasField(field) else None


def seconds(message: Any, field: str, path: str) -> float | None:
    """Of a duration, or None where it is unset. Raises InvalidRequestError if it is negative."""
    if not message.HasField(field):
        return None
    duration: Duration = getattr(message, field)
    length = duration.seconds + duration.nanos / 1e9
    if not 0 <= length < math.inf:
        raise InvalidRequestError(path, f"must not be negative, not {length:g} s")
    return length
