"""EngineCore: schedule, execute, sample, update. No sockets and no threads."""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING

from core_proc.adapters import AdapterTable
from core_proc.core_profile import CoreProfile
from core_proc.kv_cache import KVCache
from core_proc.request import State
from core_proc.scheduler import Scheduler
from core_proc.shares import StepShares
from gpu_executor.executor import WorkersDiedError
from gpu_executor.factory import make_executor
from protos.errors import AdapterError, TailraceError
from protos.messages import CoreReady, FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable

    from core_proc.adapters import HeldAdapter
    from core_proc.black_box import Entry
    from core_proc.intake import StepInFlight
    from core_proc.request import Request
    from gpu_executor.executor import Executor, PendingOutput
    from protos.adapter import Adapter
    from protos.config import EngineConfig
    from protos.messages import Adapters

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 32
"""So many failed steps in a row are not the fault of requests: the workers are broken."""


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
        on_entering: Callable[[list[Entry]], None] = lambda entries: None,
        on_death: Callable[[WorkersDiedError], None] = lambda error: None,
    ) -> None:
        self._on_entering = on_entering
        self._told_entering = False
        self._entering: deque[list[Entry]] = deque()
        """Of each step in flight, the requests that are new to the batch."""
        self._executor = executor or make_executor(config, eos_token_ids)
        info = self._executor.start(report, on_death)
        kv_cache = KVCache(info.num_blocks, config.cache.block_size, config.cache.prefix_caching)
        self._depth = info.max_steps_in_flight
        self.scheduler = Scheduler(
            config.scheduler,
            kv_cache,
            info.max_model_len,
            eos_token_ids,
            info.vocab_size,
            shares=StepShares(self._depth) if info.num_stages > 1 else None,
        )
        self._in_flight: deque[tuple[StepInFlight, PendingOutput]] = deque()
        self.profile = CoreProfile(self._executor)
        self.adapters = AdapterTable(config.adapters.max_adapters)
        self._num_failed = 0
        """Steps since one was carried out."""
        self.vocab_size = info.vocab_size
        """Width of the logits."""
        self.ready = CoreReady(
            max_model_len=info.max_model_len,
            kv_capacity_tokens=kv_cache.capacity_tokens,
            block_size=config.cache.block_size,
            max_num_seqs=config.scheduler.max_num_seqs,
            dtype=info.dtype,
            device=info.device,
            weight_bytes=info.weight_bytes,
            kv_cache_bytes=info.kv_cache_bytes,
            max_adapters=config.adapters.max_adapters,
            max_adapter_rank=config.adapters.max_adapter_rank,
            weights=info.weights,
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

        Raises WorkersDiedError, and RuntimeError when every step fails; requests are left as they are, for another
        core to go on with.
        """
        step = self.scheduler.schedule()
        if step is not None:
            self._enter(step)
            self._executor.execute(step.output)
            # The forward pass may run meanwhile.
            mask = self.scheduler.grammar_mask(step)
            self._in_flight.append((step, self._executor.sample(mask)))
            if len(self._in_flight) < self._depth:
                return True
        if not self._in_flight:
            return False
        step, pending = self._in_flight.popleft()
        self._entering.popleft()
        try:
            output = pending.result()
            assert len(output.token_ids) == len(step.rows), f"{len(output.token_ids)} tokens for {len(step.rows)} rows"
        except WorkersDiedError:
            raise
        except Exception as error:
            logger.exception("step %d failed", step.output.step_id)
            self._num_failed += 1
            if self._num_failed >= MAX_FAILED_STEPS:
                raise RuntimeError(f"{self._num_failed} steps failed in a row") from error
            apply_aborts()
            self.scheduler.fail(step, f"the step failed: {type(error).__name__}")
        else:
            self._num_failed = 0
            apply_aborts()
            self.scheduler.update(step, output)
        return True

    def _enter(self, step: StepInFlight) -> None:
        """Tells who is new in the steps in flight, whenever that changes, before the step starts."""
        new = [self.scheduler.table.rows.requests[new_row.row] for new_row in step.output.new_rows]
        self._entering.append([(request.client, request.handle) for request in new])
        entries = [entry for entries in self._entering for entry in entries]
        if entries or self._told_entering:
            self._told_entering = bool(entries)
            self._on_entering(entries)

    def add(self, request: Request) -> None:
        """Queues a request; one whose adapter is not there, or not any more, fails at once."""
        self.scheduler.add(request)
        name, held = request.params.adapter, request.adapter
        if name and (held is None or held.is_closed) and request.state is not State.FINISHED:
            message = f"there is no adapter {name!r} any more"
            self.scheduler.table.finish(request, FinishReason.NO_ADAPTER, message, field="adapter")

    def load_adapter(self, adapter: Adapter) -> bool:
        """False if it is there already. Raises AdapterError, and others of the table; WorkersDiedError."""
        return self.adapters.load(adapter, self._put_adapter)

    def _put_adapter(self, slot: int, adapter: Adapter) -> None:
        try:
            self._executor.load_adapter(slot, adapter)
        except (TailraceError, WorkersDiedError):
            raise
        except Exception as error:
            logger.exception("adapter %s cannot be loaded", adapter.name)
            self._executor.unload_adapter(slot)
            raise AdapterError(f"{adapter.path}: cannot be loaded: {type(error).__name__}") from None

    def load_again(self, adapters: Adapters) -> None:
        """What another core held. One that cannot be had any more is left out: requests for it will fail."""
        for adapter in adapters.loaded:
            try:
                self.load_adapter(adapter)
            except TailraceError as error:
                logger.error("adapter %s cannot be loaded again: %s", adapter.name, error)
        for name in adapters.leaving:
            if (held := self.adapters.get(name)) is not None:
                held.is_leaving = True

    def free_adapters(self) -> list[HeldAdapter]:
        """Takes out those that were closed, and that no request and no step in flight needs any more."""
        gone = self.adapters.take_out(self.scheduler.kv_cache.last_returned_step)
        for held in gone:
            self._executor.unload_adapter(held.slot)
        return gone

    def shutdown(self) -> None:
        self._executor.shutdown()
