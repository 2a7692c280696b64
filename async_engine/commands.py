"""What `tailrace serve`, `core`, `generate`, `chat` and `models` do at a terminal."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import sys
import time
from typing import TYPE_CHECKING, Any

import msgspec
import uvloop

from async_engine.load_bar import LoadBar
from async_engine.outputs import Delta, Summary
from async_engine.request import ChatPrompt, GenerationRequest
from async_engine.request_log import JsonFormatter
from protos.architectures import REGISTRY
from protos.config import MIB
from protos.errors import TailraceError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from async_engine.async_llm import AsyncLLM
    from async_engine.server import Server
    from protos.config import CoreConfig, EngineConfig, ServeConfig
    from protos.messages import CoreReady
    from protos.params import SamplingParams
    from protos.scale_config import CoreServerOptions
    from protos.server_config import ServerOptions


def serve(config: ServeConfig) -> int:
    """Serves until a signal; the exit code. Raises TailraceError if it cannot start."""
    start = time.monotonic()
    set_up_log(config.server)

    def ready(llm: AsyncLLM, server: Server) -> None:
        held = describe(llm.ready)
        if config.scale.frontends > 1:
            held += f", {config.scale.frontends} front ends"
        seconds = time.monotonic() - start
        if server.admin_address:
            sys.stdout.write(f"operators' service on {server.admin_address}\n")
        sys.stdout.write(f"tailrace ready on {server.address}: {llm.model.names[0]}, {held}, {seconds:.1f} s\n")
        sys.stdout.flush()

    async def main() -> int:
        from async_engine.server import serve as serve_grpc

        return await serve_grpc(config, LoadBar(), ready)

    return uvloop.run(main())


def core(config: CoreConfig) -> int:
    """Serves front ends elsewhere until a signal; the exit code. Raises TailraceError if it cannot start."""
    start = time.monotonic()
    set_up_log(config.server)

    def ready(llm: AsyncLLM, address: str) -> None:
        seconds = time.monotonic() - start
        name = llm.model.names[0]
        sys.stdout.write(f"tailrace core ready on {address}: {name}, {describe(llm.ready)}, {seconds:.1f} s\n")
        sys.stdout.flush()

    async def main() -> int:
        from async_engine.core_server import serve_core

        return await serve_core(config, LoadBar(), ready)

    return uvloop.run(main())


def set_up_log(options: ServerOptions | CoreServerOptions) -> None:
    log = logging.StreamHandler()
    is_json = options.log_format == "json"
    log.setFormatter(JsonFormatter() if is_json else logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=options.log_level.upper(), handlers=[log])


def describe(core: CoreReady) -> str:
    """What a core holds, in a line."""
    room = f"KV cache {core.kv_capacity_tokens} tokens, context {core.max_model_len}"
    if not core.weight_bytes:
        return f"scripted tokens, {room}"
    kinds = f" ({core.weights})" if core.weights else ""
    memory = f"weights {core.weight_bytes // MIB} MiB{kinds} + KV cache {core.kv_cache_bytes // MIB} MiB in memory"
    return f"{core.dtype} on {core.device}, {room}, {memory}"


def generate(config: EngineConfig, params: SamplingParams, prompt: str, as_chat: bool, adapter: str) -> int:
    """Prints one completion as it comes; the exit code. Raises TailraceError, or KeyboardInterrupt on Ctrl-C."""
    shaped = ChatPrompt(messages=[{"role": "user", "content": prompt}]) if as_chat else prompt
    with _engine(config) as (runner, llm):
        runner.run(_print_turn(llm, GenerationRequest(prompt=shaped, params=params, adapter=adapter), []))
    return 0


def chat(config: EngineConfig, params: SamplingParams, system: str, adapter: str) -> int:
    """A conversation at the terminal; the exit code. Raises TailraceError if the engine cannot start or go on."""
    at_terminal = sys.stdin.isatty()
    if at_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  gives input() a line editor and a history
    sys.stdin.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]  # what is no text fails its turn
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    with _engine(config) as (runner, llm):
        while True:
            try:
                line = input("> " if at_terminal else "")
            except EOFError:
                sys.stdout.write("\n" if at_terminal else "")
                return 0
            except KeyboardInterrupt:
                if not at_terminal:
                    raise
                sys.stdout.write("\n(Ctrl-D ends)\n")
                continue
            if not line.strip():
                continue
            messages.append({"role": "user", "content": line})
            text: list[str] = []
            try:
                turn = GenerationRequest(prompt=ChatPrompt(messages=messages), params=params, adapter=adapter)
                runner.run(_print_turn(llm, turn, text))
            except KeyboardInterrupt:
                sys.stdout.write("" if text else "\n")
            except TailraceError as error:
                if llm.error is not None:
                    raise
                sys.stderr.write(f"tailrace: {error}\n")
                messages.pop()
                continue
            messages.append({"role": "assistant", "content": "".join(text)})


def models() -> int:
    """Prints the registry of architectures; the exit code."""
    width = max(map(len, REGISTRY))
    for name, row in REGISTRY.items():
        limits = f"not: {row.limits}" if row.limits else ""
        sys.stdout.write(f"{name:{width}}  {row.backend:7}  {limits}".rstrip() + "\n")
    return 0


@contextlib.contextmanager
def _engine(config: EngineConfig) -> Iterator[tuple[asyncio.Runner, AsyncLLM]]:
    """An engine, and what runs coroutines on its loop: Ctrl-C cancels the one that runs, which then raises it."""
    from async_engine.async_llm import AsyncLLM

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        llm = runner.run(AsyncLLM.start(config, on_progress=LoadBar()))
        try:
            yield runner, llm
        finally:
            runner.run(llm.close())


async def _print_turn(llm: AsyncLLM, request: GenerationRequest, text: list[str]) -> None:
    """Streams to stdout and into `text`, then its figures to stderr. Raises TailraceError if the request fails."""
    params = request.params
    seed = random.getrandbits(32) if params.seed is None else params.seed
    request = msgspec.structs.replace(request, params=msgspec.structs.replace(params, seed=seed))
    start, first, figures = time.monotonic(), 0.0, ""
    try:
        async with contextlib.aclosing(llm.generate(request)) as events:
            async for event in events:
                match event:
                    case Delta():
                        first = first or time.monotonic()
                        text.append(event.text)
                        sys.stdout.write(event.text)
                        sys.stdout.flush()
                    case Summary():
                        rate = max(event.output_tokens - 1, 0) / max(event.decode_seconds, 1e-9)
                        figures = (
                            f"[{event.output_tokens} tokens, {rate:.1f} tokens/s, "
                            f"first after {first - start:.2f} s, seed {seed}]\n"
                        )
    finally:
        if text:
            sys.stdout.write("\n")
            sys.stdout.flush()
    sys.stderr.write(figures)
