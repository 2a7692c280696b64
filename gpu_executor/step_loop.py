"""StepLoop: what a worker in a process of its own does with the messages that come, whatever way they take."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING, NoReturn

from gpu_executor import wire
from gpu_executor.executor import WorkersDiedError
from gpu_executor.uniproc import LaunchedStep, Outcome, SingleWorker, sample_behind
from protos.config import EngineConfig
from protos.errors import AdapterError, StartupError
from protos.place import Place
from protos.python_profile import PythonProfile

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpu_executor.executor import PendingOutput
    from protos.step import SchedulerOutput

MakeWorker = Callable[[EngineConfig, tuple[int, ...], Place], SingleWorker]
logger = logging.getLogger(__name__)


class StepLoop:
    """Carries out steps in the order their messages come, and tells their results: all workers in the same way, so
    that a step that fails on all of them leaves them at one."""

    def __init__(
        self, worker: SingleWorker, is_output: bool, send: Callable[[wire.FromWorker], None], num_steps: int
    ) -> None:
        """`is_output`: this is the worker that tells what was drawn. Failures all tell.

        Of `num_steps` that are in flight the next is begun while the last one's result is waited for, on a thread;
        results are then sent from there.
        """
        self._worker = worker
        self._is_output = is_output
        self._send = send
        self._forward: tuple[int, Outcome[None]] | None = None
        """The step last executed, and what came of it."""
        self._results: SimpleQueue[tuple[int, PendingOutput] | None] = SimpleQueue()
        self._sender: threading.Thread | None = None
        self._sending = threading.Lock()
        self._profile: PythonProfile | None = None
        if num_steps > 1:
            self._sender = threading.Thread(target=self._send_results, name="results", daemon=True)
            self._sender.start()

    def handle(self, message: wire.ToWorker) -> bool:
        """Carries out a message; False if it is the last."""
        match message:
            case wire.Execute():
                self._execute(message.step)
            case wire.Sample():
                self._sample(message)
            case wire.LoadAdapter():
                self._load_adapter(message)
            case wire.UnloadAdapter():
                self._worker.unload_adapter(message.slot)
            case wire.StartProfile():
                self._worker.start_profile()
                self._profile = PythonProfile()
            case wire.StopProfile():
                self._stop_profile()
            case wire.Stop():
                return False
        return True

    def close(self) -> None:
        """Returns when all results are sent."""
        if self._sender is not None:
            self._results.put(None)
            self._sender.join()

    def _load_adapter(self, message: wire.LoadAdapter) -> None:
        error = ""
        try:
            self._worker.load_adapter(message.slot, message.adapter)
        except AdapterError as known:
            error = str(known)
        except WorkersDiedError as death:
            _die(death)
        except Exception as unknown:
            logger.exception("adapter %s cannot be loaded", message.adapter.name)
            error = wire.one_line(unknown)
        self._tell(wire.AdapterLoaded(error))

    def _stop_profile(self) -> None:
        files = {}
        if self._profile is not None:
            files = {"pstats": self._profile.stop()} | self._worker.stop_profile()
            self._profile = None
        self._tell(wire.Profiled(files))

    def _tell(self, message: wire.FromWorker) -> None:
        with self._sending:
            self._send(message)

    def _execute(self, step: SchedulerOutput) -> None:
        self._forward = step.step_id, Outcome(lambda: self._worker.execute(step))

    def _sample(self, message: wire.Sample) -> None:
        assert self._forward is not None, "sample without execute"
        step_id, forward = self._forward
        pending = LaunchedStep(Outcome(lambda: sample_behind(forward, self._worker, message.mask)))
        if self._sender is None:
            self._send_result(step_id, pending)
        else:
            self._results.put((step_id, pending))

    def _send_results(self) -> None:
        try:
            while (one := self._results.get()) is not None:
                self._send_result(*one)
        except OSError:
            logger.info("the core is gone")  # so are its messages

    def _send_result(self, step_id: int, pending: PendingOutput) -> None:
        try:
            output = pending.result()
        except WorkersDiedError as error:
            _die(error)
        except Exception as error:
            logger.exception("step %d failed", step_id)
            self._tell(wire.StepFailed(step_id, wire.one_line(error)))
        else:
            if self._is_output:
                self._tell(wire.Drawn(output))


def _die(error: WorkersDiedError) -> NoReturn:
    """Nothing runs here any more, and this may be any thread: the core sees it by the end of the process."""
    logger.error("%s", error)
    logging.shutdown()
    os._exit(1)


def serve(
    make: MakeWorker, start: wire.Start, messages: Iterable[wire.ToWorker], send: Callable[[wire.FromWorker], None]
) -> int:
    """A worker's life in a process of its own, from loading to the last message; the exit code."""
    try:
        worker = make(start.config, start.eos_token_ids, start.place)
        info = worker.load(lambda done, total: send(wire.Loading(done, total)))
    except StartupError as error:
        send(wire.LoadFailed(str(error), is_known=True, time=time.time()))
        return 1
    except Exception as error:
        logger.exception("the worker cannot start")
        send(wire.LoadFailed(wire.one_line(error), is_known=False, time=time.time()))
        return 1
    send(wire.Loaded(info))
    # What is here now stays; full collections of it between steps would only stall streams.
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 1 << 30)
    loop = StepLoop(worker, start.place.tells_output, send, info.max_steps_in_flight)
    for message in messages:
        if not loop.handle(message):
            break
    loop.close()
    return 0
