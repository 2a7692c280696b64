"""serve_core: a core that lives by itself, for front ends that come over the network."""

from __future__ import annotations

import asyncio
import logging
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from async_engine.async_llm import AsyncLLM
from async_engine.core_entrance import listen_at, read_secret
from async_engine.core_process import Door
from async_engine.endpoint import check_address, split_address
from async_engine.served_model import digest_model
from protos.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Callable

    from protos.config import CoreConfig

logger = logging.getLogger(__name__)


async def serve_core(
    config: CoreConfig, on_progress: Callable[[int, int], None] | None, on_ready: Callable[[AsyncLLM, str], None]
) -> int:
    """Runs a core until a signal, or until it cannot be replaced; the exit code.

    Its address stays while it is replaced. Requests of front ends that are connected when it ends go on elsewhere, or
    when it is there again: that is up to them. Raises StartupError or InvalidRequestError.
    """
    options = config.server
    if not options.secret_file:
        raise InvalidRequestError("secret_file", "is needed: who knows it may use the core")
    if (count := config.parallel.data_parallel_size) > 1:
        raise InvalidRequestError("data_parallel_size", f"a core that listens is one: start {count} of them")
    secret = read_secret(Path(options.secret_file))
    if options.listen.startswith("unix:"):
        raise InvalidRequestError("listen", f"must be HOST:PORT, not {options.listen!r}")
    host, port = split_address("listen", options.listen)
    check_address("listen", options.listen)
    stop = asyncio.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    digest = await digest_model(config.model.model)
    with listen_at(f"{host}:{port}") as listener:
        port = listener.getsockname()[1]
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        starting = asyncio.create_task(
            AsyncLLM.start(
                config.engine,
                max_core_restarts=options.max_core_restarts,
                hang_timeout=options.hang_timeout,
                on_progress=on_progress,
                doors=[Door(listener, secret, digest)],
            )
        )
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait([starting, stopped], return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.wait([starting])
            return 130
        async with await starting as llm:
            on_ready(llm, address)
            died = asyncio.create_task(llm.died())
            await asyncio.wait([stopped, died], return_when=asyncio.FIRST_COMPLETED)
            if died.done():
                logger.error("%s", await died)
                return 1
            died.cancel()
        return 0
