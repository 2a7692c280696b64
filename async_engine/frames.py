"""Frames: what an Attach call sends at a time, in messages that clients accept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protos.tailrace.v1 import generation_pb2 as pb

if TYPE_CHECKING:
    import asyncio

MAX_FRAME_TOKENS = 1 << 18
MAX_FRAME_BYTES = 1 << 20
"""Beyond this, by estimate, a frame takes no more events. Both keep frames well below the usual limit of 4 MiB."""


class Columns:
    """Plain token ids that gather for the next frame, as StepTokens has them; `wakeup` is set when some came."""

    def __init__(self, wakeup: asyncio.Event) -> None:
        self.slots: list[int] = []
        self.counts: list[int] = []
        self.token_ids: list[int] = []
        self._wakeup = wakeup

    def add(self, slot: int, token_ids: list[int]) -> None:
        self.slots.append(slot)
        self.counts.append(len(token_ids))
        self.token_ids += token_ids
        self._wakeup.set()

    def take(self) -> tuple[list[int], list[int], list[int]]:
        """(slots, counts, ids), which are then gone."""
        taken = self.slots, self.counts, self.token_ids
        self.slots, self.counts, self.token_ids = [], [], []
        return taken


class Frames:
    """One frame, and more of them once it is full."""

    def __init__(self) -> None:
        self._frames = [pb.AttachResponse()]
        self._size = 0
        """Bytes of the last one's events."""

    def with_room(self, num_bytes: int) -> pb.AttachResponse:
        """The frame for an event of this size, by estimate."""
        if self._size and self._size + num_bytes > MAX_FRAME_BYTES:
            self._begin()
        self._size += num_bytes
        return self._frames[-1]

    def add_columns(self, columns: Columns) -> None:
        """Takes the plain token ids that gathered."""
        slots, counts, token_ids = columns.take()
        if len(token_ids) == len(slots) <= MAX_FRAME_TOKENS:
            self._frames[-1].tokens.CopyFrom(pb.StepTokens(slots=slots, token_ids=token_ids))
            return
        first, start, end = 0, 0, 0
        for index, count in enumerate([*counts, 0]):
            if index == len(counts) or (end - start + count > MAX_FRAME_TOKENS and index > first):
                if self._frames[-1].HasField("tokens"):
                    self._begin()
                part = pb.StepTokens(
                    slots=slots[first:index], counts=counts[first:index], token_ids=token_ids[start:end]
                )
                self._frames[-1].tokens.CopyFrom(part)
                first, start = index, end
            end += count

    def full(self) -> list[pb.AttachResponse]:
        """Those that have anything in them."""
        return [frame for frame in self._frames if frame.events or frame.HasField("tokens")]

    def _begin(self) -> None:
        self._frames.append(pb.AttachResponse())
        self._size = 0
