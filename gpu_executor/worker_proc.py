"""The process of one worker of several: messages from the ring, steps, results on the socket to the core.

Started with the descriptors of the socket, the ring and the eventfd that wakes it. It lives as long as the core.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING

from gpu_executor import wire
from gpu_executor.ring import RingReader
from gpu_executor.uniproc import make_worker
from protos import codec
from protos.child_process import die_with_parent
from protos.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpu_executor.uniproc import SingleWorker
    from protos.step import SchedulerOutput

logger = logging.getLogger(__name__)


class StepLoop:
    """Carries out steps in the order their messages come, and tells their results: all workers in the same way, so
    that a step that fails on all of them leaves them at one."""

    def __init__(self, worker: SingleWorker, is_output: bool, send: Callable[[wire.FromWorker], None]) -> None:
        """`is_output`: this is the worker that tells what was drawn. Failures all tell."""
        self._worker = worker
        self._is_output = is_output
        self._send = send
        self._step: SchedulerOutput | None = None
        self._error: Exception | None = None

    def handle(self, message: wire.ToWorker) -> bool:
        """Carries out a message; False if it is the last."""
        match message:
            case wire.Execute():
                self._execute(message.step)
            case wire.Sample():
                self._sample(message)
            case wire.Stop():
                return False
        return True

    def _execute(self, step: SchedulerOutput) -> None:
        self._step, self._error = step, None
        try:
            self._worker.execute(step)
        except Exception as error:
            self._error = error

    def _sample(self, message: wire.Sample) -> None:
        assert self._step is not None, "sample without execute"
        step_id = self._step.step_id
        try:
            if self._error is not None:
                raise self._error
            output = self._worker.sample(message.mask)
        except Exception as error:
            logger.exception("step %d failed", step_id)
            self._send(wire.StepFailed(step_id, wire.one_line(error)))
        else:
            if self._is_output:
                self._send(wire.Drawn(output))


def main() -> int:
    die_with_parent()
    # What the terminal or a service manager sends to all of us is for the front end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    socket_descriptor, ring_descriptor, wake = map(int, sys.argv[1:])
    for descriptor in (ring_descriptor, wake):
        os.set_inheritable(descriptor, False)
    channel = socket.socket(fileno=socket_descriptor)

    def send(message: wire.FromWorker) -> None:
        channel.sendall(codec.frame(message, wire.encoder))

    start = _read_start(channel)
    place = start.place
    logging.basicConfig(format=f"%(asctime)s worker {place.rank} %(levelname)s %(message)s")
    ring = RingReader(ring_descriptor, wake, place.rank, start.spin_seconds)
    try:
        worker = make_worker(start.config, start.eos_token_ids, place)
        info = worker.load(lambda done, total: send(wire.Loading(done, total)))
    except StartupError as error:
        send(wire.LoadFailed(str(error), is_known=True))
        return 1
    except Exception as error:
        logger.exception("the worker cannot start")
        send(wire.LoadFailed(wire.one_line(error), is_known=False))
        return 1
    send(wire.Loaded(info))
    # What is here now stays; full collections of it between steps would only stall streams.
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 1 << 30)
    loop = StepLoop(worker, place.tells_output, send)
    while loop.handle(wire.to_worker.decode(ring.read())):
        pass
    return 0


def _read_start(channel: socket.socket) -> wire.Start:
    decoder = codec.FrameDecoder(wire.start)
    while data := channel.recv(1 << 16):
        for message in decoder.feed(data):
            return message
    raise EOFError("the core left before it said what to load")


if __name__ == "__main__":
    sys.exit(main())
