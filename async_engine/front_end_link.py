"""FrontEndLink: what two front ends of a server ask one another."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, cast

from protos import codec, front_ends
from protos.errors import TailraceError
from protos.front_ends import Answer, Ask

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable

    from protos.front_ends import Question

logger = logging.getLogger(__name__)


class LinkLostError(Exception):
    """The other side is gone, or could not answer."""


class FrontEndLink(asyncio.Protocol):
    """Questions and answers over a socket, both ways at once. `answer(question)` answers the other side's."""

    def __init__(self, answer: Callable[[Question], Awaitable[Any]]) -> None:
        self._answer = answer
        self._decoder = codec.FrameDecoder(front_ends.decoder)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._num_asked = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._transport: asyncio.Transport
        self.lost = asyncio.Event()
        """Set when the other side is gone."""

    @classmethod
    async def open(cls, sock: socket.socket, answer: Callable[[Question], Awaitable[Any]]) -> FrontEndLink:
        self = cls(answer)
        await asyncio.get_running_loop().create_connection(lambda: self, sock=sock)
        return self

    async def ask(self, question: Question) -> Any:
        """The answer, as msgpack decodes it. Raises LinkLostError."""
        if self.lost.is_set():
            raise LinkLostError("it is gone")
        self._num_asked += 1
        number = self._num_asked
        self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._transport.write(codec.encode_frame(Ask(number, question)))
            return await self._waiting[number]
        finally:
            del self._waiting[number]

    def close(self) -> None:
        self._transport.close()

    # asyncio.Protocol -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        for message in self._decoder.feed(data):
            if isinstance(message, Ask):
                task = asyncio.get_running_loop().create_task(self._reply(message))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            elif (waiting := self._waiting.get(message.number)) is not None and not waiting.done():
                if message.error:
                    waiting.set_exception(LinkLostError(message.error))
                else:
                    waiting.set_result(message.answer)

    def connection_lost(self, error: Exception | None) -> None:
        self.lost.set()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(LinkLostError("it is gone"))

    async def _reply(self, ask: Ask) -> None:
        try:
            reply = Answer(ask.number, await self._answer(ask.question))
        except TailraceError as error:
            reply = Answer(ask.number, error=str(error))
        except Exception as error:
            logger.exception("a question of another front end failed")
            reply = Answer(ask.number, error=type(error).__name__)
        if not self.lost.is_set():
            self._transport.write(codec.encode_frame(reply))
