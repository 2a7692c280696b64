"""CoreSource: a way to a core, and to the next one in its place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from async_engine.core_client import CoreClient, pinned

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

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


def local_core(name: str, config: EngineConfig, eos_token_ids: tuple[int, ...], hang_timeout: float) -> CoreSource:
    """A process of its own on this machine."""

    def start(before: CoreReady | None, on_progress: Callable[[int, int], None] | None) -> Awaitable[CoreClient]:
        same = config if before is None else pinned(config, before)
        return CoreClient.start(same, eos_token_ids, on_progress, hang_timeout)

    return CoreSource(name, start)
