"""EventLog: what happened to requests since it was last taken, by front end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from protos.messages import Admitted, EngineCoreOutputs, Finished

if TYPE_CHECKING:
    import numpy.typing as npt


@dataclass(slots=True)
class _Pending:
    handles: list[bytes] = field(default_factory=list)
    token_ids: list[bytes] = field(default_factory=list)
    admitted: list[Admitted] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)


class EventLog:
    """Gathers tokens as columns and the rare events as structs, one EngineCoreOutputs per front end."""

    def __init__(self) -> None:
        self._pending: dict[int, _Pending] = {}
        self.num_tokens = 0
        """Tokens ever recorded."""

    def tokens(
        self, clients: npt.NDArray[np.int32], handles: npt.NDArray[np.int64], token_ids: npt.NDArray[np.int32]
    ) -> None:
        """One new token each for some requests."""
        self.num_tokens += len(clients)
        if not len(clients):
            return
        first = int(clients[0])
        if (clients == first).all():
            self._append(first, handles, token_ids)
            return
        for client in np.unique(clients):
            chosen = clients == client
            self._append(int(client), handles[chosen], token_ids[chosen])

    def admitted(self, client: int, event: Admitted) -> None:
        self._of(client).admitted.append(event)

    def finished(self, client: int, event: Finished) -> None:
        self._of(client).finished.append(event)

    def take(self) -> dict[int, EngineCoreOutputs]:
        """Everything since the last call."""
        pending, self._pending = self._pending, {}
        return {
            client: EngineCoreOutputs(
                handles=b"".join(events.handles),
                token_ids=b"".join(events.token_ids),
                admitted=events.admitted,
                finished=events.finished,
            )
            for client, events in pending.items()
        }

    def _of(self, client: int) -> _Pending:
        return self._pending.setdefault(client, _Pending())

    def _append(self, client: int, handles: npt.NDArray[np.int64], token_ids: npt.NDArray[np.int32]) -> None:
        events = self._of(client)
        events.handles.append(handles.astype("<i8", copy=False).tobytes())
        events.token_ids.append(token_ids.astype("<i4", copy=False).tobytes())
