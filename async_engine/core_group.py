"""CoreGroup: the cores of an engine, and which of them each request is in."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from async_engine.adapters import LoadedAdapters
from async_engine.core_slot import CoreSlot
from async_engine.kv_watch import KVWatches
from async_engine.prefix_map import prefix_hashes
from async_engine.recovery import Recovery, resubmissions
from async_engine.router import Router
from async_engine.stats_table import StatsTable
from core_proc.block_hash import request_root
from protos.errors import CoreDiedError, RequestFailedError, StartupError, TailraceError, UnavailableError
from protos.kv_changes import ROUTER_WATCH, WatchKV
from protos.messages import Abort, Control, CoreReady, CoreStats

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Sequence

    from async_engine.core_client import CoreClient
    from async_engine.core_source import CoreSource
    from async_engine.input_processor import Accepted
    from async_engine.output_processor import OutputProcessor
    from async_engine.request_state import RequestState
    from protos.messages import ControlOp, EngineCoreOutputs, Vocabulary

logger = logging.getLogger(__name__)

INLINE_TOKENS = 1024
"""Prompts up to this length are hashed on the event loop: 0.1 ms. Longer ones take a thread."""


class CoreGroup:
    """One core or several behind one AsyncLLM. Each request is in one of them; handles are unique among all.

    Where there are several, a router chooses. The requests of a core that dies go on in the others at once, or in the
    first that is there again. `is_live` tells whether somebody still waits for a request; `on_stats` is told the sums
    of what the cores tell; `vocabulary` makes what the cores need for grammars; a core is replaced up to
    `max_core_restarts` times in a row.
    """

    def __init__(
        self,
        cores: Sequence[tuple[CoreSource, CoreClient]],
        processor: OutputProcessor,
        is_live: Callable[[RequestState], bool],
        on_stats: Callable[[CoreStats], None],
        vocabulary: Callable[[], Vocabulary],
        max_core_restarts: int,
    ) -> None:
        self.ready = _together([core.ready for _, core in cores])
        """What the cores hold together; `max_model_len` is of each."""
        self.error: TailraceError | None = None
        """Why the engine cannot go on; None while it can."""
        self.slots = [
            CoreSlot(number, source, core, Recovery(processor, is_live, max_core_restarts, number))
            for number, (source, core) in enumerate(cores)
        ]
        rows = [core.ready.max_num_seqs for _, core in cores]
        self._router = Router(rows, self.ready.block_size) if len(cores) > 1 else None
        self.kv_watches = KVWatches(self.slots)
        self.adapters = LoadedAdapters(self.slots, processor)
        self._stats = StatsTable([core.ready.kv_capacity_tokens for _, core in cores])
        self._processor = processor
        self._is_live = is_live
        self._on_stats = on_stats
        self._vocabulary = vocabulary
        self._pause: ControlOp | None = None
        self._telling_vocabulary: asyncio.Task[None] | None = None

    @property
    def is_up(self) -> bool:
        """Whether a core can take requests; else they wait for one."""
        return any(slot.is_up for slot in self.slots)

    @property
    def stats(self) -> CoreStats:
        """What the cores told last, together, with the totals of those before them."""
        return self._stats.sum()

    @property
    def num_restarts(self) -> int:
        return sum(slot.recovery.num_restarts for slot in self.slots)

    @property
    def silent_seconds(self) -> float:
        """Since a core was last heard of that is up."""
        return min(slot.core.silent_seconds for slot in self._up() or self.slots)

    # Requests ---------------------------------------------------------------------------------

    async def look_at(self, request: RequestState, accepted: Accepted) -> None:
        """Finds out what of a request a core may hold already; awaits only where the prompt is long."""
        params = accepted.params
        if self._router is None or accepted.request.bypass_cache or params.prompt_logprobs is not None:
            return
        token_ids = np.array([*accepted.prompt_token_ids, *accepted.request.resume_token_ids], np.int32)
        name = accepted.request.adapter
        adapter = self.adapters.find(name) if name else None
        root = request_root(accepted.request.cache_salt, "" if adapter is None else adapter.digest)
        arguments = token_ids, self.ready.block_size, root
        if len(token_ids) <= INLINE_TOKENS:
            request.prefix_hashes = prefix_hashes(*arguments)
        else:
            request.prefix_hashes = await asyncio.to_thread(prefix_hashes, *arguments)

    def submit(self, request: RequestState) -> None:
        """Sends a new request to a core. While none is up it waits: the next one is told of it."""
        slot = self._choose(request)
        if slot is not None:
            assert request.message is not None
            slot.send(request.message)

    def abort(self, request: RequestState, handles: list[int]) -> None:
        """Ends sequences of a request in its core, if it is in one."""
        if request.core is not None:
            self.slots[request.core].send(Abort(handles))

    async def progress(self, request: RequestState) -> list[int]:
        """[requests ahead in the queue, prompt tokens computed]; empty if its core does not know it any more."""
        if request.core is None:
            return [0, 0]
        try:
            return await self.slots[request.core].core.call("progress", request.handle)
        except CoreDiedError:  # it starts over
            return [0, 0]

    def _choose(self, request: RequestState) -> CoreSlot | None:
        """The core a request is to be in; None while none is up."""
        if self._router is None:
            slot = next(iter(self._up()), None)
        else:
            self.ended(request)
            num_tokens = request.prompt_tokens + request.output_tokens
            request.ticket = self._router.route(request.prefix_hashes, num_tokens, len(request.sequences))
            slot = None if request.ticket is None else self.slots[request.ticket.core]
        request.core = None if slot is None else slot.number
        return slot

    def began(self, request: RequestState) -> None:
        """The first token of a request came."""
        if request.ticket is not None and self._router is not None:
            self._router.computed(request.ticket)

    def ended(self, request: RequestState) -> None:
        """A request is over, or leaves its core."""
        if request.ticket is not None and self._router is not None:
            self._router.ended(request.ticket, request.drawn_tokens if request.is_ending else None)
            request.ticket = None
        if request.adapter:
            self.adapters.changed()

    def _move(self, requests: Iterable[RequestState]) -> None:
        for request in requests:
            slot = self._choose(request)
            if slot is not None:
                for message in resubmissions(request):
                    slot.send(message)

    # Control ----------------------------------------------------------------------------------

    @property
    def paused(self) -> bool:
        return self._pause is not None

    async def pause(self, op: ControlOp) -> None:
        """pause, freeze or resume. A core that comes up later is told, too."""
        self._pause = None if op == "resume" else op

        async def tell(slot: CoreSlot) -> None:
            with contextlib.suppress(CoreDiedError):
                await slot.core.call(op)

        await asyncio.gather(*map(tell, self._up()))

    async def reset_prefix_cache(self, restart_running: bool) -> bool:
        """False if one of the cores refused."""
        calls = [slot.core.call("reset_prefix_cache", int(restart_running)) for slot in self._up() or self.slots]
        return all(answer[0] for answer in await asyncio.gather(*calls))

    async def tell_vocabulary(self) -> None:
        """The cores learn what tokens spell when the first grammar needs it."""

        async def tell() -> None:
            vocabulary = await asyncio.to_thread(self._vocabulary)
            for slot in self._up():
                slot.send(vocabulary)

        task = self._telling_vocabulary
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            self._telling_vocabulary = asyncio.create_task(tell())
        assert self._telling_vocabulary is not None
        await asyncio.shield(self._telling_vocabulary)

    # The cores' life --------------------------------------------------------------------------

    async def run(self) -> None:
        """The output-processor task, the only reader of the cores' outputs. Its end, by `error`, ends every request."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for slot in self.slots:
                    if self._router is not None:
                        slot.send(WatchKV(ROUTER_WATCH))
                    tasks.create_task(slot.run(self), name=f"core-{slot.number}")
            self.error = next(slot.error for slot in self.slots if slot.error is not None)
        except ExceptionGroup:
            logger.exception("the output processor failed")
            self.error = RequestFailedError("the output processor failed")
        self._processor.fail_all(self.error)
        self.kv_watches.close(self.error)
        self.adapters.close(self.error)

    async def close(self) -> None:
        """Stops the cores, once `run` has ended. Idempotent."""
        self.adapters.close(UnavailableError("the engine was closed"))
        await asyncio.gather(*(slot.core.close() for slot in self.slots))

    def took(self, slot: CoreSlot, outputs: EngineCoreOutputs) -> None:
        for changes in outputs.kv_changes:
            if changes.watch != ROUTER_WATCH:
                self.kv_watches.put(slot.number, changes)
            elif self._router is not None:
                self._router.update(slot.number, changes)
        if stopped := self._processor.process(outputs):
            slot.send(Abort(stopped, stopped=True))
        # It may have worked for other front ends.
        if outputs.handles or outputs.finished or (outputs.stats is not None and outputs.stats.output_tokens):
            for message in slot.recovery.core_works():
                slot.send(message)
        if outputs.stats is not None:
            slot.observe(outputs.stats)
            self._stats.put(slot.number, slot.stats)
            if self._router is not None:
                self._router.observe(slot.number, outputs.stats)
            self._on_stats(self.stats)

    def went_down(self, slot: CoreSlot, requests: list[RequestState]) -> None:
        self._stats.put(slot.number, slot.stats)
        if self._router is not None:
            self._router.lost(slot.number)
        self.kv_watches.lost(slot.number)
        self._move(requests)

    def stays_down(self, slot: CoreSlot) -> None:
        self._pass_suspects_on()
        self.adapters.changed()

    def others_serve(self, slot: CoreSlot) -> bool:
        return any(other.is_up for other in self.slots if other is not slot)

    async def prepare(self, slot: CoreSlot) -> None:
        if self._telling_vocabulary is not None:
            slot.send(await asyncio.to_thread(self._vocabulary))
        if self._pause is not None:
            slot.send(Control(0, self._pause))

    def came_up(self, slot: CoreSlot) -> None:
        if self._router is not None:
            self._router.found(slot.number)
            slot.send(WatchKV(ROUTER_WATCH))
        self.kv_watches.found(slot)
        waiting = self._processor.requests_in(None)
        self._move([request for request in waiting if self._processor.goes_on(request, self._is_live)])
        for message in slot.recovery.core_started():
            slot.send(message)
        self._pass_suspects_on()
        self.adapters.changed()

    def _pass_suspects_on(self) -> None:
        """Those of places that stay empty go to the last core that is up: of the others none is at risk."""
        up = self._up()
        if not up:
            return
        for slot in self.slots:
            if slot.is_late:
                for message in up[-1].recovery.take_suspects(slot.recovery.give_suspects_away()):
                    up[-1].send(message)

    def _up(self) -> list[CoreSlot]:
        return [slot for slot in self.slots if slot.is_up]


async def start_cores(
    sources: Sequence[CoreSource], on_progress: Callable[[int, int], None] | None
) -> list[tuple[CoreSource, CoreClient]]:
    """All at once. Raises StartupError, and leaves no core, if one cannot be had or they do not go together."""
    loaded: dict[str, tuple[int, int]] = {}

    def report(name: str) -> Callable[[int, int], None] | None:
        def tell(done: int, total: int) -> None:
            loaded[name] = done, total
            if len(loaded) == len(sources) and on_progress is not None:
                on_progress(*map(sum, zip(*loaded.values(), strict=True)))

        return None if on_progress is None else tell

    tasks: list[asyncio.Task[CoreClient]] = []
    try:
        async with asyncio.TaskGroup() as starting:
            tasks = [starting.create_task(_start(source, report(source.name))) for source in sources]
        cores = [task.result() for task in tasks]
        _check_alike([core.ready for core in cores])
    except BaseException as error:
        started = [task.result() for task in tasks if not task.cancelled() and task.exception() is None]
        await asyncio.gather(*(core.close(grace=0) for core in started))
        if isinstance(error, BaseExceptionGroup):
            raise error.exceptions[0] from None
        raise
    return list(zip(sources, cores, strict=True))


@contextlib.asynccontextmanager
async def kept(cores: Sequence[tuple[CoreSource, CoreClient]]) -> AsyncIterator[None]:
    """Closes them if what is to have them cannot be made."""
    try:
        yield
    except BaseException:
        for _, core in cores:
            await core.close(grace=0)
        raise


async def _start(source: CoreSource, on_progress: Callable[[int, int], None] | None) -> CoreClient:
    return await source.start(None, on_progress)


def _check_alike(cores: list[CoreReady]) -> None:
    """Raises StartupError where a request would not be the same in one core as in another."""
    for name, what in (
        ("max_model_len", "context"),
        ("block_size", "block size"),
        ("device", "device"),
        ("dtype", "dtype"),
    ):
        found = dict.fromkeys(str(getattr(core, name)) for core in cores)
        if len(found) > 1:
            option = "--" + name.replace("_", "-")
            raise StartupError(f"the cores differ in their {what}: {', '.join(found)}; set {option}")


def _together(cores: list[CoreReady]) -> CoreReady:
    summed = ("kv_capacity_tokens", "max_num_seqs", "weight_bytes", "kv_cache_bytes")
    least = ("max_adapters", "max_adapter_rank")
    values = {name: sum(getattr(core, name) for core in cores) for name in summed}
    values |= {name: min(getattr(core, name) for core in cores) for name in least}
    return msgspec.structs.replace(cores[0], **values)
