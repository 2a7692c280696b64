"""CoreSource: a way to a core, and to the next one in its place."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from async_engine.core_client import CoreClient
from async_engine.core_entrance import CoreUnreachableError
from async_engine.core_process import pinned
from protos.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from async_engine.core_process import Door
    from protos.config import EngineConfig
    from protos.messages import CoreReady


@dataclass(frozen=True)
class CoreSource:
    """`start(before, on_progress)` starts a core, or reaches one that runs, and returns when it can serve.

    `before` is what the core held that it replaces: the next one must hold as much. None the first time.
    `on_progress(done, total)` is told bytes of weights. Raises StartupError if there is no core to be had.
    """

    name: str
    """For the log."""
    start: Callable[[CoreReady | None, Callable[[int, int], None] | None], Awaitable[CoreClient]]


def local_core(
    name: str, config: EngineConfig, eos_token_ids: tuple[int, ...], hang_timeout: float, door: Door | None = None
) -> CoreSource:
    """A process of its own on this machine, which others reach at `door`."""

    def start(before: CoreReady | None, on_progress: Callable[[int, int], None] | None) -> Awaitable[CoreClient]:
        same = config if before is None else pinned(config, before)
        return CoreClient.start(same, eos_token_ids, on_progress, hang_timeout, door)

    return CoreSource(name, start)


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

    return CoreSource(f"the core at {address}", start)


def _replaces(core: CoreReady, before: CoreReady) -> bool:
    """Whether what was accepted for one fits the other."""
    return all(
        getattr(core, name) == getattr(before, name)
        for name in ("max_model_len", "block_size", "kv_capacity_tokens", "dtype", "device")
    )
