"""PendingStep: what a step drew and tells of prompts, on the device or on its way from there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from model_runner.logprobs import split
from protos.step import EMPTY, ModelRunnerOutput, PromptLogprobs

if TYPE_CHECKING:
    from model_runner.logprobs import PendingLogprobs
    from model_runner.prompt_spans import PromptSpans
    from model_runner.sampler import Drawn


@dataclass(frozen=True, slots=True)
class PendingStep:
    """Holds nothing that later steps write, so it may be waited for while they run, on any thread."""

    step_id: int
    drawn: Drawn | None
    """None if no row drew."""
    of_prompts: tuple[PromptSpans, PendingLogprobs] | None
    """The prompts' tokens that the step tells of, and what it tells."""

    def result(self) -> ModelRunnerOutput:
        """Waits for it."""
        token_ids, logprobs = (EMPTY, None) if self.drawn is None else self.drawn.result()
        return ModelRunnerOutput(self.step_id, token_ids, logprobs, self._told())

    def _told(self) -> list[PromptLogprobs]:
        if self.of_prompts is None:
            return []
        spans, pending = self.of_prompts
        told = zip(spans.rows.tolist(), spans.starts.tolist(), split(pending.result(), spans.counts), strict=True)
        return [PromptLogprobs(row, start, logprobs) for row, start, logprobs in told]
