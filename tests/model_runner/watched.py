"""WatchedExecutor: a worker on a thread, steps in flight, and a look at which blocks each step touches."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gpu_executor.uniproc import UniprocExecutor

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpu_executor.executor import PendingOutput
    from protos.config import EngineConfig
    from protos.step import GrammarMask, ModelRunnerOutput, SchedulerOutput, WorkerInfo

Owner = tuple[int, int]
"""A row, and how often it was entered."""


@dataclass
class WatchedStep:
    """Gone from what is in flight once its result is asked for."""

    touched: dict[int, Owner]
    """Blocks that it reads or writes, and whose they are."""
    pending: PendingOutput | None = None
    executor: WatchedExecutor | None = field(default=None, repr=False)

    def result(self) -> ModelRunnerOutput:
        assert self.pending is not None
        assert self.executor is not None
        output = self.pending.result()
        assert self.executor.in_flight.popleft() is self
        return output


class WatchedExecutor:
    """Fails where a step writes a block that a step in flight touches for another owner."""

    def __init__(self, config: EngineConfig, worker: Any) -> None:
        self._executor = UniprocExecutor(config, (), worker)
        self._block_size = config.cache.block_size
        self._blocks: dict[int, list[int]] = {}
        self._epochs: dict[int, int] = {}
        self.in_flight: deque[WatchedStep] = deque()
        self.most_in_flight = 0
        self.num_computed = 0
        """Tokens of all steps."""

    def start(self, report: Callable[[int, int], None], died: Callable[[Any], None]) -> WorkerInfo:
        return self._executor.start(report, died)

    def execute(self, step: SchedulerOutput) -> None:
        for new_row in step.new_rows:
            self._blocks[new_row.row] = list(new_row.block_ids)
            self._epochs[new_row.row] = self._epochs.get(new_row.row, 0) + 1
        for row, block in zip(step.block_rows.tolist(), step.block_ids.tolist(), strict=True):
            self._blocks[row].append(block)
        watched = WatchedStep({}, executor=self)
        for row, start, count in zip(step.rows.tolist(), step.starts.tolist(), step.counts.tolist(), strict=True):
            owner, end = (row, self._epochs[row]), -(-(start + count) // self._block_size)
            for place, block in enumerate(self._blocks[row][:end]):
                watched.touched[block] = owner
                if place >= start // self._block_size:
                    for earlier in self.in_flight:
                        assert earlier.touched.get(block, owner) == owner, f"block {block} is reused too early"
        self.num_computed += step.num_tokens
        self.in_flight.append(watched)
        self.most_in_flight = max(self.most_in_flight, len(self.in_flight))
        self._executor.execute(step)

    def sample(self, mask: GrammarMask | None = None) -> WatchedStep:
        watched = self.in_flight[-1]
        watched.pending = self._executor.sample(mask)
        return watched

    def shutdown(self) -> None:
        self._executor.shutdown()
