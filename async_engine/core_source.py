"""CoreSource: a way to a core, and to the next one in its place."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from async_engine.core_client import CoreClient
from async_engine.core_entrance import CoreUnreachableError
from async_engine.core_process import CoreProcess, pinned
from core_proc.ahead import module_ahead
from protos.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from async_engine.core_process import Door
    from protos.config import EngineConfig
    from protos.messages import CoreReady

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class CoreSource:
    """`start(before, on_progress)` starts a core, or reaches one that runs, and returns when it can serve.

    `before` is the core that it replaces, which is dead: the next one must hold as much. None the first time.
    `on_progress(done, total)` is told bytes of weights. Raises StartupError if there is no core to be had.
    """

    name: str
    """For the log."""
    start: Callable[[CoreClient | None, Callable[[int, int], None] | None], Awaitable[CoreClient]]
    is_ours: bool = True
    """Whether how often it is replaced is for us to say."""


class LocalCores:
    """As many processes on this machine as the config says, started here and now: what they import takes longer than
    to find out what else they need. On GPUs each has its own. Others reach them at `doors`, one for each, if there are
    any."""

    def __init__(self, config: EngineConfig, doors: Sequence[Door] = ()) -> None:
        self._config = config
        count = config.parallel.data_parallel_size
        each_door: Sequence[Door | None] = doors or [None] * count
        names = ["the core"] if count == 1 else [f"core {number}" for number in range(count)]
        environments = [{}] if count == 1 else own_devices(config)
        self._places = list(zip(names, each_door, environments, strict=True))
        self._first = {name: self._spawn(door, environment) for name, door, environment in self._places}

    def _spawn(self, door: Door | None, environment: dict[str, str]) -> CoreProcess:
        return CoreProcess(module_ahead(self._config), door, environment)

    def sources(self, eos_token_ids: tuple[int, ...], hang_timeout: float) -> list[CoreSource]:
        """The first core of each source is a process that runs already."""
        return [self._source(*place, eos_token_ids, hang_timeout) for place in self._places]

    def _source(
        self,
        name: str,
        door: Door | None,
        environment: dict[str, str],
        eos_token_ids: tuple[int, ...],
        hang_timeout: float,
    ) -> CoreSource:
        def start(before: CoreClient | None, on_progress: Callable[[int, int], None] | None) -> Awaitable[CoreClient]:
            process = self._first.pop(name, None) or self._spawn(door, environment)
            common = eos_token_ids, process, on_progress, hang_timeout, door
            if before is None:
                return CoreClient.start(self._config, *common)
            return CoreClient.start(pinned(self._config, before.ready), *common, before.adapters)

        return CoreSource(name, start)

    def close(self) -> None:
        """Ends the processes that no source has taken."""
        while self._first:
            self._first.popitem()[1].reap()


def own_devices(config: EngineConfig) -> list[dict[str, str]]:
    """Of each core, the variables that show it the GPUs of its workers alone, of those that we may use."""
    count, workers = config.parallel.data_parallel_size, config.parallel.num_workers
    if config.model.device == "cpu":
        return [{}] * count
    ours = [name for name in os.environ.get(VISIBLE, "").split(",") if name]
    names = ours or [str(number) for number in range(count * workers)]
    return [{VISIBLE: ",".join(names[start : start + workers])} for start in range(0, count * workers, workers)]


RETRY_SECONDS = 0.1
MAX_RETRY_SECONDS = 5.0


def remote_core(address: str, secret: bytes, hang_timeout: float) -> CoreSource:
    """One that somebody else starts, and starts again: once it was there it is waited for, however long that takes."""

    async def start(before: CoreClient | None, on_progress: Callable[[int, int], None] | None) -> CoreClient:
        delay = RETRY_SECONDS
        while True:
            try:
                core = await CoreClient.join(address, secret, on_progress, hang_timeout)
            except CoreUnreachableError:
                if before is None:
                    raise
                await asyncio.sleep(delay)
                delay = min(2 * delay, MAX_RETRY_SECONDS)
                continue
            if before is not None and not _replaces(core.ready, before.ready):
                await core.close()
                raise StartupError(f"the core at {address} came back as another one")
            return core

    return CoreSource(f"the core at {address}", start, is_ours=False)


def _replaces(core: CoreReady, before: CoreReady) -> bool:
    """Whether what was accepted for one fits the other."""
    return all(
        getattr(core, name) == getattr(before, name)
        for name in ("max_model_len", "block_size", "kv_capacity_tokens", "dtype", "device")
    )
