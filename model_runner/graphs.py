"""Graphs: recorded steps, one for each size of batch, in which every row computes and draws one token."""

from __future__ import annotations

import logging
from bisect import bisect_left
from typing import TYPE_CHECKING

import torch

from kernels.capture import NotCapturableError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from model_runner.forward_batch import ForwardBuffers, KVCaches
    from model_runner.graph_backend import GraphBackend, Recorded
    from model_runner.models import Model
    from protos.step import SchedulerOutput

    Scores = tuple[torch.Tensor, torch.Tensor | None]
    """Of the rows of a step that draw: logits, to be overwritten at will, and the tokens of the largest ones, if those
    are made with them. Both hold until the next step."""

logger = logging.getLogger(__name__)


def graph_size(sizes: Sequence[int], num_rows: int, num_tokens: int, num_draws: int, is_special: bool) -> int | None:
    """The size, of those recorded (ascending), that a step is padded to; None if it runs operation by operation.

    That is so where a row computes several tokens or draws none, where one has an adapter or tells of its prompt, which
    makes it special, and where there are more rows than were recorded.
    """
    if is_special or not num_rows == num_tokens == num_draws or not sizes or num_rows > sizes[-1]:
        return None
    return sizes[bisect_left(sizes, num_rows)]


class Graphs:
    """Of one model: its forward pass and its logits, over the buffers that every step is put into."""

    def __init__(self, model: Model, buffers: ForwardBuffers, kv_caches: KVCaches, backend: GraphBackend) -> None:
        self._model, self._buffers, self._kv_caches, self._backend = model, buffers, kv_caches, backend
        self._sizes = backend.sizes(buffers.max_rows)
        self._recorded: dict[int, Recorded] = {}

    def capture(self) -> None:
        """Records all sizes. The largest comes first: the others find room in the memory it took."""
        for size in reversed(self._sizes):
            if self._sizes:
                self._record(size)

    def estimate(self, used: Callable[[], int]) -> int:
        """Bytes that `capture` would take, of which `used` tells how many are taken: by the largest two."""
        bytes_used, sizes = [used()], self._sizes
        for size in (sizes[-1], sizes[max(0, len(sizes) - 2)]):
            if self._sizes:
                self._record(size)
            bytes_used.append(used())
        before, first, second = bytes_used
        return max(0, first - before) + max(0, second - first) * (len(sizes) - 1)

    @torch.inference_mode()
    def run(self, step: SchedulerOutput, is_special: bool, wants_largest: bool) -> Scores | None:
        """Logits [R, vocabulary] of a step; None if it is to be run operation by operation."""
        num_rows = len(step.rows)
        size = graph_size(self._sizes, num_rows, step.num_tokens, int(step.samples.sum()), is_special)
        if size is None:
            return None
        self._buffers.fill_padded(step, size)
        result, replay = self._recorded[size]
        replay()
        return result[:num_rows], None

    def _record(self, size: int) -> None:
        """Of padding alone. What cannot be recorded in one size is not tried in others."""
        batch = self._buffers.padding(size, self._kv_caches)
        try:
            self._recorded[size] = self._backend.capture(lambda: self._model.logits(self._model.forward(batch)))
        except NotCapturableError as error:
            logger.warning("steps run operation by operation: %s", error)
            self._sizes = ()
            self._recorded.clear()
