"""The core process: messages in, steps, columns out.

    reader thread: decode, hash prompts ──inbox──► main loop: step ──► writer thread: encode, send
                      compiler threads: grammars ─────┘

Started with the file descriptors of a socket to its front end, which it lives as long as, and of the black box.
"""

from __future__ import annotations

import gc
import logging
import queue
import signal
import socket
import sys
import time
from dataclasses import dataclass

import msgspec

from core_proc.black_box import BlackBox
from core_proc.connection import Connection
from core_proc.engine_core import EngineCore
from core_proc.grammar import GrammarCompiler, Matcher
from core_proc.request import Request, State, make_request
from gpu_executor.executor import WorkersDiedError
from protos.child_process import die_with_parent
from protos.errors import StartupError, TailraceError
from protos.messages import (
    Abort,
    Control,
    ControlReply,
    CoreFailed,
    EngineCoreOutputs,
    EngineCoreRequest,
    GrammarSpec,
    Hello,
    LoadProgress,
    Ping,
    Pong,
    Shutdown,
    ToCore,
    Vocabulary,
)

logger = logging.getLogger(__name__)

CLIENT = 0
"""The one front end there is."""
STATS_INTERVAL = 0.25
"""Seconds between two CoreStats while steps run."""
IDLE_COLLECT_OBJECTS = 10_000
"""Objects made since the last garbage collection that make one worth its time, when idle."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """The grammar of a request, from a compiler's thread."""

    request: Request
    matcher: Matcher | TailraceError


class EngineCoreProc:
    """The main loop around an EngineCore. Everything that changes the scheduler happens on its thread."""

    def __init__(self, connection: Connection, hello: Hello, black_box: BlackBox) -> None:
        self._connection = connection
        self._inbox: queue.SimpleQueue[ToCore | Request | Compiled | WorkersDiedError] = queue.SimpleQueue()
        self._core = EngineCore(
            hello.config,
            hello.eos_token_ids,
            report=lambda done, total: connection.send(LoadProgress(done, total)),
            on_entering=black_box.write,
            on_death=self._inbox.put,
        )
        self._block_size = hello.config.cache.block_size
        self._aborts: queue.SimpleQueue[Abort] = queue.SimpleQueue()
        self._grammars: GrammarCompiler | None = None
        self._stopping = False
        self._stats_due = 0.0
        connection.send(self._core.ready)
        connection.start_reading(self._receive)

    def run(self) -> None:
        """Steps until the front end leaves or asks to stop."""
        while not self._stopping:
            if self._core.has_work and self._core.step(self._apply_aborts):
                self._send_outputs()
                self._handle_messages()
            else:
                self._core.scheduler.expire(time.monotonic())
                self._apply_aborts()
                self._send_outputs()
                self._wait_for_message()
        if self._grammars is not None:
            self._grammars.close()
        self._core.shutdown()

    # The reader's thread --------------------------------------------------------------------

    def _receive(self, message: ToCore | None) -> None:
        if message is None:
            self._inbox.put(Shutdown())
        elif isinstance(message, EngineCoreRequest):
            max_model_len = self._core.ready.max_model_len
            self._inbox.put(make_request(message, CLIENT, self._block_size, max_model_len, time.monotonic()))
        else:
            if isinstance(message, Abort):
                self._aborts.put(message)  # seen at the end of the step that runs; the inbox only after it
            self._inbox.put(message)

    # The main loop's thread -----------------------------------------------------------------

    def _handle_messages(self) -> None:
        for _ in range(self._inbox.qsize()):
            self._handle(self._inbox.get())

    def _wait_for_message(self) -> None:
        if gc.get_count()[0] > IDLE_COLLECT_OBJECTS:
            gc.collect()
        try:
            self._handle(self._inbox.get(timeout=self._core.scheduler.seconds_to_timer))
        except queue.Empty:
            return
        self._handle_messages()

    def _handle(self, message: ToCore | Request | Compiled | WorkersDiedError) -> None:
        scheduler = self._core.scheduler
        match message:
            case Request():
                scheduler.add(message)
                if message.params.grammar is not None:
                    self._compile(message, message.params.grammar)
            case Compiled():
                scheduler.attach_matcher(message.request, message.matcher)
            case Vocabulary():
                self._grammars = self._grammars or GrammarCompiler(message, self._core.vocab_size)
            case Abort():
                scheduler.abort(CLIENT, message.handles, message.stopped)
            case Control():
                self._connection.send(ControlReply(message.call_id, self._control(message)))
            case Ping():
                self._connection.send(Pong())
            case Shutdown():
                self._stopping = True
            case WorkersDiedError():
                raise message

    def _compile(self, request: Request, grammar: GrammarSpec) -> None:
        """The request waits in the queue until its grammar comes back through the inbox."""
        assert self._grammars is not None, "the vocabulary comes first"
        output = request.token_ids[request.num_prompt_tokens :].tolist()
        self._grammars.submit(
            grammar,
            output,
            done=lambda matcher: self._inbox.put(Compiled(request, matcher)),
            is_wanted=lambda: request.state is not State.FINISHED,
        )

    def _control(self, message: Control) -> list[int]:
        scheduler = self._core.scheduler
        match message.op:
            case "pause":
                scheduler.admission = "paused"
            case "freeze":
                scheduler.admission = "frozen"
            case "resume":
                scheduler.admission = "open"
            case "reset_prefix_cache":
                return [int(scheduler.reset_prefix_cache(preempt_running=bool(message.argument)))]
            case "progress":
                return scheduler.progress(CLIENT, message.argument)
        return []

    def _apply_aborts(self) -> None:
        for _ in range(self._aborts.qsize()):
            message = self._aborts.get()
            self._core.scheduler.abort(CLIENT, message.handles, message.stopped)

    def _send_outputs(self) -> None:
        outputs = self._core.scheduler.events.take().get(CLIENT)
        now = time.monotonic()
        if now >= self._stats_due or not self._core.has_work:
            self._stats_due = now + STATS_INTERVAL
            stats = self._core.scheduler.stats(self._core.num_steps_in_flight)
            outputs = msgspec.structs.replace(outputs or EngineCoreOutputs(), stats=stats)
        if outputs is not None:
            self._connection.send(outputs)


def main() -> int:
    die_with_parent()
    # Ctrl-C and a service manager's SIGTERM reach the whole group: the front end drains, then tells us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(format="%(asctime)s core %(levelname)s %(message)s")
    socket_descriptor, box_descriptor = map(int, sys.argv[1:])
    connection = Connection(socket.socket(fileno=socket_descriptor))
    try:
        hello = connection.read_first()
        assert isinstance(hello, Hello)
        proc = EngineCoreProc(connection, hello, BlackBox(box_descriptor))
        # What is here now stays; full collections of it in the loop would only stall streams.
        gc.collect()
        gc.freeze()
        gc.set_threshold(10_000, 10, 1 << 30)
        proc.run()
    except WorkersDiedError as error:
        logger.error("the core cannot go on: %s", error)
        connection.send(CoreFailed(str(error)))
        return 1
    except StartupError as error:
        connection.send(CoreFailed(str(error)))
        return 1
    except Exception as error:
        logger.exception("the core cannot go on")
        connection.send(CoreFailed(f"{type(error).__name__}: {error}".partition("\n")[0]))
        return 1
    finally:
        connection.flush_and_close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
