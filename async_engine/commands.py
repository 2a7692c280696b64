"""What `tailrace serve`, `generate` and `chat` do at a terminal."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

import uvloop

from async_engine.load_bar import LoadBar
from async_engine.outputs import Delta, Summary
from async_engine.request import ChatPrompt, GenerationRequest
from protos.config import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from async_engine.async_llm import AsyncLLM
    from async_engine.server import Server
    from protos.config import EngineConfig, ServeConfig
    from protos.params import SamplingParams


def serve(config: ServeConfig) -> int:
    """Serves until a signal; the exit code."""
    start = time.monotonic()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")

    def ready(llm: AsyncLLM, server: Server) -> None:
        core = llm.core.ready
        sys.stdout.write(
            f"tailrace ready on {server.address}: {llm.model.names[0]}, {core.dtype} on {core.device}, "
            f"KV cache {core.kv_capacity_tokens} tokens, context {core.max_model_len}, "
            f"weights {core.weight_bytes // MIB} MiB + KV cache {core.kv_cache_bytes // MIB} MiB, "
            f"{time.monotonic() - start:.1f} s\n"
        )
        sys.stdout.flush()

    async def main() -> int:
        from async_engine.server import serve as serve_grpc

        return await serve_grpc(config, LoadBar(), ready)

    return uvloop.run(main())


def generate(config: EngineConfig, params: SamplingParams, prompt: str, as_chat: bool) -> int:
    """Prints one completion as it comes; the exit code."""

    async def main(llm: AsyncLLM) -> int:
        chat_prompt = ChatPrompt(messages=[{"role": "user", "content": prompt}])
        await Turns(llm).run(GenerationRequest(prompt=chat_prompt if as_chat else prompt, params=params))
        return 0

    return uvloop.run(_with_engine(config, main))


def chat(config: EngineConfig, params: SamplingParams, system: str) -> int:
    """A conversation at the terminal; the exit code."""

    async def main(llm: AsyncLLM) -> int:
        turns = Turns(llm)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        while (line := await asyncio.to_thread(_read_line)) is not None:
            if not line.strip():
                continue
            messages.append({"role": "user", "content": line})
            request = GenerationRequest(prompt=ChatPrompt(messages=messages), params=params)
            messages.append({"role": "assistant", "content": await turns.run(request)})
        return 0

    return uvloop.run(_with_engine(config, main))


async def _with_engine(config: EngineConfig, main: Callable[[AsyncLLM], Coroutine[Any, Any, int]]) -> int:
    from async_engine.async_llm import AsyncLLM

    async with await AsyncLLM.start(config, on_progress=LoadBar()) as llm:
        return await main(llm)


class Turns:
    """Prints one request's stream after the other. Ctrl-C ends the turn that runs, never the program."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._turn: asyncio.Task[None] | None = None
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._interrupt)

    async def run(self, request: GenerationRequest) -> str:
        """Streams to stdout, with figures on stderr; returns the text, as far as it came."""
        text: list[str] = []
        self._turn = asyncio.create_task(self._print(request, text))
        await asyncio.wait([self._turn])
        if not self._turn.cancelled():
            self._turn.result()
        self._turn = None
        sys.stdout.write("\n")
        sys.stdout.flush()
        return "".join(text)

    async def _print(self, request: GenerationRequest, text: list[str]) -> None:
        start, first = time.monotonic(), 0.0
        async with contextlib.aclosing(self._llm.generate(request)) as events:
            async for event in events:
                match event:
                    case Delta():
                        first = first or time.monotonic()
                        text.append(event.text)
                        sys.stdout.write(event.text)
                        sys.stdout.flush()
                    case Summary():
                        rate = max(event.output_tokens - 1, 0) / max(event.decode_seconds, 1e-9)
                        sys.stderr.write(
                            f"\n[{event.output_tokens} tokens, {rate:.1f} tokens/s, first after {first - start:.2f} s]"
                        )

    def _interrupt(self) -> None:
        if self._turn is not None:
            self._turn.cancel()
        else:
            sys.stdout.write("\n(Ctrl-D ends)\n> ")
            sys.stdout.flush()


def _read_line() -> str | None:
    """A line from the user; None at the end of input."""
    try:
        return input("> ")
    except EOFError:
        return None
