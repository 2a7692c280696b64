"""EngineCore: schedule, execute, sample, update. No sockets and no threads."""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING

from core_proc.kv_cache import KVCache
from core_proc.scheduler import Scheduler, StepInFlight
from gpu_executor.executor import make_executor
from protos.messages import CoreReady

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpu_executor.executor import Executor, PendingOutput
    from protos.config import EngineConfig

logger = logging.getLogger(__name__)


class EngineCore:
    """A scheduler and an executor, and the steps between them.

    With a depth of n, up to n steps are issued before the first one's result is waited for.
    """

    def __init__(
        self,
        config: EngineConfig,
        eos_token_ids: tuple[int, ...],
        report: Callable[[int, int], None] = lambda done, total: None,
        executor: Executor | None = None,
    ) -> None:
        self._executor = executor or make_executor(config, eos_token_ids)
        info = self._executor.start(report)
        kv_cache = KVCache(info.num_blocks, config.cache.block_size, config.cache.prefix_caching)
        self.scheduler = Scheduler(config.scheduler, kv_cache, info.max_model_len, eos_token_ids, info.vocab_size)
        self._depth = info.max_steps_in_flight
        self._in_flight: deque[tuple[StepInFlight, PendingOutput]] = deque()
        self.ready = CoreReady(
            max_model_len=info.max_model_len,
            kv_capacity_tokens=kv_cache.capacity_tokens,
            block_size=config.cache.block_size,
            max_num_seqs=config.scheduler.max_num_seqs,
            dtype=info.dtype,
            device=info.device,
            weight_bytes=info.weight_bytes,
            kv_cache_bytes=info.kv_cache_bytes,
        )

    @property
    def num_steps_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def has_work(self) -> bool:
        return bool(self._in_flight) or self.scheduler.has_work

    def step(self, apply_aborts: Callable[[], None] = lambda: None) -> bool:
        """Issues a step, and takes in the oldest result unless there is room for one more step.

        False if there was nothing to do: only a new message or a timer can change that.

        `apply_aborts` is called right before results count, so that a request aborted while its last step
        ran ends as aborted, once.
        """
        step = self.scheduler.schedule()
        if step is not None:
            self._executor.execute(step.output)
            self._in_flight.append((step, self._executor.sample()))
            if len(self._in_flight) < self._depth:
                return True
        if not self._in_flight:
            return False
        step, pending = self._in_flight.popleft()
        try:
            token_ids = pending.result().token_ids
            assert len(token_ids) == len(step.rows), f"{len(token_ids)} tokens for {len(step.rows)} rows"
        except Exception as error:
            logger.exception("step %d failed", step.output.step_id)
            apply_aborts()
            self.scheduler.fail(step, f"the step failed: {type(error).__name__}")
        else:
            apply_aborts()
            self.scheduler.update(step, token_ids)
        return True

    def shutdown(self) -> None:
        self._executor.shutdown()
