"""EngineState: whether and how far an engine serves; health, the admin service and the log agree on it."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from async_engine.async_llm import AsyncLLM


class EngineState(enum.IntEnum):
    """The numbers are those of `tailrace.v1.EngineState`."""

    SERVING = 1
    PAUSED = 2
    RECOVERING = 3
    HUNG = 4
    DRAINING = 5
    FAILED = 6


def engine_state(llm: AsyncLLM, step_timeout: float) -> EngineState:
    """The worst that is true. A core that is silent for `step_timeout` seconds is taken for hung."""
    if llm.error is not None:
        return EngineState.FAILED
    if llm.draining:
        return EngineState.DRAINING
    if llm.recovering:
        return EngineState.RECOVERING
    if llm.cores.silent_seconds > step_timeout:
        return EngineState.HUNG
    return EngineState.PAUSED if llm.paused else EngineState.SERVING
