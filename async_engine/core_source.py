"""CoreSource: a way to a core, and to the next one in its place."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from async_engine.core_client import CoreClient
from async_engine.core_entrance import CoreUnreachableError
from async_engine.core_process import pinned
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

    `before` is what the core held that it replaces: the next one must hold as much. None the first time.
    `on_progress(done, total)` is told bytes of weights. Raises StartupError if there is no core to be had.
    """

    name: str
    """For the log."""
    start: Callable[[CoreReady | None, Callable[[int, int], None] | None], Awaitable[CoreClient]]
    is_ours: bool = True
    """Whether how often it is replaced is for us to say."""


def local_cores(
    config: EngineConfig, eos_token_ids: tuple[int, ...], hang_timeout: float, doors: Sequence[Door] = ()
) -> list[CoreSource]:
    """As many processes on this machine as the config says. On GPUs each has its own. Others reach them at `doors`, one
    for each, if there are any."""
    count = config.parallel.data_parallel_size
    each_door: Sequence[Door | None] = doors or [None] * count
    names = ["the core"] if count == 1 else [f"core {number}" for number in range(count)]
    environments = [{}] if count == 1 else own_devices(config)
    return [
        _local_core(name, config, eos_token_ids, hang_timeout, door, environment)
        for name, door, environment in zip(names, each_door, environments, strict=True)
    ]


def _local_core(
    name: str,
    config: EngineConfig,
    eos_token_ids: tuple[int, ...],
    hang_timeout: float,
    door: Door | None,
    environment: dict[str, str],
) -> CoreSource:
    def start(before: CoreReady | None, on_progress: Callable[[int, int], None] | None) -> Awaitable[CoreClient]:
        same = config if before is None else pinned(config, before)
        return CoreClient.start(same, eos_token_ids, on_progress, hang_timeout, door, environment)

    return CoreSource(name, start)


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

    async def start(before: CoreReady | None, on_progress: Callable[[int, int], None] | None) -> CoreClient:
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
            if before is not None and not _replaces(core.ready, before):
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
