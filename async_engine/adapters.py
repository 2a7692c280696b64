"""LoadedAdapters: the adapters of an engine, as its cores tell; loads and unloads them in all cores at once.

The cores know best: a front end only repeats what they told, and asks them before it says that there is no such
adapter. What one front end loads is thereby known to all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from protos.errors import (
    AdapterError,
    AdapterExistsError,
    AdapterLeavingError,
    AdapterLimitError,
    AdapterNotFoundError,
    InvalidRequestError,
    RequestFailedError,
    StartupError,
    TailraceError,
    UnavailableError,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence

    from async_engine.core_client import CoreClient
    from async_engine.core_slot import CoreSlot
    from async_engine.output_processor import OutputProcessor
    from async_engine.request import GenerationRequest
    from async_engine.served_model import ServedModel
    from protos.adapter import Adapter
    from protos.messages import Adapters, ControlReply
    from protos.model_spec import BasicSpec

T = TypeVar("T")
MAX_NAME_LENGTH = 128
"""Characters; it is kept, and told, with each block that it computed."""
MAX_PATH_BYTES = 4096
_KINDS = (AdapterError, AdapterExistsError, AdapterLeavingError, AdapterLimitError)
_ERRORS: dict[str, Callable[[str], TailraceError]] = {kind.reason: kind for kind in _KINDS}
"""What cores answer with."""


class LoadedAdapters:
    """Knows of each core what it holds. `changed` is to be called when a core comes up, or is given up, and when a
    request with an adapter is over."""

    def __init__(self, slots: Sequence[CoreSlot], processor: OutputProcessor) -> None:
        self._slots = slots
        self._processor = processor
        self._unloading: dict[str, asyncio.Task[None]] = {}
        self._loading = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._closed: TailraceError | None = None

    @property
    def names(self) -> list[str]:
        """Of those that requests may ask for, in order."""
        told = self._told()[0].loaded
        return sorted(adapter.name for adapter in told if self.find(adapter.name) is not None)

    @property
    def all(self) -> list[tuple[Adapter, bool]]:
        """By name, with whether it is being unloaded."""
        told = self._told()
        every = {adapter.name: adapter for each in told for adapter in each.loaded}
        leaving = {name for each in told for name in each.leaving} | self._unloading.keys()
        return [(every[name], name in leaving) for name in sorted(every)]

    def find(self, name: str) -> Adapter | None:
        """One that every core has, and lets new requests have."""
        if name in self._unloading:
            return None
        found = [_open(told, name) for told in self._told()]
        first = found[0]
        if first is None or any(each is None or each.digest != first.digest for each in found):
            return None
        return first

    async def resolve(self, request: GenerationRequest, model_names: Sequence[str]) -> GenerationRequest:
        """Names its adapter, where `model` does. Raises AdapterNotFoundError."""
        if not request.adapter:
            if not request.model or request.model in model_names or await self._find_anew(request.model) is None:
                return request
            return msgspec.structs.replace(request, model="", adapter=request.model)
        if len(request.adapter) > MAX_NAME_LENGTH or await self._find_anew(request.adapter) is None:
            raise _not_found("adapter", request.adapter)
        return request

    async def load(self, adapter: Adapter) -> None:
        """In all cores, or in none; goes on if who waits is cancelled.

        Raises AdapterError, AdapterExistsError, AdapterLeavingError or AdapterLimitError; UnavailableError while a core
        is being replaced, and if one dies meanwhile.
        """
        await self._over(self._start(self._load(adapter)))

    async def unload(self, name: str) -> None:
        """Nobody new may have it, from now on; returns when nobody has. Goes on likewise.

        Raises AdapterNotFoundError.
        """
        if name not in self._unloading:
            if not self._is_anywhere(name):
                await self._sync()
            if not self._is_anywhere(name):
                raise _not_found("name", name)
        # Who waited may find that another call has begun.
        task = self._unloading.get(name) or self._start(self._unload(name))
        self._unloading[name] = task
        await self._over(task)

    def changed(self) -> None:
        self._changed.set()

    def close(self, error: TailraceError) -> None:
        """There are to be no cores any more: who waits is told. Idempotent."""
        self._closed = self._closed or error
        for task in self._tasks:
            task.cancel()

    # ------------------------------------------------------------------------------------------

    def _told(self) -> list[Adapters]:
        return [slot.core.adapters for slot in self._up() or self._slots]

    def _up(self) -> list[CoreSlot]:
        return [slot for slot in self._slots if slot.is_up]

    def _is_anywhere(self, name: str) -> bool:
        return any(_holds(told, name) for told in self._told())

    async def _find_anew(self, name: str) -> Adapter | None:
        found = self.find(name)
        if found is None and name not in self._unloading:
            await self._sync()
            found = self.find(name)
        return found

    async def _sync(self) -> None:
        """Until the cores have told what others changed before."""

        async def ask(slot: CoreSlot) -> None:
            with contextlib.suppress(TailraceError):
                await slot.core.call("sync")

        await asyncio.gather(*map(ask, self._up()))

    async def _load(self, adapter: Adapter) -> None:
        async with self._loading:
            if any(not slot.is_up and slot.error is None for slot in self._slots):
                raise UnavailableError("a core is being replaced; load the adapter when it serves again")
            slots = self._up()
            new_to = [slot for slot in slots if not _holds(slot.core.adapters, adapter.name)]
            loading = (slot.core.load_adapter(adapter) for slot in slots)
            answers = await asyncio.gather(*loading, return_exceptions=True)
            errors = [error for answer in answers if (error := _error(answer)) is not None]
            if errors:
                await asyncio.gather(*(self._unload_from(slot, adapter.name) for slot in new_to))
                raise errors[0]

    async def _unload(self, name: str) -> None:
        try:
            await asyncio.gather(*(self._unload_from(slot, name) for slot in self._slots))
        finally:
            del self._unloading[name]

    async def _unload_from(self, slot: CoreSlot, name: str) -> None:
        """However often the core dies meanwhile: the next one has it again, for the requests that go on there."""
        while slot.error is None:
            await self._until(lambda: slot.is_up or slot.error is not None)
            core = slot.core
            if slot.error is not None or not _holds(core.adapters, name):
                return
            try:
                await core.unload_adapter(name)
                return
            except TailraceError:
                await self._until_replaced(slot, core)
                await self._until(lambda: not self._is_used(name))

    async def _until_replaced(self, slot: CoreSlot, core: CoreClient) -> None:
        await self._until(lambda: slot.core is not core or slot.error is not None)

    def _is_used(self, name: str) -> bool:
        return any(sequence.request.adapter == name for sequence in self._processor.sequences.values())

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def _start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        if self._closed is not None:
            work.close()
            raise self._closed.with_traceback(None)
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def _over(self, task: asyncio.Task[None]) -> None:
        """Waits for its end, which it comes to though who waits is cancelled."""
        await asyncio.wait([task])
        if task.cancelled() and self._closed is not None:
            raise self._closed.with_traceback(None)
        task.result()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # is known then, though who waited for it may have left


async def open_adapter(name: str, path: str, model: ServedModel, max_rank: int) -> Adapter:
    """Reads what can be known of an adapter's files, off the loop.

    Raises InvalidRequestError for a name or path that is none, AdapterExistsError for a name of the model's,
    AdapterError for the files.
    """
    if not 0 < len(name) <= MAX_NAME_LENGTH or not name.isprintable():
        raise InvalidRequestError("name", f"must be 1 to {MAX_NAME_LENGTH} printable characters")
    if name in model.names:
        raise AdapterExistsError(f"{name} is the model's own name")
    if not path or "\0" in path or len(path.encode(errors="replace")) > MAX_PATH_BYTES:
        raise InvalidRequestError("path", f"must be a directory's, of at most {MAX_PATH_BYTES} bytes")
    return await asyncio.to_thread(_read, name, path, model.spec, max_rank)


def _read(name: str, path: str, spec: BasicSpec, max_rank: int) -> Adapter:
    from protos.adapter_files import read_adapter  # what a server without adapters need not wait for

    return read_adapter(name, Path(path), spec, max_rank)


async def load_at_start(paths: dict[str, str], load: Callable[[str, str], Awaitable[object]]) -> None:
    """Raises StartupError for the first that cannot be loaded."""
    for name, path in paths.items():
        try:
            await load(name, path)
        except TailraceError as error:
            raise StartupError(f"adapter {name}: {error}") from None


def _open(told: Adapters, name: str) -> Adapter | None:
    if name in told.leaving:
        return None
    return next((adapter for adapter in told.loaded if adapter.name == name), None)


def _holds(told: Adapters, name: str) -> bool:
    return any(adapter.name == name for adapter in told.loaded)


def _not_found(field: str, name: str) -> AdapterNotFoundError:
    return AdapterNotFoundError(field, f"no adapter {name[:MAX_NAME_LENGTH]!r} here")


def _error(answer: ControlReply | BaseException) -> BaseException | None:
    """Why a core did not load an adapter; None if it did."""
    if isinstance(answer, BaseException):
        return answer
    return _ERRORS.get(answer.reason, RequestFailedError)(answer.error) if answer.error else None
