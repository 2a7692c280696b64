"""Executor: what the core sees of its workers, be it one or many."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from protos.config import EngineConfig
    from protos.step import GrammarMask, ModelRunnerOutput, SchedulerOutput, WorkerInfo


class PendingOutput(Protocol):
    """A step's result that may not be there yet."""

    def result(self) -> ModelRunnerOutput:
        """Waits for the step and returns what it drew, or raises what it failed with."""
        ...


class Executor(Protocol):
    """Runs steps on the workers, in the order they are given.

    `execute` and `sample` are called in pairs. Between them the core may do work of its own
    (a grammar mask) while the forward pass runs.
    """

    def start(self, report: Callable[[int, int], None]) -> WorkerInfo:
        """Loads the model and allocates the KV cache. `report(done, total)` tells bytes of weights.

        Raises StartupError, one line, with the root cause.
        """
        ...

    def execute(self, step: SchedulerOutput) -> None:
        """Starts the forward pass of a step. Does not raise for a step that fails: `sample` tells."""
        ...

    def sample(self, mask: GrammarMask | None = None) -> PendingOutput:
        """Starts drawing the tokens of the step last executed, of grammars' rows among those the mask allows."""
        ...

    def shutdown(self) -> None:
        """Ends the workers; idempotent."""
        ...


def make_executor(config: EngineConfig, eos_token_ids: tuple[int, ...]) -> Executor:
    """The executor the config asks for: the only place that names the kinds."""
    from gpu_executor.uniproc import UniprocExecutor

    return UniprocExecutor(config, eos_token_ids)
