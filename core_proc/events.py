"""EventLog: what happened to requests since it was last taken, by front end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from core_proc.logprobs import select_tokens, to_columns
from protos.messages import Admitted, EngineCoreOutputs, Finished, PromptLogprobs

if TYPE_CHECKING:
    from collections.abc import Collection

    import numpy.typing as npt

    from protos.step import Logprobs


@dataclass(slots=True)
class _Pending:
    handles: list[bytes] = field(default_factory=list)
    token_ids: list[bytes] = field(default_factory=list)
    num_tokens: int = 0
    logprobs: list[tuple[int, Logprobs]] = field(default_factory=list)
    """Parts, each with the number of tokens before it."""
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    admitted: list[Admitted] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)


class EventLog:
    """Gathers tokens as columns and the rare events as structs, one EngineCoreOutputs per front end."""

    def __init__(self) -> None:
        self._pending: dict[int, _Pending] = {}
        self.num_tokens = 0
        """Tokens ever recorded."""

    def tokens(
        self,
        clients: npt.NDArray[np.int32],
        handles: npt.NDArray[np.int64],
        token_ids: npt.NDArray[np.int32],
        logprobs: Logprobs | None = None,
    ) -> None:
        """One new token each for some requests, and what some of them want to know of theirs."""
        self.num_tokens += len(clients)
        if not len(clients):
            return
        first = int(clients[0])
        if (clients == first).all():
            self._append(first, handles, token_ids, logprobs)
            return
        for client in np.unique(clients):
            chosen = clients == client
            self._append(int(client), handles[chosen], token_ids[chosen], select_tokens(logprobs, chosen))

    def prompt_logprobs(self, client: int, handle: int, offset: int, logprobs: Logprobs) -> None:
        """Of consecutive prompt tokens, the first at `offset`."""
        columns = to_columns([(0, logprobs)])
        assert columns is not None
        self._of(client).prompt_logprobs.append(PromptLogprobs(handle, offset, columns))

    def admitted(self, client: int, event: Admitted) -> None:
        self._of(client).admitted.append(event)

    def finished(self, client: int, event: Finished) -> None:
        self._of(client).finished.append(event)

    def forget(self, client: int) -> None:
        """Nobody takes what is for this front end any more."""
        self._pending.pop(client, None)

    def take(self, but_for: Collection[int] = ()) -> dict[int, EngineCoreOutputs]:
        """Everything since the last call; what is for the front ends `but_for` stays."""
        pending, self._pending = self._pending, {}
        for client in but_for:
            if client in pending:
                self._pending[client] = pending.pop(client)
        return {
            client: EngineCoreOutputs(
                handles=b"".join(events.handles),
                token_ids=b"".join(events.token_ids),
                admitted=events.admitted,
                finished=events.finished,
                logprobs=to_columns(events.logprobs),
                prompt_logprobs=events.prompt_logprobs,
            )
            for client, events in pending.items()
        }

    def _of(self, client: int) -> _Pending:
        return self._pending.setdefault(client, _Pending())

    def _append(
        self,
        client: int,
        handles: npt.NDArray[np.int64],
        token_ids: npt.NDArray[np.int32],
        logprobs: Logprobs | None,
    ) -> None:
        events = self._of(client)
        if logprobs is not None and len(logprobs.index):
            events.logprobs.append((events.num_tokens, logprobs))
        events.num_tokens += len(token_ids)
        events.handles.append(handles.astype("<i8", copy=False).tobytes())
        events.token_ids.append(token_ids.astype("<i4", copy=False).tobytes())
