"""UniprocExecutor: one worker inside the core process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from protos.place import ONLY
from protos.python_profile import PythonProfile

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from gpu_executor.executor import PendingOutput, WorkersDiedError
    from protos.adapter import Adapter
    from protos.config import EngineConfig
    from protos.place import Place
    from protos.step import GrammarMask, ModelRunnerOutput, SchedulerOutput, WorkerInfo

T = TypeVar("T")


class SingleWorker(Protocol):
    """What a worker offers. `execute` and `sample` need not wait for the device; results do, on any thread."""

    def load(self, report: Callable[[int, int], None]) -> WorkerInfo: ...
    def execute(self, step: SchedulerOutput) -> None: ...
    def sample(self, mask: GrammarMask | None = None) -> PendingOutput: ...
    def load_adapter(self, slot: int, adapter: Adapter) -> None: ...
    def unload_adapter(self, slot: int) -> None: ...
    def start_profile(self) -> None: ...
    def stop_profile(self) -> dict[str, bytes]: ...


def make_worker(config: EngineConfig, eos_token_ids: tuple[int, ...], place: Place = ONLY) -> SingleWorker:
    if config.model.model == "null":
        from gpu_executor.null import NullWorker

        return NullWorker(config)
    from gpu_executor.worker import Worker

    worker: SingleWorker = Worker(config, eos_token_ids, place)
    return worker


class Outcome(Generic[T]):
    """What a call returned or raised, as a future tells it."""

    def __init__(self, run: Callable[[], T]) -> None:
        self._error: Exception | None = None
        try:
            self._value = run()
        except Exception as error:
            self._error = error

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        return self._value


def sample_behind(
    forward: Future[None] | Outcome[None], worker: SingleWorker, mask: GrammarMask | None
) -> PendingOutput:
    """Draws the tokens of the step that was executed, or raises what that raised."""
    forward.result()
    return worker.sample(mask)


class LaunchedStep:
    """A step that the worker has been given, and may not have got to yet."""

    def __init__(self, sampled: Future[PendingOutput] | Outcome[PendingOutput]) -> None:
        self.sampled = sampled
        """Done once the worker has issued all of it; then the device may still be at it."""

    def result(self) -> ModelRunnerOutput:
        return self.sampled.result().result()


class UniprocExecutor:
    """Calls the worker directly when one step is in flight at a time, else on a thread of its own."""

    def __init__(
        self, config: EngineConfig, eos_token_ids: tuple[int, ...], worker: SingleWorker | None = None
    ) -> None:
        self._worker = worker or make_worker(config, eos_token_ids)
        self._thread: ThreadPoolExecutor | None = None
        self._forward: Future[None] | Outcome[None] | None = None
        self._profile: PythonProfile | None = None
        """Of the thread, while it is recorded."""

    def start(self, report: Callable[[int, int], None], died: Callable[[WorkersDiedError], None]) -> WorkerInfo:
        info = self._worker.load(report)
        if info.max_steps_in_flight > 1:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="worker")
        return info

    def execute(self, step: SchedulerOutput) -> None:
        self._forward = self._submit(lambda: self._worker.execute(step))

    def sample(self, mask: GrammarMask | None = None) -> LaunchedStep:
        forward, self._forward = self._forward, None
        assert forward is not None, "sample without execute"
        return LaunchedStep(self._submit(lambda: sample_behind(forward, self._worker, mask)))

    def _submit(self, run: Callable[[], T]) -> Future[T] | Outcome[T]:
        return Outcome(run) if self._thread is None else self._thread.submit(run)

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        self._submit(lambda: self._worker.load_adapter(slot, adapter)).result()

    def unload_adapter(self, slot: int) -> None:
        self._submit(lambda: self._worker.unload_adapter(slot)).result()

    def start_profile(self) -> None:
        def start() -> None:
            self._worker.start_profile()
            if self._thread is not None:  # else it is the core's own
                self._profile = PythonProfile()

        self._submit(start).result()

    def stop_profile(self) -> dict[str, bytes]:
        def stop() -> dict[str, bytes]:
            files = {}
            if self._profile is not None:
                files["worker0.pstats"] = self._profile.stop()
                self._profile = None
            return files | {f"worker0.{name}": data for name, data in self._worker.stop_profile().items()}

        return self._submit(stop).result()

    def shutdown(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
