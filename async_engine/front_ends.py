"""FrontEnds: the other front ends of a server, as the first one sees them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import msgspec

from async_engine.core_process import explain_exit
from async_engine.front_end_link import FrontEndLink, LinkLostError
from async_engine.metrics import Totals
from protos.child_process import child_environment
from protos.errors import StartupError
from protos.front_ends import Cancel, Drain, Pause, Sample, Scrape

if TYPE_CHECKING:
    from async_engine.async_llm import AsyncLLM
    from protos.front_ends import Begin, Question

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 5.0
LASTING_SECONDS = 10.0
"""A front end that served for so long is replaced at once, others ever later."""
BACKOFF_SECONDS = 0.5
MAX_BACKOFF_SECONDS = 30.0


class FrontEnds:
    """Starts them, and others in their place when they die; asks them. They die with us, however we do."""

    def __init__(self, llm: AsyncLLM, begin: Begin, count: int) -> None:
        self._llm = llm
        self._begin = begin
        self._members = [_Member(number) for number in range(1, count + 1)]
        self._watchers: list[asyncio.Task[None]] = []
        self.past = Totals()
        """What those that died had counted when they were asked last."""
        self._pause: Pause | None = None
        self._draining = False
        llm.share_cores(self._cancel_elsewhere)

    async def start(self) -> None:
        """Returns when all serve. Raises StartupError, and leaves none, if one cannot."""
        try:
            await asyncio.gather(*(member.start(self._begin, self._answer) for member in self._members))
        except BaseException:
            await self.close()
            raise
        self._watchers = [asyncio.create_task(self._keep_up(member)) for member in self._members]

    async def ask(self, question: Question, but: FrontEndLink | None = None) -> list[Any]:
        """The answers of those that are there. What all are to do, those that come later do, too."""
        if isinstance(question, Pause):
            self._pause = question
        self._draining |= isinstance(question, Drain)
        links = [member.link for member in self._members if member.is_up and member.link is not but]
        answers = await asyncio.gather(*(link.ask(question) for link in links), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, LinkLostError):
                raise answer
        return [answer for answer in answers if not isinstance(answer, LinkLostError)]

    async def scrape(self) -> Totals:
        """What they have counted, the dead ones included."""
        for member in [member for member in self._members if member.is_up]:
            with contextlib.suppress(LinkLostError):
                member.samples = msgspec.convert(await member.link.ask(Scrape()), list[Sample])
        totals = self.past.copy()
        for member in self._members:
            if member.is_up:
                totals.add(member.samples)
        return totals

    async def close(self) -> None:
        """Hangs up, and returns when they are gone. Idempotent."""
        for watcher in self._watchers:
            watcher.cancel()
        if self._watchers:
            await asyncio.wait(self._watchers)
        await asyncio.gather(*(member.end(CLOSE_SECONDS) for member in self._members))

    async def _answer(self, link: FrontEndLink, question: Question) -> Any:
        """The questions of another front end: it does not have the request here."""
        assert isinstance(question, Cancel)
        if self._llm.cancel(question.request_id, question.caller):
            return True
        return any(await self.ask(question, but=link))

    async def _cancel_elsewhere(self, request_id: str, caller: str) -> bool:
        return any(await self.ask(Cancel(request_id, caller)))

    async def _keep_up(self, member: _Member) -> None:
        in_vain = 0
        while True:
            began = time.monotonic()
            if member.is_up:
                await member.link.lost.wait()
                self.past.add(member.samples, gauges=False)
                member.samples = []
                logger.error("front end %d ended by %s", member.number, await member.end(CLOSE_SECONDS))
            if self._draining:
                return
            in_vain = 0 if time.monotonic() - began > LASTING_SECONDS else in_vain + 1
            await asyncio.sleep(min(MAX_BACKOFF_SECONDS, BACKOFF_SECONDS * 2 ** min(in_vain, 16)) if in_vain > 1 else 0)
            try:
                await member.start(self._begin, self._answer)
                if self._pause is not None:
                    await member.link.ask(self._pause)
            except StartupError as error:
                logger.error("%s", error)
            except LinkLostError:
                continue
            else:
                logger.info("front end %d serves again", member.number)


class _Member:
    """The place of one front end."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.samples: list[Sample] = []
        """When it was last asked."""
        self.link: FrontEndLink
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_up(self) -> bool:
        return hasattr(self, "link") and not self.link.lost.is_set()

    async def start(self, begin: Begin, answer: Any) -> None:
        """Raises StartupError if it cannot serve."""
        self._process, ours = _spawn()
        link = await FrontEndLink.open(ours, lambda question: answer(link, question))
        try:
            await link.ask(begin)
        except LinkLostError as error:
            link.close()
            await self.end(CLOSE_SECONDS)
            raise StartupError(f"front end {self.number} cannot serve: {error}") from None
        except BaseException:
            link.close()
            raise
        self.link = link

    async def end(self, seconds: float) -> str:
        """Hangs up, and how it then ended."""
        if hasattr(self, "link"):
            self.link.close()
        if self._process is None:
            return "nothing"
        process, self._process = self._process, None
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(process.wait, seconds)
        if process.poll() is None:
            process.kill()
        return explain_exit(await asyncio.to_thread(process.wait))


def _spawn() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """The process, and our end of the socket to it."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "async_engine.front_end", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=child_environment(),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    return process, ours
