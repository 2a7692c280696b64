"""ForwardBatch: what one step computes, as tensors; every layer gets it as an argument."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from kernels.reference_step import StepTensors

if TYPE_CHECKING:
    from model_runner.device import DevicePolicy
    from model_runner.input_batch import InputBatch
    from model_runner.prompt_spans import PromptSpans
    from protos.step import SchedulerOutput

    Int32s = npt.NDArray[np.int32]
    KVCaches = dict[int, tuple[torch.Tensor, torch.Tensor]]
    """Keys and values of each layer of the stage."""
    StepSizes = tuple[int, int, int]
    """Tokens, rows, and rows that draw."""


@dataclass(slots=True)
class ForwardBatch:
    """T tokens of R rows, row after row; S of the rows draw a token, P tokens of prompts get log-probabilities."""

    input_ids: torch.Tensor
    """[T] int64."""
    positions: torch.Tensor
    """[T] int64, from 0 in each sequence."""
    slots: torch.Tensor
    """[T] int64: where in the KV cache each token goes, -1 for nowhere."""
    query_starts: torch.Tensor
    """[R + 1] int32: the first token of each row, and T."""
    seq_lens: torch.Tensor
    """[R] int32: keys of each row, this step's tokens included."""
    block_tables: torch.Tensor
    """[R, blocks] int32; entries beyond a row's keys are undefined."""
    output_tokens: torch.Tensor
    """[S + P] int64: the tokens whose hidden states are wanted. First those whose next one is drawn, then those
    that predict a prompt token whose log-probability is asked for."""
    kv_caches: KVCaches
    hidden: torch.Tensor | None = None
    """[T, hidden size] What the stage before has computed; None in the first, which begins with input_ids."""


class ForwardBuffers:
    """The memory that every step's tensors lie in, of the most tokens and rows a step has: a step that was recorded
    finds the next one's where it found its own."""

    def __init__(self, num_tokens: int, num_rows: int, batch: InputBatch, policy: DevicePolicy) -> None:
        """`batch` is what steps are of."""
        self._batch, self._policy = batch, policy
        self.max_rows = min(num_rows, num_tokens)
        self.most: StepSizes = max(3, num_tokens), max(3, self.max_rows), max(3, self.max_rows)
        """What there is room for: three of each at least, so that what grows with them shows in a recording."""
        tokens, rows, draws = self.most

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=policy.device)

        self._all = StepTensors(
            input_ids=zeros(tokens, dtype=torch.int64),
            positions=zeros(tokens, dtype=torch.int64),
            slots=zeros(tokens, dtype=torch.int64),
            query_starts=zeros(rows + 1),
            seq_lens=zeros(rows),
            block_tables=zeros(rows, batch.block_table.shape[1]),
        )
        self._columns: list[Int32s] = [np.zeros(size, np.int32) for size in (rows, rows, rows + 1)]
        """Of a step in its place: rows, where they start, and where their tokens do."""
        self._given: list[torch.Tensor] = [policy.mirror(column) for column in self._columns]
        self._every_token = torch.arange(rows, device=policy.device)
        self._drawing = np.zeros(draws, np.int64)
        self._output_tokens: torch.Tensor = policy.mirror(self._drawing)
        """Of a step in its place, on a device that shares the host's memory."""
        self._viewed = (0, 0, 0), self._all

    def fill(self, step: SchedulerOutput, kv_caches: KVCaches, spans: PromptSpans | None = None) -> ForwardBatch:
        """The batch of a step. It holds until the next one is filled."""
        num_rows, num_tokens = len(step.rows), step.num_tokens
        tensors = self._view(num_tokens, num_rows, self._width(step))
        query_starts = self._fill(step, tensors)
        if num_tokens == num_rows and spans is None and step.samples.all():
            output_tokens = self._every_token[:num_rows]
        else:
            of_step = (query_starts[1:] - 1)[step.samples].astype(np.int64)
            output_tokens = self._policy.tensor(of_step if spans is None else np.concatenate([of_step, spans.tokens]))
        return ForwardBatch(*tensors, output_tokens, kv_caches)

    def padding(self, size: int, kv_caches: KVCaches) -> ForwardBatch:
        """The batch of a step without any row, padded to rows of one token each, all of which count as drawing: what is
        recorded of it is of every step that fits into it."""
        tensors = self._view(size, size, self._all.block_tables.shape[1])
        tensors.input_ids.zero_()
        tensors.positions.zero_()
        tensors.slots.fill_(-1)
        tensors.query_starts.copy_(torch.arange(size + 1))
        tensors.seq_lens.zero_()
        tensors.block_tables.zero_()
        return ForwardBatch(*tensors, self._every_token[:size], kv_caches)

    def fill_padded(self, step: SchedulerOutput, size: int) -> None:
        """Puts a step whose rows compute and draw one token each where `padding` of the size has its tensors."""
        self._fill(step, self._view(size, size, self._width(step)))

    def of_sizes(self, sizes: StepSizes, kv_caches: KVCaches) -> ForwardBatch:
        """The batch of what `fill_in_place` was told last, a step of these sizes."""
        num_tokens, num_rows, num_draws = sizes
        rows, starts, query_starts = self._given
        tensors = self._view(num_tokens, num_rows, self._all.block_tables.shape[1])
        self._look_up(rows[:num_rows], starts[:num_rows], query_starts[: num_rows + 1], num_tokens, tensors)
        return ForwardBatch(*tensors, self._output_tokens[:num_draws], kv_caches)

    def fill_in_place(self, step: SchedulerOutput) -> StepSizes:
        """Puts a step where `of_sizes` finds it, in memory that device and host share; returns its sizes."""
        num_rows = len(step.rows)
        rows, starts, query_starts = self._columns
        rows[:num_rows], starts[:num_rows] = step.rows, step.starts
        ends = step.counts.cumsum(out=query_starts[1 : num_rows + 1])
        drawing = ends[step.samples]
        np.subtract(drawing, 1, out=self._drawing[: len(drawing)])
        return int(ends[-1]), num_rows, len(drawing)

    def _width(self, step: SchedulerOutput) -> int:
        """Blocks of the longest row."""
        return -(-int((step.starts + step.counts).max()) // self._batch.block_size)

    def _view(self, num_tokens: int, num_rows: int, width: int) -> StepTensors:
        sizes, everything = (num_tokens, num_rows, width), self._all
        if self._viewed[0] != sizes:
            view = StepTensors(
                everything.input_ids[:num_tokens],
                everything.positions[:num_tokens],
                everything.slots[:num_tokens],
                everything.query_starts[: num_rows + 1],
                everything.seq_lens[:num_rows],
                everything.block_tables[:num_rows, :width],
            )
            self._viewed = sizes, view
        return self._viewed[1]

    def _fill(self, step: SchedulerOutput, tensors: StepTensors) -> npt.NDArray[np.int32]:
        """Returns where the tokens of each row start."""
        num_rows = len(step.rows)
        # One copy to the device for all of it.
        packed = np.zeros(3 * num_rows + 1, np.int32)
        packed[:num_rows], packed[num_rows : 2 * num_rows] = step.rows, step.starts
        query_starts = packed[2 * num_rows :]
        np.cumsum(step.counts, out=query_starts[1:])
        rows, starts, on_device = self._policy.tensor(packed).tensor_split([num_rows, 2 * num_rows])
        self._look_up(rows, starts, on_device, int(query_starts[-1]), tensors)
        return query_starts

    def _look_up(
        self,
        rows: torch.Tensor,
        starts: torch.Tensor,
        query_starts: torch.Tensor,
        num_tokens: int,
        tensors: StepTensors,
    ) -> None:
        batch = self._batch
        given = batch.token_table, batch.block_table, rows, starts, query_starts
        self._policy.ops.step_tensors(*given, num_tokens, batch.block_size, tensors)
