"""CoreSlot: the place of one core in an engine: the core that is there now, what it told, and the next when it dies."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, NoReturn, Protocol

from protos.errors import TailraceError
from protos.messages import NO_STATS

if TYPE_CHECKING:
    from async_engine.core_client import CoreClient
    from async_engine.core_source import CoreSource
    from async_engine.recovery import Recovery
    from async_engine.request_state import RequestState
    from protos.messages import CoreStats, EngineCoreOutputs, ToCore

logger = logging.getLogger(__name__)

LATE_SECONDS = 30.0
"""For which those that a dead core had just begun with wait for the next one there, rather than for another."""


class SlotOwner(Protocol):
    """Who has the slots, and knows the requests."""

    def took(self, slot: CoreSlot, outputs: EngineCoreOutputs) -> None:
        """A core brought something."""

    def went_down(self, slot: CoreSlot, requests: list[RequestState]) -> None:
        """A core died; others may go on with these of its requests at once."""

    def stays_down(self, slot: CoreSlot) -> None:
        """It takes long to replace its core, an attempt failed, or there is to be none."""

    def others_serve(self, slot: CoreSlot) -> bool:
        """Whether another core is up."""

    async def prepare(self, slot: CoreSlot) -> None:
        """Tells a new core what it must know before its first request."""

    def came_up(self, slot: CoreSlot) -> None:
        """A new core can serve."""


class CoreSlot:
    """One of an engine's cores, by its number."""

    def __init__(self, number: int, source: CoreSource, core: CoreClient, recovery: Recovery) -> None:
        self.number = number
        self.core = core
        """The one that is there, or was there last."""
        self.recovery = recovery
        self.is_up = True
        self.is_late = False
        """Whether it is down, and not likely to be up soon."""
        self.stats = NO_STATS
        """What the core told last, with the totals of the cores before it."""
        self.error: TailraceError | None = None
        """Why there is to be no core here any more."""
        self._past_stats = NO_STATS
        self._source = source

    def __repr__(self) -> str:
        return f"CoreSlot({self._source.name}, {'up' if self.is_up else 'down'})"

    def send(self, message: ToCore) -> None:
        self.core.send(message)

    def observe(self, stats: CoreStats) -> None:
        self.stats = stats.after(self._past_stats)

    async def run(self, owner: SlotOwner) -> None:
        """Takes in what the core brings and replaces it when it dies, until there is to be no other; `error` then says
        why."""
        while self.error is None:
            try:
                await self._read(owner)
            except TailraceError as error:
                await self._replace(owner, error)

    async def _read(self, owner: SlotOwner) -> NoReturn:
        """Raises what the core died of."""
        while True:
            owner.took(self, await self.core.outputs())
            # Readers run between two messages, however fast the core is.
            await asyncio.sleep(0)

    async def _replace(self, owner: SlotOwner, error: TailraceError) -> None:
        self.is_up = False
        self.stats = self._past_stats = NO_STATS.after(self.stats)
        owner.went_down(self, self.recovery.core_died(self.core.entering, self.core.was_killed))
        await self.core.close(grace=0)
        before = self.core
        late = asyncio.get_running_loop().call_later(LATE_SECONDS, self._stay_down, owner)
        try:
            await self._start_again(owner, error, before)
        finally:
            late.cancel()

    async def _start_again(self, owner: SlotOwner, error: TailraceError, before: CoreClient) -> None:
        while True:
            delay = self.recovery.next_delay(owner.others_serve(self))
            if delay is None:
                self.error = error
                self._stay_down(owner)
                return
            who = "" if self._source.name in str(error) else f"{self._source.name}: "
            logger.error("%s%s; starting another in %.1f s", who, error, delay)
            await asyncio.sleep(delay)
            try:
                self.core = await self._source.start(before, None)
            except TailraceError as failure:
                error = failure
                self._stay_down(owner)
                continue
            if not self._source.is_ours:
                self.recovery.core_found()
            await owner.prepare(self)
            # No await from here on: what was submitted meanwhile is told with the others.
            self.is_up, self.is_late = True, False
            owner.came_up(self)
            return

    def _stay_down(self, owner: SlotOwner) -> None:
        self.is_late = True
        owner.stays_down(self)
