"""LLM: the same engine for synchronous scripts."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import uvloop
from tqdm import tqdm

from async_engine.async_llm import AsyncLLM
from async_engine.load_bar import LoadBar
from async_engine.outputs import Delta, SequenceFinish, Summary
from async_engine.request import ChatPrompt, GenerationRequest, Prompt
from protos.config import EngineConfig, build
from protos.params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

T = TypeVar("T")


class RequestOutput(msgspec.Struct, frozen=True):
    """All of one request's output."""

    prompt: Prompt
    text: str
    token_ids: list[int]
    finish: SequenceFinish
    summary: Summary


class LLM:
    """`LLM(model).generate(prompts, params)`: continues many prompts at once and returns when all are done.

    `options` are those of the command line (`max_num_seqs=64`). The engine runs on a thread of its own, so
    this works with and without a running event loop. Close it, or use it as a context manager.
    """

    def __init__(self, model: str = "", *, progress: bool = True, **options: Any) -> None:
        config = build(EngineConfig, model=model, **options)
        self._progress = progress
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="llm", daemon=True)
        self._thread.start()
        try:
            self._llm = self._run(AsyncLLM.start(config, on_progress=LoadBar() if progress else None))
        except BaseException:
            self._stop_loop()
            raise

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Outputs in the order of the prompts; `params` are for all of them, or one for each.

        A list of ints is one prompt of token ids. Raises InvalidRequestError, before anything runs to its
        end, if one of the prompts cannot be served.
        """
        batch: list[Prompt] = [prompts] if _is_one(prompts) else list(prompts)  # type: ignore[arg-type, list-item]
        if params is None or isinstance(params, SamplingParams):
            each = [params or SamplingParams()] * len(batch)
        else:
            each = list(params)
        if len(each) != len(batch):
            raise ValueError(f"{len(batch)} prompts, but {len(each)} params")
        requests = [GenerationRequest(prompt=prompt, params=one) for prompt, one in zip(batch, each, strict=True)]
        return self._run(self._generate(requests))

    def chat(
        self,
        conversations: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """The next turn of one conversation (messages with "role" and "content"), or of each of several."""
        is_one = bool(conversations) and isinstance(conversations[0], dict)
        batch: Any = [conversations] if is_one else conversations
        return self.generate([ChatPrompt(messages=list(messages)) for messages in batch], params)

    def close(self) -> None:
        """Ends the engine's processes. Idempotent."""
        if self._thread.is_alive():
            self._run(self._llm.close())
            self._stop_loop()

    async def _generate(self, requests: list[GenerationRequest]) -> list[RequestOutput]:
        # No more than the engine admits at once; the rest wait here rather than being refused.
        slots = asyncio.Semaphore(self._llm.core.ready.max_num_seqs * 2)
        bar = tqdm(total=len(requests), desc="generating", unit="prompt", disable=None if self._progress else True)

        async def one(request: GenerationRequest) -> RequestOutput:
            async with slots:
                output = await self._complete(request)
            bar.update()
            return output

        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(one(request)) for request in requests]
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            bar.close()
        return [task.result() for task in running]

    async def _complete(self, request: GenerationRequest) -> RequestOutput:
        deltas: list[Delta] = []
        async for event in self._llm.generate(request):
            if isinstance(event, Delta):
                deltas.append(event)
            else:
                whole = Delta.join(deltas)
                assert whole.finish is not None
                return RequestOutput(request.prompt, whole.text, whole.token_ids, whole.finish, event)
        raise AssertionError("a stream ended without its summary")

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs on the engine's loop; an interrupt here cancels it there."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _is_one(prompts: Any) -> bool:
    return isinstance(prompts, str | ChatPrompt) or (bool(prompts) and isinstance(prompts[0], int))
