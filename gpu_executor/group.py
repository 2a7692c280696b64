"""WorkerGroup: an executor over workers in processes of their own, wherever these are.

Each worker has a socket on which it tells how far loading is, what a step drew and what failed; its end is the
worker's. How steps get to them is a matter of where they are.
"""

from __future__ import annotations

import logging
import select
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Protocol

import msgspec

from gpu_executor import wire
from gpu_executor.executor import StepFailedError, WorkersDiedError
from protos.errors import AdapterError, StartupError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from protos.adapter import Adapter
    from protos.config import EngineConfig
    from protos.step import GrammarMask, ModelRunnerOutput, SchedulerOutput, WorkerInfo

logger = logging.getLogger(__name__)

STOP_SECONDS = 2.0
"""That workers get to leave by themselves."""
ROOT_CAUSE_SECONDS = 1.0
"""That a start which fails is given to tell why: one worker's end makes others fail in ways that say nothing."""
FAILURE_SECONDS = 5.0
"""After a step failed on one worker, until it has to have failed on all: one that waits for another never ends."""
STALL_SECONDS = 5.0
"""After which the log tells what each worker is at; then after twice as long, and so on."""
WATCH_SECONDS = 1.0
MOMENT = 0.001
"""Seconds between two looks whether the slowest worker has made room for a message."""
_SAMPLE = wire.encoder.encode(wire.Sample())


class Member(Protocol):
    """A worker's process. Its text names it."""

    rank: int

    def fileno(self) -> int:
        """Of its socket."""
        ...

    def receive(self) -> list[wire.FromWorker] | None:
        """What has come, waiting for some; None once its end of the socket is closed."""
        ...

    def how_it_ended(self) -> str:
        """To be asked after that."""
        ...

    @property
    def was_killed(self) -> bool:
        """From outside, as far as can be seen; likewise."""
        ...

    def state(self) -> str:
        """What it is doing, as far as can be seen from here."""
        ...

    def kill(self) -> None: ...

    def close(self) -> None:
        """Gives up the socket, once the process is gone."""
        ...


class Way(Protocol):
    """Where the workers are, and the way there."""

    def start(self) -> Sequence[Member]:
        """Starts all, by rank. Raises StartupError; `close` is called in any case."""
        ...

    def send(self, message: bytes, wait: Callable[[], None]) -> int:
        """To all of them; how much has been sent by now, in a unit of its own.

        As long as one leaves no room, calls `wait`, which returns after a moment or raises.
        """
        ...

    def num_taken(self, rank: int) -> int | None:
        """In the same unit, how much a worker has taken; None where that cannot be seen."""
        ...

    def close(self, grace: float) -> None:
        """Waits so many seconds for them to leave, else makes them, and leaves nothing behind."""
        ...


class WorkerGroup:
    """Starts workers, has them run steps and ends them. A worker that dies takes the others along.

    Everything but the watch for deaths happens on the core's main thread.
    """

    def __init__(self, config: EngineConfig, way: Way, stall_seconds: float = STALL_SECONDS) -> None:
        self._way = way
        self._num_workers = config.parallel.num_workers
        self._output_rank = self._num_workers - config.parallel.tensor_parallel_size
        self._last_stage = set(range(self._output_rank, self._num_workers))
        self._stall_seconds = stall_seconds
        self.workers: Sequence[Member] = ()
        self._by_descriptor: dict[int, Member] = {}
        self._poll = select.poll()
        self._lock = threading.Lock()
        self._death: WorkersDiedError | None = None
        self._started = self._closing = False
        self._watcher: threading.Thread | None = None
        self._step_id = self._last_back = -1
        self._begins: deque[tuple[int, int]] = deque()
        """Of late steps: id, and how much has been sent when they begin."""
        self._outputs: dict[int, ModelRunnerOutput] = {}
        self._failures: dict[int, dict[int, str]] = {}
        """By step and worker."""
        self._told_failed: deque[int] = deque(maxlen=64)
        """Steps that the core knows to have failed: a worker of an earlier stage may tell of its part later."""
        self._answers: dict[int, wire.AdapterLoaded | wire.Profiled] = {}
        """Of workers that have told, to what all were asked last."""
        self._failed_at = 0.0
        """When a step failed last on a first worker."""

    # Start ------------------------------------------------------------------------------------

    def start(self, report: Callable[[int, int], None], died: Callable[[WorkersDiedError], None]) -> WorkerInfo:
        self._started = True
        try:
            self.workers = self._way.start()
            for worker in self.workers:
                self._by_descriptor[worker.fileno()] = worker
                self._poll.register(worker, select.POLLIN)
            info = self._common(self._load(report))
        except BaseException:
            self._stop(grace=0)
            raise
        self._watcher = threading.Thread(target=self._watch, args=(died,), name="worker-watch", daemon=True)
        self._watcher.start()
        return info

    def _load(self, report: Callable[[int, int], None]) -> list[WorkerInfo]:
        """Waits until all are loaded, and tells the sum of their progress. Raises StartupError, with the root cause."""
        loading: dict[int, wire.Loading] = {}
        infos: dict[int, WorkerInfo] = {}
        failures: list[wire.LoadFailed] = []
        told: set[int] = set()
        while len(infos) < self._num_workers:
            for worker, message in self._receive(WATCH_SECONDS):
                match message:
                    case wire.Loading():
                        loading[worker.rank] = message
                        if len(loading) == self._num_workers:
                            parts = loading.values()
                            report(sum(part.done for part in parts), sum(part.total for part in parts))
                    case wire.Loaded():
                        infos[worker.rank] = message.info
                    case wire.LoadFailed():
                        told.add(worker.rank)
                        text = message.message if message.is_known else f"{worker}: {message.message}"
                        failures.append(msgspec.structs.replace(message, message=text))
                    case None if worker.rank not in told:
                        raise StartupError(f"{worker} {worker.how_it_ended()} while it was loading")
            if failures:
                first = min(failures, key=lambda failure: (not failure.is_known, failure.time))
                if first.is_known or len(told) == self._num_workers or time.time() > first.time + ROOT_CAUSE_SECONDS:
                    raise StartupError(first.message)
        return [infos[rank] for rank in range(self._num_workers)]

    def _common(self, infos: list[WorkerInfo]) -> WorkerInfo:
        """What all workers together hold. Raises StartupError where they do not hold the same blocks."""
        for rank, info in enumerate(infos):
            if (info.num_blocks, info.max_model_len) != (infos[0].num_blocks, infos[0].max_model_len):
                raise StartupError(
                    f"worker {rank} holds {info.num_blocks} KV blocks and contexts of {info.max_model_len}, worker 0 "
                    f"{infos[0].num_blocks} and {infos[0].max_model_len}; set --num-kv-blocks and --max-model-len"
                )
        return msgspec.structs.replace(
            infos[self._output_rank],
            weight_bytes=sum(info.weight_bytes for info in infos),
            kv_cache_bytes=sum(info.kv_cache_bytes for info in infos),
        )

    # Steps ------------------------------------------------------------------------------------

    def execute(self, step: SchedulerOutput) -> None:
        self._step_id = step.step_id
        self._begins.append((step.step_id, self._send(wire.encoder.encode(wire.Execute(step)))))

    def sample(self, mask: GrammarMask | None = None) -> _Pending:
        self._send(_SAMPLE if mask is None else wire.encoder.encode(wire.Sample(mask)))
        return _Pending(self, self._step_id)

    def result(self, step_id: int) -> ModelRunnerOutput:
        """Of a step that was sampled, each to be asked for once, in order."""
        stall = _Stall(self._stall_seconds)
        while True:
            if self._death is not None:
                raise self._death
            failures = self._failures.get(step_id, {})
            if failures.keys() >= self._last_stage:  # so did all between it and the first stage that did
                self._told_failed.append(step_id)
                raise StepFailedError(self._failures.pop(step_id)[min(failures)])
            if self._failures:
                self._stay_at_one(step_id)
            if step_id in self._outputs:
                self._last_back = step_id
                self._forget_begins()
                return self._outputs.pop(step_id)
            self._take_in(WATCH_SECONDS)
            if stall.is_due():
                self._tell_stall(step_id, stall.seconds)

    def start_profile(self) -> None:
        self._send(wire.encoder.encode(wire.StartProfile()))

    def stop_profile(self) -> dict[str, bytes]:
        told = {
            rank: answer.files for rank, answer in self._ask(wire.StopProfile()) if isinstance(answer, wire.Profiled)
        }
        return {f"worker{rank}.{name}": data for rank, files in told.items() for name, data in files.items()}

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        answers = [answer for _, answer in self._ask(wire.LoadAdapter(slot, adapter))]
        errors = [answer.error for answer in answers if isinstance(answer, wire.AdapterLoaded) and answer.error]
        if errors:
            self.unload_adapter(slot)
            raise AdapterError(errors[0])

    def unload_adapter(self, slot: int) -> None:
        self._send(wire.encoder.encode(wire.UnloadAdapter(slot)))

    def _ask(self, message: wire.ToWorker) -> Iterable[tuple[int, wire.AdapterLoaded | wire.Profiled]]:
        """What every worker answers, by its rank."""
        self._send(wire.encoder.encode(message))
        while len(self._answers) < self._num_workers:
            if self._death is not None:
                raise self._death
            self._take_in(WATCH_SECONDS)
        answers, self._answers = self._answers, {}
        return sorted(answers.items())

    def _send(self, message: bytes) -> int:
        stall = _Stall(self._stall_seconds)

        def wait() -> None:
            self._take_in(MOMENT)  # a worker may be waiting for us to take what it tells
            if stall.is_due():
                self._tell_stall(self._step_id, stall.seconds)

        if self._death is not None:
            raise self._death
        return self._way.send(message, wait)

    def _receive(self, seconds: float) -> Iterator[tuple[Member, wire.FromWorker | None]]:
        """What workers tell within so many seconds; None for one whose process has ended, once."""
        for descriptor, _ in self._poll.poll(seconds * 1e3):
            worker = self._by_descriptor[descriptor]
            messages = worker.receive()
            if messages is None:
                self._poll.unregister(worker)
                yield worker, None
            else:
                for message in messages:
                    yield worker, message

    def _take_in(self, seconds: float) -> None:
        """All that is there at once: a failure, told before another worker could go on, is seen before its result."""
        for worker, message in self._receive(seconds):
            match message:
                case wire.Drawn(output):
                    self._outputs[output.step_id] = output
                case wire.StepFailed(step_id, error) if step_id not in self._told_failed:
                    failures = self._failures.setdefault(step_id, {})
                    if not failures:
                        self._failed_at = time.monotonic()
                    failures[worker.rank] = error
                case wire.AdapterLoaded() | wire.Profiled():
                    self._answers[worker.rank] = message
                case None:
                    raise self._lost(worker)

    def _stay_at_one(self, step_id: int) -> None:
        """Raises if a step, up to this one, failed on some workers and not on others."""
        for failed, failures in self._failures.items():
            is_over = failed < step_id or failed in self._outputs
            if failed <= step_id and (is_over or time.monotonic() > self._failed_at + FAILURE_SECONDS):
                rank, error = next(iter(failures.items()))
                others = [str(each) for each in self.workers if each.rank not in failures]
                raise self._die(f"{self.workers[rank]} failed in step {failed} ({error}), not so {', '.join(others)}")

    # Deaths and stalls ------------------------------------------------------------------------

    def _watch(self, died: Callable[[WorkersDiedError], None]) -> None:
        """The watcher's thread: sees the first end of a worker, while the core has nothing to do too."""
        poll = select.poll()
        for worker in self.workers:
            poll.register(worker, select.POLLRDHUP)
        ((descriptor, _), *_) = poll.poll()
        if not self._closing:
            died(self._lost(self._by_descriptor[descriptor]))

    def _lost(self, worker: Member) -> WorkersDiedError:
        return self._die(f"{worker} {worker.how_it_ended()}; {self._where(worker)}", worker.was_killed)

    def _die(self, text: str, was_killed: bool = False) -> WorkersDiedError:
        """What all are told from now on: the first reason counts. Ends the other workers, which wait for nothing."""
        with self._lock:
            if self._death is None:
                self._death = WorkersDiedError(text, was_killed)
                for worker in self.workers:
                    worker.kill()
            return self._death

    def _where(self, worker: Member) -> str:
        num_taken = self._way.num_taken(worker.rank)
        if num_taken is None:
            return f"the last step back was {self._last_back}"
        begun = [step_id for step_id, sent in tuple(self._begins) if sent <= num_taken]
        return f"its last step was {begun[-1]}" if begun else "it had no step yet"

    def _tell_stall(self, step_id: int, seconds: float) -> None:
        where = "; ".join(f"{worker}, {worker.state()}: {self._where(worker)}" for worker in self.workers)
        logger.warning("step %d is not back after %.0f s. %s", step_id, seconds, where)

    def _forget_begins(self) -> None:
        """Of steps that all workers are past."""
        taken = [self._way.num_taken(rank) for rank in range(self._num_workers)]
        slowest = min(self._begins[-1][1] if num_taken is None else num_taken for num_taken in taken)
        while len(self._begins) > 1 and self._begins[1][1] <= slowest:
            self._begins.popleft()

    # The end ----------------------------------------------------------------------------------

    def shutdown(self) -> None:
        if self._started and not self._closing:
            self._stop(STOP_SECONDS)

    def _stop(self, grace: float) -> None:
        self._closing = True
        if grace and self._death is None:
            try:
                self._way.send(wire.encoder.encode(wire.Stop()), _no_room)
            except TimeoutError:
                grace = 0
        # Their ends, which `close` sees to, end the watch; it is over before its sockets are closed.
        self._way.close(grace)
        if self._watcher is not None:
            self._watcher.join()
        for worker in self.workers:
            worker.close()


class _Pending:
    """The result of a step that workers run."""

    def __init__(self, group: WorkerGroup, step_id: int) -> None:
        self._group = group
        self._step_id = step_id

    def result(self) -> ModelRunnerOutput:
        return self._group.result(self._step_id)


class _Stall:
    """Says when waiting has become so long that it is to be told, ever more seldom."""

    def __init__(self, seconds: float) -> None:
        self.seconds = 0.0
        self._began = time.monotonic()
        self._next = seconds

    def is_due(self) -> bool:
        self.seconds = time.monotonic() - self._began
        if self.seconds < self._next:
            return False
        self._next = 2 * self.seconds
        return True


def _no_room() -> None:
    raise TimeoutError("a worker does not read")
