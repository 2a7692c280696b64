"""One more front end of a server: takes calls on the same port, over the same cores.

Started with the descriptor of a socket to the first front end, which tells it all, and lives as long as that.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from typing import TYPE_CHECKING, Any

import msgspec
import uvloop

from async_engine.async_llm import AsyncLLM
from async_engine.commands import set_up_log
from async_engine.front_end_link import FrontEndLink, LinkLostError
from async_engine.front_end_report import FrontEndReport
from async_engine.metrics import Metrics, samples
from async_engine.own_process import settle
from async_engine.server import Server
from protos.child_process import die_with_parent
from protos.front_ends import Begin, Cancel, Drain, GetReport, ListLive, Pause, Scrape

if TYPE_CHECKING:
    from protos.front_ends import Question

logger = logging.getLogger(__name__)


class FrontEnd:
    """Answers the first front end's questions, of which Begin is the first."""

    def __init__(self) -> None:
        self.died = asyncio.Event()
        """Set when its engine cannot go on."""
        self._link: FrontEndLink
        self._llm: AsyncLLM
        self._server: Server
        self._report: FrontEndReport
        self._metrics: Metrics
        self._watch: asyncio.Task[None] | None = None

    async def run(self, sock: socket.socket) -> int:
        """The exit code."""
        self._link = await FrontEndLink.open(sock, self._answer)
        waits = [asyncio.create_task(event.wait()) for event in (self._link.lost, self.died)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if self._watch is not None:
            self._watch.cancel()
            await self._server.stop(drain_seconds=0)
            await self._llm.close()
        return int(self.died.is_set())

    async def _answer(self, question: Question) -> Any:
        match question:
            case Begin():
                await self._begin(question)
            case Cancel():
                return self._llm.cancel(question.request_id, question.caller)
            case Pause():
                await self._llm.cores.pause(question.op)
            case Drain():
                return await self._server.drain(question.seconds)
            case ListLive():
                return self._report.live(question.limit)
            case GetReport():
                return self._report.report()
            case Scrape():
                return samples(self._metrics.registry.collect())

    async def _begin(self, begin: Begin) -> None:
        config = begin.config
        set_up_log(config.server)
        self._llm = await AsyncLLM.join(
            begin.cores,
            begin.secret,
            config.model.model,
            served_name=config.server.served_model_name,
            admission=config.admission,
            max_core_restarts=config.server.max_core_restarts,
            hang_timeout=config.server.hang_timeout,
        )
        self._llm.share_cores(self._cancel_elsewhere)
        # What is for all front ends together is on the first one's addresses.
        own = msgspec.structs.replace(
            config.server, admin_listen="", metrics_listen="", health_listen="", channelz=False
        )
        self._server = Server(own, shares_port=True)
        self._report = FrontEndReport(self._llm)
        self._metrics = Metrics(self._llm)
        await self._server.listen()
        await self._server.start(self._llm)
        self._watch = asyncio.create_task(self._watch_engine())
        settle()

    async def _cancel_elsewhere(self, request_id: str, caller: str) -> bool:
        try:
            return bool(await self._link.ask(Cancel(request_id, caller)))
        except LinkLostError:
            return False

    async def _watch_engine(self) -> None:
        logger.error("%s", await self._llm.died())
        self.died.set()


def main() -> int:
    die_with_parent()
    # They reach the whole group: the first front end drains all, and then hangs up.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sock = socket.socket(fileno=int(sys.argv[1]))
    return uvloop.run(FrontEnd().run(sock))


if __name__ == "__main__":
    sys.exit(main())
