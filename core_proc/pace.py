"""Pace: how fast the engine has been lately, and so which requests will not be served in time.

A place that nobody else wants is for whoever might make it: who is refused then was lost. One that others wait for
is for those who are likely to: else under load places go to requests that time out half-way.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from core_proc.request import Request


class Pace:
    """Four measures: tokens of prompts a second, seconds of a step, tokens of an output, and what is admitted in a
    second while others wait, in the unit of `Request.cost`."""

    MIN_TOKENS = 64
    """Prompt tokens of a step that tells their speed: smaller ones tell of overhead."""
    MIN_ADMISSIONS = 8.0
    """That tell how fast a queue moves."""
    WINDOW = 10.0
    """Seconds of a queue's moving that are remembered, fading."""
    STEP_FADE, OUTPUT_FADE = 0.02, 0.1
    """Weight of the latest step, and of the latest output, in their means. One long step must not count for all that an
    output takes."""

    def __init__(self, steps_per_token: int = 1) -> None:
        """A row is in one of so many steps."""
        self._steps_per_token = steps_per_token
        self._prompt_tokens_per_second = math.inf
        self._step_seconds = 0.0
        self._output_tokens = 0.0
        self._output_squares = 0.0
        self._last_return = -math.inf
        self._queued_since: float | None = None
        """When the queue was looked at last, if requests were left in it."""
        self._queued_seconds = 0.0
        self._num_admitted = 0.0
        self._cost_admitted = 0.0

    # What is seen -----------------------------------------------------------------------------

    def step_returned(self, num_prompt_tokens: int, scheduled_time: float, now: float) -> float:
        """A step is back: how long it took. Behind another one in flight, it began when that one was back."""
        seconds = now - max(scheduled_time, self._last_return)
        self._last_return = now
        self._step_seconds += self.STEP_FADE * (seconds - self._step_seconds)
        if num_prompt_tokens >= self.MIN_TOKENS and seconds > 0:
            # The best of late, slowly forgotten: prompts share their steps with outputs.
            rate, known = num_prompt_tokens / seconds, self._prompt_tokens_per_second
            self._prompt_tokens_per_second = rate if known == math.inf else max(rate, 0.9 * known)
        return seconds

    def output_ended(self, num_tokens: int) -> None:
        """An output ended by itself."""
        self._output_tokens += self.OUTPUT_FADE * (num_tokens - self._output_tokens)
        self._output_squares += self.OUTPUT_FADE * (num_tokens**2 - self._output_squares)

    def queue_moved(self, costs: list[float], now: float, num_left: int) -> None:
        """Requests of these costs, perhaps none, were admitted, and so many are left behind."""
        if self._queued_since is not None:
            seconds = now - self._queued_since
            fade = math.exp(-seconds / self.WINDOW)
            self._queued_seconds = self._queued_seconds * fade + seconds
            self._num_admitted = self._num_admitted * fade + len(costs)
            self._cost_admitted = self._cost_admitted * fade + sum(costs)
        self._queued_since = now if num_left else None

    def queue_stopped(self) -> None:
        """That it does not move from now on tells nothing."""
        self._queued_since = None

    # What follows -----------------------------------------------------------------------------

    def expected_output(self, request: Request) -> int:
        """Tokens it will draw: all it may, if nothing else ends it, else as many as others did of late, in the mean."""
        return self._output(request, self._output_tokens)

    def _output(self, request: Request, num_tokens: float) -> int:
        """Tokens it will draw if its output gets so long, within what it asks for."""
        most = request.max_len - request.num_given_tokens
        if request.params.sampling.ignore_eos:
            return most
        num_resumed = request.num_given_tokens - request.num_prompt_tokens
        fewest = max(1, request.params.sampling.min_tokens - num_resumed)
        return min(most, max(fewest, round(num_tokens) - num_resumed))

    def queue_seconds(self, cost: float) -> float:
        """Until requests of this cost have been admitted; 0 where that is not known."""
        if self._num_admitted < self.MIN_ADMISSIONS or not cost:
            return 0.0
        return cost * self._queued_seconds / self._cost_admitted

    def seconds_late(
        self, request: Request, wait: float, num_prompt_tokens: int, others_wait: bool, now: float
    ) -> float:
        """By how much a request will miss its deadline or its queue timeout, if it is admitted in `wait` seconds with
        so many tokens to compute before it draws one; 0 if it will be in time, or is out of time already."""
        late, elapsed = 0.0, now - request.arrival_time
        timeout, deadline = request.params.queue_timeout, request.params.deadline
        if timeout is not None and elapsed < timeout:
            late = max(0.0, elapsed + wait - timeout)
        if deadline is not None and elapsed < deadline:
            # The first token comes with the last of the prompt.
            num_behind = self._output(request, self._long_output if others_wait else 1) - 1
            decode = num_behind * self._step_seconds * self._steps_per_token
            service = num_prompt_tokens / self._prompt_tokens_per_second + decode
            late = max(late, elapsed + wait + service - deadline)
        return late

    @property
    def _long_output(self) -> float:
        """Tokens that few outputs have more of: 1.5 standard deviations over the mean."""
        variance = max(0.0, self._output_squares - self._output_tokens**2)
        return self._output_tokens + 1.5 * math.sqrt(variance)
