"""Intake: what a step drew, taken in by the requests it was drawn for.

A step in flight remembers rows, epochs and positions: its tokens go to rows whose epoch is still the
same, and otherwise to the request if that was merely preempted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from core_proc.logprobs import select_tokens
from core_proc.request import Request, State
from protos.messages import FinishReason

if TYPE_CHECKING:
    from collections.abc import Iterable

    from core_proc.request_table import RequestTable
    from protos.messages import Repetition
    from protos.step import ModelRunnerOutput, PromptLogprobs, SchedulerOutput

Int32s = npt.NDArray[np.int32]
NOTHING_ALLOWED = -1
"""What a worker draws for a row whose masks left no token."""
_MISPLACED = "a step returned a token out of place or out of the vocabulary"
_NONE_LEFT = "no token is left to draw: what the constraint, allowed_token_ids, logit_bias and bad words allow is empty"


@dataclass(slots=True)
class StepInFlight:
    """What is remembered of a step until its tokens are back. Arrays are parallel: the rows that draw."""

    output: SchedulerOutput
    scheduled_time: float
    rows: Int32s
    epochs: npt.NDArray[np.int64]
    positions: Int32s
    """Index in prompt + output that the drawn token will have."""
    all_requests: npt.NDArray[np.object_]
    """Of every scheduled row, drawing or not."""

    @property
    def requests(self) -> npt.NDArray[np.object_]:
        """Of the rows that draw."""
        return self.all_requests[self.output.samples]


class Intake:
    """Appends drawn tokens, tells the front ends, and ends the requests they complete."""

    def __init__(self, table: RequestTable, eos_token_ids: Iterable[int], vocab_size: int) -> None:
        self._table = table
        self._rows = table.rows
        self._is_eos = np.zeros(vocab_size, np.bool_)
        self._is_eos[list(eos_token_ids)] = True

    def take(self, step: StepInFlight, output: ModelRunnerOutput, now: float) -> None:
        """The columns of a whole step at once; rows that need a look of their own after it."""
        for part in output.prompt_logprobs:
            self._prompt_logprobs(step, part)
        columns = self._rows
        rows, positions, token_ids, logprobs = step.rows, step.positions, output.token_ids, output.logprobs
        current = columns.epoch[rows] == step.epochs
        valid = (token_ids >= 0) & (token_ids < len(self._is_eos))
        as_expected = current & valid & (columns.known[rows] == positions)
        if not as_expected.all():
            for index in np.flatnonzero(~current).tolist():
                self._deliver_late(step, output, index, now)
            for index in np.flatnonzero(current & ~as_expected).tolist():
                self._misplaced(columns.requests[rows[index]], int(token_ids[index]))
            rows, positions, token_ids = rows[as_expected], positions[as_expected], token_ids[as_expected]
            logprobs = select_tokens(logprobs, as_expected)
        columns.token_ids[rows, positions] = token_ids
        columns.known[rows] = positions + 1
        self._table.events.tokens(columns.client[rows], columns.handle[rows], token_ids, logprobs)
        first = columns.awaits_first[rows]
        if first.any():
            for row in rows[first].tolist():
                columns.requests[row].first_token_time = now
            columns.awaits_first[rows] = False
        ended = self._is_eos[token_ids] & ~columns.ignore_eos[rows]
        ended |= positions + 1 >= columns.max_len[rows]
        ended |= columns.looks_at_tokens[rows]
        for index in ended.nonzero()[0].tolist():
            row = rows[index]
            length = int(positions[index]) + 1
            known = columns.token_ids[row, :length]
            self._finish_if_ended(columns.requests[row], int(token_ids[index]), known)

    def _deliver_late(self, step: StepInFlight, output: ModelRunnerOutput, index: int, now: float) -> None:
        """A token for a request that has left its row: kept if the request was preempted, else nobody's."""
        request: Request = step.requests[index]
        token_id = int(output.token_ids[index])
        if request.state is State.FINISHED or step.output.step_id <= request.dropped_step:
            return
        in_place = request.state is State.WAITING and len(request.token_ids) == step.positions[index]
        if not in_place or not 0 <= token_id < len(self._is_eos):
            self._misplaced(request, token_id)
            return
        request.token_ids = np.append(request.token_ids, np.int32(token_id))
        if request.first_token_time == -math.inf:
            request.first_token_time = now
        self._table.events.tokens(
            np.array([request.client], np.int32),
            np.array([request.handle]),
            np.array([token_id], np.int32),
            select_tokens(output.logprobs, np.arange(len(step.rows)) == index),
        )
        self._finish_if_ended(request, token_id, request.token_ids)

    def _misplaced(self, request: Request, token_id: int) -> None:
        if token_id == NOTHING_ALLOWED:
            error = None if request.matcher is None else request.matcher.error
            self._table.finish(request, FinishReason.INVALID, error or _NONE_LEFT, field=_field_at_fault(request))
        else:
            self._table.finish(request, FinishReason.ERROR, _MISPLACED)

    def _prompt_logprobs(self, step: StepInFlight, part: PromptLogprobs) -> None:
        """Passed on once, in order: a prompt that is computed again after a preemption repeats nothing."""
        request: Request = step.all_requests[np.flatnonzero(step.output.rows == part.row)[0]]
        if request.state is State.FINISHED or step.output.step_id <= request.dropped_step:
            return
        if part.start == request.prompt_logprobs_from:
            request.prompt_logprobs_from += len(part.logprobs.logprobs)
            self._table.events.prompt_logprobs(request.client, request.handle, part.start, part.logprobs)

    def _finish_if_ended(self, request: Request, token_id: int, known: Int32s) -> None:
        """Ends, in this order of precedence: end of sequence, stop id, length, the constraint, repetition."""
        sampling, params = request.params.sampling, request.params
        num_output = len(known) - request.num_prompt_tokens
        accepted = request.matcher is None or request.matcher.accept(token_id)
        if self._is_eos[token_id] and not sampling.ignore_eos:
            self._table.finish(request, FinishReason.EOS, stop_token_id=token_id)
        elif token_id in sampling.stop_token_ids:
            self._table.finish(request, FinishReason.STOP_TOKEN, stop_token_id=token_id)
        elif len(known) >= request.max_len:
            within_context = num_output >= params.max_tokens
            self._table.finish(request, FinishReason.MAX_TOKENS if within_context else FinishReason.CONTEXT_FULL)
        elif request.matcher is not None and not accepted:
            if request.matcher.error:
                self._table.finish(request, FinishReason.INVALID, request.matcher.error, field=_field_at_fault(request))
            else:
                self._table.finish(request, FinishReason.ERROR, "a token was drawn that the constraint does not allow")
        elif request.matcher is not None and request.matcher.is_done:
            self._table.finish(request, FinishReason.CONSTRAINT_DONE)
        elif params.repetition is not None and repeats(known[request.num_prompt_tokens :], params.repetition):
            self._table.finish(request, FinishReason.REPETITION)


def _field_at_fault(request: Request) -> str:
    grammar = request.params.grammar
    return "sampling" if grammar is None else f"constraint.{grammar.kind}"


def repeats(output: Int32s, repetition: Repetition) -> bool:
    """Whether the output ends with one pattern of an allowed size, so many times over."""
    for size in range(repetition.min_size, repetition.max_size + 1):
        span = size * repetition.count
        if span > len(output):
            return False
        if output[-1] == output[-1 - size] and (output[-span:-size] == output[size - span :]).all():
            return True
    return False
