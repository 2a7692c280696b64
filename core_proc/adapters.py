"""AdapterTable: which adapters a core holds, each in a slot of its workers, and who still needs them.

    load ──► open ──close──► closed ──last request over, its steps back──► gone, the slot free

A request finds its adapter when it comes, and keeps it: what has the same name later is another one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from protos.errors import AdapterExistsError, AdapterLeavingError, AdapterLimitError
from protos.messages import Adapters

if TYPE_CHECKING:
    from collections.abc import Callable

    from protos.adapter import Adapter


@dataclass(slots=True, eq=False)
class HeldAdapter:
    """One that is loaded, or was until its last request was over."""

    adapter: Adapter
    slot: int
    """From 1; 0 is the model alone."""
    num_requests: int = 0
    last_step: int = -1
    """Number of the last step that computed one of those that are over."""
    is_leaving: bool = False
    """Front ends are told that it takes no new requests."""
    is_closed: bool = False
    """It takes none."""
    on_gone: list[Callable[[], None]] = field(default_factory=list)

    def leave(self, last_step: int) -> None:
        """A request of it is over."""
        self.num_requests -= 1
        self.last_step = max(self.last_step, last_step)


class AdapterTable:
    """By name. `get` is called on any thread, all else on the main loop's."""

    def __init__(self, max_adapters: int) -> None:
        self._held: dict[str, HeldAdapter] = {}
        self._free = list(range(max_adapters, 0, -1))

    @property
    def told(self) -> Adapters:
        """What front ends are to know."""
        held = self._held.values()
        return Adapters([each.adapter for each in held], [each.adapter.name for each in held if each.is_leaving])

    def get(self, name: str) -> HeldAdapter | None:
        return self._held.get(name)

    def load(self, adapter: Adapter, put: Callable[[int, Adapter], None]) -> bool:
        """False if it is there already; else `put(slot, adapter)` loads it, and what that raises leaves nothing.

        Raises AdapterExistsError, AdapterLeavingError or AdapterLimitError.
        """
        held = self._held.get(adapter.name)
        if held is not None:
            if held.is_leaving:
                raise AdapterLeavingError(f"adapter {adapter.name} is being unloaded; load it when that is done")
            if held.adapter.digest != adapter.digest:
                raise AdapterExistsError(f"an adapter {adapter.name} with other weights is loaded; unload it first")
            return False
        if not self._free:
            raise AdapterLimitError(f"{len(self._held)} adapters are loaded, as many as may be (--max-adapters)")
        put(self._free[-1], adapter)
        self._held[adapter.name] = HeldAdapter(adapter, self._free.pop())
        return True

    def close(self, name: str, on_gone: Callable[[], None]) -> bool:
        """No new requests for it from now on; `on_gone()` once it is taken out. False if there is none."""
        held = self._held.get(name)
        if held is None:
            return False
        held.is_leaving = held.is_closed = True
        held.on_gone.append(on_gone)
        return True

    def take_out(self, last_returned_step: int) -> list[HeldAdapter]:
        """Those that were closed and nobody needs any more: their slots are free."""
        gone = [
            held
            for held in self._held.values()
            if held.is_closed and not held.num_requests and held.last_step <= last_returned_step
        ]
        for held in gone:
            del self._held[held.adapter.name]
            self._free.append(held.slot)
        return gone
