"""The core process: messages in, steps, columns out.

    reader threads: decode, hash prompts ──inbox──► main loop: step, encode, send ──► writer threads: what is not taken
                      compiler thread: grammars ───────┘

Started with the name of a module to import ahead, and the descriptors of a socket to its owner, which it lives as long
as, of the black box, and of a socket to listen on, if there is one, for other front ends. They come and go.
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
from enum import Enum, auto

import msgspec

from core_proc.ahead import import_ahead
from core_proc.black_box import BlackBox
from core_proc.clients import Clients
from core_proc.connection import OWNER, Connection
from core_proc.door import Door
from core_proc.engine_core import EngineCore
from core_proc.grammar import GrammarCompiler, Matcher
from core_proc.request import Request, State, make_request
from gpu_executor.executor import WorkersDiedError
from protos.child_process import die_with_parent
from protos.errors import StartupError, TailraceError
from protos.kv_changes import MoreKV, UnwatchKV, WatchKV
from protos.messages import (
    Abort,
    Control,
    ControlReply,
    CoreFailed,
    CoreStats,
    EngineCoreOutputs,
    EngineCoreRequest,
    GrammarSpec,
    Hello,
    LoadAdapter,
    LoadProgress,
    Ping,
    Pong,
    Shutdown,
    ToCore,
    UnloadAdapter,
    Vocabulary,
)

logger = logging.getLogger(__name__)

STATS_INTERVAL = 0.25
"""Seconds between two CoreStats while steps run."""
IDLE_COLLECT_OBJECTS = 10_000
"""Objects made since the last garbage collection that make one worth its time, when idle."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """The grammar of a request, from a compiler's thread."""

    request: Request
    matcher: Matcher | TailraceError


@dataclass(frozen=True, slots=True)
class Said:
    """What a front end said; None: it has left."""

    by: Connection
    message: ToCore | None


class Event(Enum):
    """What happened to the front ends."""

    JOINED = auto()
    HAS_ROOM = auto()
    """One that took no more outputs does so again."""


class EngineCoreProc:
    """The main loop around an EngineCore. Everything that changes the scheduler happens on its thread."""

    def __init__(
        self, owner: Connection, hello: Hello, black_box: BlackBox, listener: socket.socket | None = None
    ) -> None:
        self._inbox: queue.SimpleQueue[Said | Request | Compiled | Event | WorkersDiedError] = queue.SimpleQueue()
        self._aborts: queue.SimpleQueue[tuple[int, Abort]] = queue.SimpleQueue()
        self.clients = Clients(
            owner,
            self._receive,
            on_room=lambda: self._inbox.put(Event.HAS_ROOM),
            on_join=lambda: self._inbox.put(Event.JOINED),
        )
        if listener is not None:
            Door(listener, hello, self.clients.admit)
        self._config, self._eos_token_ids, self._adapters = hello.config, hello.eos_token_ids, hello.adapters
        self._black_box = black_box
        self._block_size = hello.config.cache.block_size
        self._grammars: GrammarCompiler | None = None
        self._stopping = False
        self._nobody_takes = False
        """Whether every front end has more to read than it should: a step would be for nobody."""
        self._stats_due = 0.0
        self._told_stats: CoreStats | None = None
        self._core: EngineCore

    def load(self) -> None:
        """Makes the engine ready, and tells so."""
        self._core = EngineCore(
            self._config,
            self._eos_token_ids,
            report=lambda done, total: self.clients.tell(LoadProgress(done, total)),
            on_entering=self._black_box.write,
            on_death=self._inbox.put,
        )
        self._core.load_again(self._adapters)
        self.clients.begin(self._core.ready, self._core.adapters.told)

    def run(self) -> None:
        """Steps until the owner leaves or asks to stop."""
        while not self._stopping:
            if not self._nobody_takes and self._core.has_work and self._core.step(self._apply_aborts):
                self._send_outputs()
                self._handle_messages()
            else:
                self._core.scheduler.expire(time.monotonic())
                self._apply_aborts()
                self._send_outputs(is_idle=True)
                self._wait_for_message()
        if self._grammars is not None:
            self._grammars.close()
        self._core.shutdown()

    # The readers' threads -------------------------------------------------------------------

    def _receive(self, connection: Connection, message: ToCore | None) -> None:
        if isinstance(message, EngineCoreRequest):
            client, max_model_len = connection.client, self._core.ready.max_model_len
            adapter = self._core.adapters.get(message.adapter) if message.adapter else None
            self._inbox.put(make_request(message, client, self._block_size, max_model_len, time.monotonic(), adapter))
        else:
            if isinstance(message, Abort):
                # Seen at the end of the step that runs; the inbox only after it.
                self._aborts.put((connection.client, message))
            self._inbox.put(Said(connection, message))

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

    def _handle(self, item: Said | Request | Compiled | Event | WorkersDiedError) -> None:
        scheduler = self._core.scheduler
        match item:
            case Request():
                self._core.add(item)
                if item.params.grammar is not None:
                    self._compile(item, item.params.grammar)
            case Compiled():
                scheduler.attach_matcher(item.request, item.matcher)
            case Said():
                self._heed(item.by, item.message)
            case WorkersDiedError():
                raise item
            case Event():
                self._nobody_takes = False
                scheduler.held_back = []  # until outputs are sent: there may be a step for it now
                self._told_stats = None  # as far as that front end knows

    def _heed(self, connection: Connection, message: ToCore | None) -> None:
        scheduler = self._core.scheduler
        match message:
            case Vocabulary():
                self._grammars = self._grammars or GrammarCompiler(message, self._core.vocab_size)
            case Abort():
                scheduler.abort(connection.client, message.handles, message.stopped)
            case Control(op="stop_profile"):
                files = self._core.profile.stop(connection.client)
                connection.send(ControlReply(message.call_id, [], files))
            case Control():
                connection.send(ControlReply(message.call_id, self._control(connection.client, message)))
            case LoadAdapter():
                self._load_adapter(connection, message)
            case UnloadAdapter():
                self._unload_adapter(connection, message)
            case WatchKV():
                scheduler.kv_cache.changes.begin(connection.client, message)
            case MoreKV():
                scheduler.kv_cache.changes.more(connection.client, message.watch)
            case UnwatchKV():
                scheduler.kv_cache.changes.end(connection.client, message.watch)
            case Ping():
                connection.send(Pong())
            case Shutdown() | None:
                if connection.client == OWNER:
                    self._stopping = True
                else:
                    self.clients.remove(connection)
                    scheduler.abort(connection.client, scheduler.table.handles(connection.client))
                    scheduler.events.forget(connection.client)
                    scheduler.kv_cache.changes.forget(connection.client)
                    self._core.profile.stop(connection.client)

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

    def _control(self, client: int, message: Control) -> list[int]:
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
            case "start_profile":
                return [int(self._core.profile.start(client))]
            case "progress":
                return scheduler.table.progress(client, message.argument)
        return []

    def _load_adapter(self, connection: Connection, message: LoadAdapter) -> None:
        try:
            is_new = self._core.load_adapter(message.adapter)
        except TailraceError as error:
            connection.send(ControlReply(message.call_id, [], error=str(error), reason=error.reason))
            return
        if is_new:
            self.clients.tell_adapters(self._core.adapters.told)
        connection.send(ControlReply(message.call_id, [int(is_new)]))

    def _unload_adapter(self, connection: Connection, message: UnloadAdapter) -> None:
        reply = ControlReply(message.call_id, [])
        if self._core.adapters.close(message.name, lambda: connection.send(reply)):
            self.clients.tell_adapters(self._core.adapters.told)
            self._free_adapters()
        else:
            connection.send(reply)

    def _free_adapters(self) -> None:
        gone = self._core.free_adapters()
        if gone:
            self.clients.tell_adapters(self._core.adapters.told)
        for on_gone in [on_gone for held in gone for on_gone in held.on_gone]:
            on_gone()

    def _apply_aborts(self) -> None:
        for _ in range(self._aborts.qsize()):
            client, message = self._aborts.get()
            self._core.scheduler.abort(client, message.handles, message.stopped)

    def _send_outputs(self, is_idle: bool = False) -> None:
        """To each front end its own, but for those that do not take them: theirs wait, and so do their requests."""
        self._free_adapters()
        full = [connection.client for connection in self.clients if not connection.has_room]
        self._core.scheduler.held_back = full
        self._nobody_takes = len(full) == len(self.clients)
        outputs = self._core.scheduler.events.take(full)
        stats = self._stats_to_tell(is_idle)
        for connection in self.clients:
            if connection.client in full:
                continue
            message = outputs.get(connection.client)
            if stats is not None:
                message = msgspec.structs.replace(message or EngineCoreOutputs(), stats=stats)
            changes = self._core.scheduler.kv_cache.changes.take(connection.client)
            if changes:
                message = msgspec.structs.replace(message or EngineCoreOutputs(), kv_changes=changes)
            if message is not None:
                connection.send(message)

    def _stats_to_tell(self, is_idle: bool) -> CoreStats | None:
        """At times while steps run, and whenever they changed while none does."""
        now = time.monotonic()
        if self._nobody_takes or (now < self._stats_due and not is_idle):
            return None
        if not is_idle:
            self._stats_due = now + STATS_INTERVAL
        stats = self._core.scheduler.stats(self._core.num_steps_in_flight)
        if stats == self._told_stats:
            return None
        self._told_stats = stats
        return stats


def main() -> int:
    die_with_parent()
    # Ctrl-C and a service manager's SIGTERM reach the whole group: the front end drains, then tells us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(format="%(asctime)s core %(levelname)s %(message)s")
    importing = import_ahead(sys.argv[1])
    socket_descriptor, box_descriptor, *listeners = map(int, sys.argv[2:])
    owner = Connection(socket.socket(fileno=socket_descriptor))
    try:
        hello = owner.read_first()
    except EOFError:
        return 1
    assert isinstance(hello, Hello)
    listener = socket.socket(fileno=listeners[0]) if listeners else None
    proc = EngineCoreProc(owner, hello, BlackBox(box_descriptor), listener)
    try:
        importing.join()
        proc.load()
        # What is here now stays; full collections of it in the loop would only stall streams.
        gc.collect()
        gc.freeze()
        gc.set_threshold(10_000, 10, 1 << 30)
        proc.run()
    except WorkersDiedError as error:
        logger.error("the core cannot go on: %s", error)
        proc.clients.tell(CoreFailed(str(error), error.was_killed))
        return 1
    except StartupError as error:
        proc.clients.tell(CoreFailed(str(error)))
        return 1
    except Exception as error:
        logger.exception("the core cannot go on")
        proc.clients.tell(CoreFailed(f"{type(error).__name__}: {error}".partition("\n")[0]))
        return 1
    finally:
        proc.clients.flush_and_close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
