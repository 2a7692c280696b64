"""Responses: from our structs to the public protobuf messages. Pure functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from async_engine.from_proto import coalesce, wants_token_ids
from async_engine.input_processor import Accepted
from async_engine.outputs import Delta, Progress, PromptLogprobs, Started, Summary
from protos.tailrace.v1 import generation_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable

    from async_engine.logprobs import Logprobs
    from async_engine.outputs import Event, Extra, SequenceFinish


MAX_SHARED_BYTES = 1 << 20
"""Of a message, by estimate, after which no other sequence's delta joins it."""


class Answer(msgspec.Struct, frozen=True):
    """What the messages about one request need to know of it."""

    request_id: str
    spec: pb.GenerationSpec
    accepted: Accepted
    on_attach: bool = False


class PlainDelta:
    """The message of a delta of one sequence's ids and text: one for all streams of a loop, valid until the next, so
    that whoever fills it finds it in the processor's cache."""

    LIFETIME = 256
    """Deltas before another takes its place: a message keeps the memory of all texts that it had."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        self.num_left = self.LIFETIME
        self.response = pb.GenerateStreamResponse()
        self.sequence = self.response.delta.sequences.add()


class StreamWriter:
    """Messages of one stream. Each must be written before the next is made, be it another stream's."""

    def __init__(self, answer: Answer, plain: PlainDelta) -> None:
        self._answer = answer
        self._plain = plain
        self._wants_token_ids = wants_token_ids(answer.spec)
        self._is_several = answer.accepted.params.n > 1

    def message(self, event: Event, take_more: Callable[[], Delta | None]) -> pb.GenerateStreamResponse:
        """`take_more` has the deltas of other sequences, which go into the same message."""
        if type(event) is not Delta or event.finish is not None or event.extra is not None or self._is_several:
            response = from_event(event, self._answer)
            if self._is_several and type(event) is Delta:
                size = event.num_bytes
                while size < MAX_SHARED_BYTES and (delta := take_more()) is not None:
                    fill_delta(response.delta, delta, self._answer)
                    size += delta.num_bytes
            return response
        plain = self._plain
        if not plain.num_left:
            plain.renew()
        plain.num_left -= 1
        sequence = plain.sequence
        sequence.offset = event.offset
        sequence.text = event.text
        sequence.token_ids[:] = event.token_ids if self._wants_token_ids else ()
        return plain.response


def from_event(event: Event, answer: Answer) -> pb.GenerateStreamResponse:
    match event:
        case Delta():
            response = pb.GenerateStreamResponse()
            fill_delta(response.delta, event, answer)
            return response
        case Started():
            return pb.GenerateStreamResponse(started=from_started(event, answer))
        case PromptLogprobs():
            response = pb.GenerateStreamResponse()
            fill_logprobs(response.started.prompt_logprobs, event.logprobs, event.offset)
            return response
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


_FILLED_IN = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
)


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
    if spec.stop.HasField("repetition"):
        stop.repetition.CopyFrom(spec.stop.repetition)
        assert params.repetition is not None
        stop.repetition.min_pattern_tokens = params.repetition.min_size
    output = pb.OutputOptions()
    output.CopyFrom(spec.output)
    output.text = accepted.request.wants_text
    output.token_ids = wants_token_ids(spec)
    output.skip_special_tokens = params.skip_special_tokens
    output.coalesce_tokens = coalesce(spec)
    output.ClearField("progress_interval" if answer.on_attach else "initial_credit")
    sampling = pb.SamplingOptions()
    sampling.CopyFrom(spec.sampling)
    for name in _FILLED_IN:
        setattr(sampling, name, getattr(params, name))
    scheduling = pb.SchedulingOptions()
    scheduling.CopyFrom(spec.scheduling)
    if (timeout := accepted.request.queue_timeout) is not None:
        scheduling.queue_timeout.FromNanoseconds(round(timeout * 1e9))
    return pb.GenerationSpec(
        request_id=answer.request_id,
        model=accepted.model_name,
        sampling=sampling,
        stop=stop,
        constraint=spec.constraint if params.grammar is not None else None,
        output=output,
        scheduling=scheduling,
        num_sequences=params.n,
        truncate_prompt_tokens=params.truncate_prompt_tokens,
        adapter=accepted.request.adapter,
    )


def fill_delta(message: pb.OutputDelta, delta: Delta, answer: Answer) -> None:
    """Adds a sequence. In place: nested constructors would copy each level into the next, once per token."""
    sequence = message.sequences.add(index=delta.index, offset=delta.offset, text=delta.text)
    if wants_token_ids(answer.spec):
        sequence.token_ids.extend(delta.token_ids)
    if delta.extra is not None:
        _fill_extra(sequence, delta.extra, delta.offset)
    if delta.finish is not None:
        sequence.finish.CopyFrom(_from_finish(delta.finish))


def _fill_extra(sequence: pb.SequenceDelta, extra: Extra, offset: int) -> None:
    if extra.logprobs is not None:
        fill_logprobs(sequence.logprobs, extra.logprobs, offset)
    sequence.reasoning = extra.reasoning
    for call in extra.tool_calls:
        sequence.tool_calls.add(index=call.index, id=call.id, name=call.name, arguments=call.arguments)


def fill_logprobs(message: pb.TokenLogprobs, logprobs: Logprobs, offset: int) -> None:
    message.offset = offset
    message.logprobs.extend(logprobs.logprobs)
    message.ranks.extend(logprobs.ranks)
    message.top_width = logprobs.width
    message.top_ids.extend(logprobs.top_ids)
    message.top_logprobs.extend(logprobs.top_logprobs)


def _from_finish(finish: SequenceFinish) -> pb.SequenceFinish:
    message = pb.SequenceFinish(reason=pb.FinishReason.Name(finish.reason), output_tokens=finish.output_tokens)
    if finish.matched_string is not None:
        message.matched_string = finish.matched_string
    elif finish.matched_token_id is not None:
        message.matched_token_id = finish.matched_token_id
    if finish.cumulative_logprob is not None:
        message.cumulative_logprob = finish.cumulative_logprob
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
