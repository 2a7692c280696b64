"""Attempt: one call and the part of a request it is to bring; what came of each sequence, and what to ask for next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from protos.tailrace.v1 import generation_pb2 as pb

if TYPE_CHECKING:
    from tailrace_client.errors import TailraceError
    from tailrace_client.events import Delta, Summary
    from tailrace_client.resume import Route

LEAST_TIME_LIMIT = 0.001
MAX_ID = 256
"""Characters of a request's id: servers refuse longer ones."""
MAX_ID_STEM = 240
"""Those of an id that are kept where a number is put behind it."""


@dataclass(slots=True)
class Received:
    """What came of one sequence so far."""

    token_ids: list[int]
    """Those it was resumed from included."""
    offset: int
    """Where its next delta must begin; unlike `token_ids` known without ids, too."""
    text_bytes: int | None
    """UTF-8 length of all that was made of the ids; None if the caller did not say what it had of its own."""
    logprob: float = 0.0
    """Sum of the log-probabilities."""

    def add(self, delta: Delta) -> None:
        self.token_ids += delta.token_ids
        self.offset = delta.offset + len(delta.token_ids)
        if self.text_bytes is not None:
            pieces = [delta.text, delta.reasoning]
            pieces += [piece for call in delta.tool_calls for piece in (call.name, call.arguments)]
            self.text_bytes += sum(len(piece.encode()) for piece in pieces)
        if delta.logprobs is not None:
            self.logprob += sum(delta.logprobs.logprobs)


@dataclass(slots=True)
class Attempt:
    """To be sent to a server of its route, or running there."""

    spec: pb.GenerationSpec
    first: int
    """The stream's index of the call's first sequence."""
    route: Route
    call: Any = None
    """None until it is sent."""
    has_started: bool = False
    summary: Summary | None = None
    cause: TailraceError | None = None
    """What this one makes good, until it has brought something itself."""

    @property
    def indices(self) -> range:
        """Of its sequences, in the stream."""
        count = self.spec.num_sequences if self.spec.HasField("num_sequences") else 1
        return range(self.first, self.first + count)


def sequence_seed(seed: int, index: int) -> int:
    """The seed of a request's sequence, as `GenerationSpec.num_sequences` defines it."""
    if index == 0:
        return seed
    mask = (1 << 64) - 1
    value = (seed + index * 0x9E3779B97F4A7C15) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return value ^ (value >> 31)


def again(spec: pb.GenerationSpec, effective: pb.GenerationSpec | None, elapsed: float) -> pb.GenerationSpec:
    """The request once more: as the first server understood it, if it said so, and with what is left of its time.

    The model and how tokens are drawn are not left to the next server's defaults.
    """
    result = pb.GenerationSpec()
    result.CopyFrom(spec)
    if effective is not None:
        result.model = spec.model or effective.model
        result.sampling.CopyFrom(effective.sampling)
    if spec.stop.HasField("time_limit"):
        left = spec.stop.time_limit.ToNanoseconds() / 1e9 - elapsed
        result.stop.time_limit.FromNanoseconds(round(max(left, LEAST_TIME_LIMIT) * 1e9))
    return result


def continue_sequence(spec: pb.GenerationSpec, index: int, received: Received) -> None:
    """Makes `spec`, from `again`, a request for the rest of one sequence."""
    if spec.num_sequences > 1:
        spec.sampling.seed = sequence_seed(spec.sampling.seed, index)
        spec.num_sequences = 1
        if index:
            spec.request_id = f"{spec.request_id[:MAX_ID_STEM]}/{index}"
    spec.resume_from.ids[:] = received.token_ids
    if received.text_bytes is not None:
        spec.resume_text_bytes = received.text_bytes
    # The prompt's came before the first output; and it was admitted once, so it has waited enough.
    spec.output.ClearField("prompt_logprobs")
    spec.scheduling.ClearField("queue_timeout")
