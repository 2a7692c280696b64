"""Driver: a scheduler without policy, that makes a worker go through exactly the steps a test asks for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from model_runner.logprobs import split
from protos.messages import Sampling
from protos.step import NewRow, SchedulerOutput

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from protos.step import GrammarMask, Logprobs, ModelRunnerOutput, PromptLogprobs

GREEDY = Sampling()


class Pending(Protocol):
    def result(self) -> ModelRunnerOutput: ...


class Steps(Protocol):
    def execute(self, step: SchedulerOutput) -> None: ...
    def sample(self, mask: GrammarMask | None = None) -> Pending: ...


@dataclass
class Generation:
    """One sequence: its tokens so far, and where it stands in the worker."""

    token_ids: list[int]
    num_prompt_tokens: int
    sampling: Sampling
    max_tokens: int
    row: int
    block_ids: list[int] = field(default_factory=list)
    computed: int = 0
    entered: bool = False
    logprobs: list[Logprobs] = field(default_factory=list)
    """Of each drawn token, where they are asked for."""
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    """As they came."""
    prompt_told: int = 1
    """First prompt position not told of yet."""
    adapter: int = 0
    """Its slot."""

    @property
    def output(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def finished(self) -> bool:
        return len(self.output) >= self.max_tokens


class Driver:
    """Rows are handed out from a shuffled list and blocks from a shuffled pool, so that nothing lies in order."""

    def __init__(
        self, worker: Steps, num_blocks: int, num_rows: int, block_size: int = 16, is_pipeline: bool = False
    ) -> None:
        """A pipeline's first stage does not see what the last one draws: steps tell."""
        self._worker = worker
        self._is_pipeline = is_pipeline
        self._block_size = block_size
        generator = np.random.default_rng(0)
        self._blocks = list(generator.permutation(np.arange(1, num_blocks)))
        self._rows = list(generator.permutation(num_rows))
        self._step_id = 0

    def add(self, prompt: Sequence[int], max_tokens: int, sampling: Sampling = GREEDY, adapter: int = 0) -> Generation:
        return Generation(list(prompt), len(prompt), sampling, max_tokens, int(self._rows.pop()), adapter=adapter)

    def share_prefix(self, to: Generation, of: Generation) -> int:
        """A prefix-cache hit: `to` starts on the whole blocks of `of` that hold its own first tokens."""
        common = 0
        while common < min(len(to.token_ids) - 1, of.computed) and to.token_ids[common] == of.token_ids[common]:
            common += 1
        blocks = common // self._block_size
        to.block_ids, to.computed = of.block_ids[:blocks], blocks * self._block_size
        return to.computed

    def preempt(self, generation: Generation) -> None:
        """Its row and blocks go to others; it will recompute everything, elsewhere."""
        self._rows.insert(0, generation.row)
        self._blocks = generation.block_ids + self._blocks
        generation.row = int(self._rows.pop())
        generation.block_ids, generation.computed, generation.entered = [], 0, False

    def leave(self, generation: Generation) -> None:
        self._rows.insert(0, generation.row)
        self._blocks = generation.block_ids + self._blocks

    def run(self, generations: list[Generation], budget: int = 4096, num_steps: int | None = None) -> None:
        """Steps until all are finished, or num_steps times."""
        while num_steps is None or num_steps > 0:
            running = [g for g in generations if not g.finished]
            if not running:
                return
            self.step(running, budget)
            num_steps = None if num_steps is None else num_steps - 1

    def step(self, running: list[Generation], budget: int) -> None:
        chosen, counts = [], []
        for generation in running:
            if count := min(len(generation.token_ids) - generation.computed, budget):
                budget -= count
                chosen.append(generation)
                counts.append(count)
        new_rows, block_rows, block_ids = [], [], []
        for generation, count in zip(chosen, counts, strict=True):
            needed = -(-(generation.computed + count) // self._block_size) - len(generation.block_ids)
            more = [int(self._blocks.pop()) for _ in range(needed)]
            generation.block_ids += more
            if not generation.entered:
                generation.entered = True
                new_rows.append(
                    NewRow(
                        generation.row,
                        np.array(generation.token_ids, np.int32),
                        generation.num_prompt_tokens,
                        list(generation.block_ids),
                        generation.sampling,
                        generation.prompt_told,
                        generation.adapter,
                    )
                )
            else:
                block_rows += [generation.row] * needed
                block_ids += more
        starts = np.array([g.computed for g in chosen], np.int32)
        counts_array = np.array(counts, np.int32)
        lengths = np.array([len(g.token_ids) for g in chosen], np.int32)
        samples = starts + counts_array == lengths
        last_ids = [one.token_ids[one.computed + count - 1] for one, count in zip(chosen, counts, strict=True)]
        self._step_id += 1
        self._worker.execute(
            SchedulerOutput(
                step_id=self._step_id,
                rows=np.array([g.row for g in chosen], np.int32),
                starts=starts,
                counts=counts_array,
                samples=samples,
                new_rows=new_rows,
                block_rows=np.array(block_rows, np.int32),
                block_ids=np.array(block_ids, np.int32),
                last_ids=np.array(last_ids if self._is_pipeline else [], np.int32),
            )
        )
        output = self._worker.sample().result()
        assert output.step_id == self._step_id
        self._take_logprobs(output, chosen, samples)
        drawn = iter(output.token_ids.tolist())
        for generation, count, draws in zip(chosen, counts, samples, strict=True):
            generation.computed += count
            if draws:
                generation.token_ids.append(next(drawn))
        assert next(drawn, None) is None

    def _take_logprobs(
        self, output: ModelRunnerOutput, chosen: list[Generation], samples: npt.NDArray[np.bool_]
    ) -> None:
        drawing = [generation for generation, draws in zip(chosen, samples, strict=True) if draws]
        if output.logprobs is not None:
            index = output.logprobs.index
            for place, logprobs in zip(index.tolist(), split(output.logprobs, np.ones_like(index)), strict=True):
                drawing[place].logprobs.append(logprobs)
        of_row = {generation.row: generation for generation in chosen}
        for told in output.prompt_logprobs:
            generation = of_row[told.row]
            generation.prompt_logprobs.append(told)
            generation.prompt_told = told.start + len(told.logprobs.logprobs)
