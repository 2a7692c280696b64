"""Executor: what the core sees of its workers, be it one or many."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from protos.adapter import Adapter
    from protos.step import GrammarMask, ModelRunnerOutput, SchedulerOutput, WorkerInfo


class WorkersDiedError(Exception):
    """A worker is gone, or no longer at one with the others: no step can be run any more. One line, which names it.

    `was_killed`: it was, from outside, as far as can be seen.
    """

    def __init__(self, message: str, was_killed: bool = False) -> None:
        super().__init__(message)
        self.was_killed = was_killed


class StepFailedError(Exception):
    """A step raised on the workers; they can go on with the next one."""


class PendingOutput(Protocol):
    """A step's result that may not be there yet."""

    def result(self) -> ModelRunnerOutput:
        """Waits for the step and returns what it drew, or raises what it failed with; WorkersDiedError is no
        failure of the step's."""
        ...


class Executor(Protocol):
    """Runs steps on the workers, in the order they are given.

    `execute` and `sample` are called in pairs. Between them the core may do work of its own
    (a grammar mask) while the forward pass runs. Both raise WorkersDiedError.
    """

    def start(self, report: Callable[[int, int], None], died: Callable[[WorkersDiedError], None]) -> WorkerInfo:
        """Loads the model and allocates the KV cache. `report(done, total)` tells bytes of weights.

        `died` may be called once later, on any thread, while no step runs too. Raises StartupError, one line, with
        the root cause; then nothing is left behind.
        """
        ...

    def execute(self, step: SchedulerOutput) -> None:
        """Starts the forward pass of a step. Does not raise for a step that fails: `sample` tells."""
        ...

    def sample(self, mask: GrammarMask | None = None) -> PendingOutput:
        """Starts drawing the tokens of the step last executed, of grammars' rows among those the mask allows."""
        ...

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        """Fills a slot, from 1 on, that is empty: from the next step on, rows that name it are
        computed with the adapter.

        Comes between steps and waits for all workers. Raises AdapterError where one cannot load it; then none has it.
        """
        ...

    def unload_adapter(self, slot: int) -> None:
        """Empties a slot, which no row names any more, of steps in flight neither."""
        ...

    def start_profile(self) -> None:
        """Begins to record what the workers do with their time, in steps executed from now on."""
        ...

    def stop_profile(self) -> dict[str, bytes]:
        """Ends that and waits for what was recorded: files by their names. Raises WorkersDiedError."""
        ...

    def shutdown(self) -> None:
        """Ends the workers; idempotent."""
        ...
