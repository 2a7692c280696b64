"""The GenerationSpec of a prompt and its options."""

from __future__ import annotations

import difflib
import json
import uuid
from typing import TYPE_CHECKING, Any, TypedDict

from protos.tailrace.v1 import generation_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]


class ChatOptions(TypedDict, total=False):
    """How a prompt of messages becomes text."""

    template_kwargs: dict[str, Any] | None
    """Variables for the chat template."""
    add_generation_prompt: bool | None


class Options(ChatOptions, total=False):
    """All of a request but its prompt. What is absent or None is the server's default, which
    `stream.started.effective` tells. Times are in seconds."""

    request_id: str | None
    """Unique among live requests; one is made up if absent."""
    model: str | None
    num_sequences: int | None
    resume_from: Sequence[int] | None
    """Output made earlier, which is continued and not sent again."""
    resume_text_bytes: int | None
    truncate_prompt_tokens: int | None
    """Of a longer prompt only so many tokens are kept, the last ones."""
    adapter: str | None
    """Name of a loaded adapter to compute the request with; `list_models` tells which there are."""

    temperature: float | None
    """0 is greedy."""
    top_p: float | None
    top_k: int | None
    min_p: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    seed: int | None
    logit_bias: Mapping[int, float] | None
    allowed_token_ids: Sequence[int] | None
    bad_words: Sequence[str] | None
    """Texts that the output never completes."""
    bad_token_sequences: Sequence[Sequence[int]] | None

    max_tokens: int | None
    min_tokens: int | None
    stop: str | Sequence[str] | None
    """Strings that end the output."""
    stop_token_ids: Sequence[int] | None
    include_match: bool | None
    """Keep the matched stop string or token in the output."""
    ignore_eos: bool | None
    time_limit: float | None
    """Ends the output with what there is; `timeout` in contrast fails the call."""
    repetition: Mapping[str, int] | None
    """{"max_pattern_tokens": 8, "count": 4}: ends an output whose last tokens are such a pattern four times over."""

    json_schema: str | dict[str, Any] | None
    json_object: bool | None
    regex: str | None
    grammar: str | None
    choices: Sequence[str] | None
    structural_tag: str | None

    want_text: bool | None
    want_token_ids: bool | None
    logprobs: int | None
    prompt_logprobs: int | None
    logprob_token_ids: Sequence[int] | None
    processed_logprobs: bool | None
    """Of what tokens are drawn from, rather than of what the model said."""
    tool_format: str | None
    """Takes tool calls out of the text: a format, or "auto" for the model's own."""
    reasoning_format: str | None
    """The same for reasoning."""
    skip_special_tokens: bool | None
    coalesce_tokens: int | None
    """Tokens gathered into each delta after the first."""
    progress_interval: float | None
    """How often `on_progress` is called while nothing else comes."""

    priority: int | None
    """Lower runs first."""
    cache_salt: str | None
    bypass_cache: bool | None
    data_parallel_rank: int | None
    queue_timeout: float | None
    session_id: str | None


_PARTS = {
    "sampling": "temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty seed "
    "logit_bias allowed_token_ids bad_words bad_token_sequences",
    "stop": "max_tokens min_tokens include_match ignore_eos time_limit repetition",
    "constraint": "json_schema json_object regex grammar choices structural_tag",
    "output": "logprobs prompt_logprobs logprob_token_ids processed_logprobs tool_format reasoning_format "
    "skip_special_tokens coalesce_tokens progress_interval",
    "scheduling": "priority cache_salt bypass_cache data_parallel_rank queue_timeout session_id",
    "chat": "add_generation_prompt",
}
PATHS: dict[str, tuple[str, ...]] = {
    **{
        name: (name,)
        for name in (
            "request_id",
            "model",
            "num_sequences",
            "resume_from",
            "resume_text_bytes",
            "truncate_prompt_tokens",
            "adapter",
        )
    },
    **{name: (part, name) for part, names in _PARTS.items() for name in names.split()},
    # Those that are not called like their field.
    "stop": ("stop", "strings"),
    "stop_token_ids": ("stop", "token_ids"),
    "want_text": ("output", "text"),
    "want_token_ids": ("output", "token_ids"),
    "template_kwargs": ("chat", "template_kwargs_json"),
}
"""By option, the path of its field in GenerationSpec."""


def make_spec(prompt: Prompt, options: Mapping[str, Any]) -> pb.GenerationSpec:
    """Raises TypeError for an option that does not exist or has the wrong type, ValueError for one out of range."""
    spec = pb.GenerationSpec()
    _set_prompt(spec, prompt)
    for name, value in options.items():
        if name not in PATHS:
            close = difflib.get_close_matches(name, PATHS, 1)
            raise TypeError(f"unknown option {name!r}" + (f"; did you mean {close[0]!r}?" if close else ""))
        if value is None:
            continue
        *parts, field = PATHS[name]
        if parts == ["chat"] and spec.WhichOneof("prompt") != "chat":
            raise TypeError(f"{name}: only for a prompt of messages")
        message: Any = getattr(spec, parts[0]) if parts else spec
        try:
            _set(message, field, value)
        except (TypeError, ValueError, AttributeError) as error:
            kind = ValueError if isinstance(error, ValueError) else TypeError
            raise kind(f"{name}: {error}") from None
    # Known from the beginning, a request can be cancelled from the beginning.
    spec.request_id = spec.request_id or uuid.uuid4().hex
    return spec


def wants_token_ids(spec: pb.GenerationSpec) -> bool:
    return not spec.output.HasField("token_ids") or spec.output.token_ids


def _set_prompt(spec: pb.GenerationSpec, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        spec.text = prompt
        return
    items: list[Any] = list(prompt)
    if items and not isinstance(items[0], int):
        try:
            spec.chat.messages.extend(pb.ChatMessage(**message) for message in items)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"prompt: messages are dicts with the fields of ChatMessage (role, content, ...): {error}"
            ) from None
    else:
        spec.token_ids.ids.extend(items)


def _set(message: Any, field: str, value: Any) -> None:
    target = getattr(message, field)
    kind = message.DESCRIPTOR.fields_by_name[field].message_type
    if kind is None and not hasattr(target, "extend"):
        setattr(message, field, json.dumps(value) if isinstance(value, dict) else value)
    elif kind is None:
        target.extend([value] if isinstance(value, str) else value)
    elif kind.name == "Duration":
        target.FromNanoseconds(round(value * 1e9))
    elif kind.name == "TokenIds" and message.DESCRIPTOR.fields_by_name[field].is_repeated:
        for ids in value:
            target.add(ids=ids)
    elif isinstance(value, dict) and not kind.GetOptions().map_entry:
        target.MergeFrom(type(target)(**value))
    elif kind.GetOptions().map_entry:
        target.update(value)
    else:
        values = [value] if isinstance(value, str) else value
        (target.ids if kind.name == "TokenIds" else target.values).extend(values)
