"""Profiler: what this front end, the cores and their workers do with their time, into files."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from protos.errors import BusyError, CoreDiedError, InvalidRequestError, TailraceError, WrongStateError
from protos.python_profile import PythonProfile

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from async_engine.async_llm import AsyncLLM
    from async_engine.core_client import CoreClient

logger = logging.getLogger(__name__)

MAX_SECONDS = 60.0
"""What is recorded grows, and all is slower meanwhile."""


CLOSE_SECONDS = 2.0
"""For cores to hear that it is over. One that hangs does not."""


class ProfileFile(NamedTuple):
    path: str
    size: int
    """Bytes."""


class Profiler:
    """Records one profile at a time; those of other front ends over the same cores count."""

    def __init__(self, llm: AsyncLLM, directory: str) -> None:
        """`directory` is where files go; empty if there are to be none."""
        self._llm = llm
        self._directory = directory
        self._is_recording = False
        self._started: tuple[asyncio.Event, asyncio.Task[list[ProfileFile]]] | None = None
        """What stops a profile that was started, and its task, until its files are asked for."""

    async def record(self, seconds: float) -> list[ProfileFile]:
        """Records so long; what was written. Whoever cancels it leaves nothing.

        Raises WrongStateError where there is no directory, or none that can be written to, BusyError while another
        profile is being recorded, or InvalidRequestError.
        """
        if not 0 < seconds <= MAX_SECONDS:
            raise InvalidRequestError("duration", f"must be more than 0 and at most {MAX_SECONDS:g} s, not {seconds:g}")
        async with self._recording() as files:
            await asyncio.sleep(seconds)
        return await self._write(files)

    async def start(self) -> None:
        """Records from now on until `stop`, MAX_SECONDS at most. Raises as `record` does."""
        begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        stop = asyncio.Event()
        task = asyncio.create_task(self._record_until(stop, begun), name="profile")
        try:
            await begun
        except BaseException:
            task.cancel()
            raise
        self._started = stop, task

    async def stop(self) -> list[ProfileFile]:
        """What was written of the profile that was started. Raises WrongStateError if there is none."""
        if self._started is None:
            raise WrongStateError("no profile was started")
        (stop, task), self._started = self._started, None
        stop.set()
        return await task

    async def close(self) -> None:
        """Ends a profile that was started, without files. Idempotent."""
        if self._started is not None:
            _, task = self._started
            task.cancel()
            await asyncio.wait([task], timeout=CLOSE_SECONDS)

    async def _record_until(self, stop: asyncio.Event, begun: asyncio.Future[None]) -> list[ProfileFile]:
        try:
            async with self._recording() as files:
                begun.set_result(None)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(MAX_SECONDS):
                        await stop.wait()
        except TailraceError as error:
            if begun.done():
                raise
            begun.set_exception(error)
            return []
        return await self._write(files)

    @contextlib.asynccontextmanager
    async def _recording(self) -> AsyncIterator[dict[str, bytes]]:
        """For as long as the block lasts; behind it the files are there, by their names."""
        if not self._directory:
            raise WrongStateError("the server was started without --profile-dir")
        if self._is_recording:
            raise BusyError("a profile is being recorded")
        self._is_recording = True
        files: dict[str, bytes] = {}
        asked: dict[int, CoreClient] = {}
        try:
            for slot in self._llm.cores.slots:
                if slot.is_up:
                    asked[slot.number] = slot.core
                    with contextlib.suppress(CoreDiedError):
                        if await slot.core.call("start_profile") == [0]:
                            raise BusyError("a profile is being recorded by another front end")
            profile = PythonProfile()
            try:
                yield files
            finally:
                files["frontend.pstats"] = profile.stop()
        finally:
            for number, core in asked.items():
                with contextlib.suppress(CoreDiedError):
                    recorded = await core.stop_profile()
                    files |= {f"core{number}.{name}": data for name, data in recorded.items()}
            self._is_recording = False

    async def _write(self, files: dict[str, bytes]) -> list[ProfileFile]:
        beginning = f"{datetime.now():%Y%m%d-%H%M%S.%f}"[:-3]

        def write() -> list[ProfileFile]:
            written = []
            for name, data in files.items():
                path = Path(self._directory, f"{beginning}-{name}")
                path.write_bytes(data)
                written.append(ProfileFile(str(path), len(data)))
            return written

        try:
            written = await asyncio.to_thread(write)
        except OSError as error:
            raise WrongStateError(f"{self._directory} cannot be written to: {error.strerror}") from None
        logger.info("a profile was written: %s-*", Path(self._directory, beginning))
        return written
