"""LLM: the same engine for synchronous scripts."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any, TypeVar

import uvloop
from tqdm import tqdm

from async_engine.async_llm import AsyncLLM
from async_engine.beam_search import Beam, beam_search
from async_engine.load_bar import LoadBar
from async_engine.request import ChatPrompt, GenerationRequest, Prompt
from async_engine.results import RequestOutput, Score, gather
from protos.config import EngineConfig, build
from protos.params import SamplingParams
from protos.server_config import AdmissionOptions

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

T = TypeVar("T")
NO_LIMIT = AdmissionOptions(max_queued_tokens=1 << 40)
"""Of tokens: a script waits for all of its prompts, and submits no more requests than the engine takes at once."""


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
            self._llm = self._run(
                AsyncLLM.start(config, admission=NO_LIMIT, on_progress=LoadBar() if progress else None)
            )
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
        *,
        adapter: str = "",
    ) -> list[RequestOutput]:
        """Outputs in the order of the prompts; `params` are for all of them, or one for each.

        A list of ints is one prompt of token ids. `adapter` is the name of a loaded one. Raises
        InvalidRequestError, before anything runs to its end, if one of the prompts cannot be served.
        """
        batch: list[Prompt] = [prompts] if _is_one(prompts) else list(prompts)  # type: ignore[arg-type, list-item]
        return self._run(self._generate(_requests(batch, params, adapter=adapter)))

    def chat(
        self,
        conversations: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[dict[str, Any]] = (),
        template_kwargs: dict[str, Any] | None = None,
        tool_format: str = "",
        reasoning_format: str = "",
        adapter: str = "",
    ) -> list[RequestOutput]:
        """The next turn of one conversation (messages with "role" and "content"), or of each of several.

        `tools` and `template_kwargs` are variables for the chat template. With the name of a format, or "auto",
        tool calls and reasoning are taken out of the text.
        """
        is_one = bool(conversations) and isinstance(conversations[0], dict)
        batch: Any = [conversations] if is_one else conversations
        variables = {**({"tools": list(tools)} if tools else {}), **(template_kwargs or {})}
        prompts: list[Prompt] = [ChatPrompt(messages=list(messages), template_kwargs=variables) for messages in batch]
        requests = _requests(
            prompts, params, tool_format=tool_format, reasoning_format=reasoning_format, adapter=adapter
        )
        return self._run(self._generate(requests))

    def score(self, texts: str | list[int] | Sequence[str | list[int]], *, adapter: str = "") -> list[Score]:
        """How likely the model finds a text, or each of several, token by token."""
        batch: Any = [texts] if _is_one(texts) else texts
        token_ids = [self._encode(text) for text in batch]
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        requests = _requests(list(token_ids), params, wants_text=False, adapter=adapter)
        outputs = self._run(self._generate(requests))
        return [
            Score(ids, [] if output.prompt_logprobs is None else output.prompt_logprobs.logprobs)
            for ids, output in zip(token_ids, outputs, strict=True)
        ]

    def beam_search(
        self,
        prompt: str | list[int],
        *,
        width: int = 4,
        max_tokens: int = 64,
        length_penalty: float = 1.0,
        adapter: str = "",
    ) -> list[tuple[str, Beam]]:
        """The best outputs found, best first, with their texts; see `beam_search`."""
        token_ids = self._encode(prompt)
        beams = self._run(beam_search(self._llm, token_ids, width, max_tokens, length_penalty, adapter))
        return [(self._llm.model.tokenizer.decode(beam.token_ids, skip_special_tokens=True), beam) for beam in beams]

    def alternatives(self, before: list[int], token_ids: Sequence[int]) -> list[str]:
        """The text that each of these tokens would add behind those before: for showing log-probabilities."""
        return self._llm.model.tokenizer.alternatives(before, token_ids)

    def load_adapter(self, name: str, path: str) -> None:
        """Makes the LoRA adapter in a directory known by a name. Raises AdapterError, or another TailraceError."""
        self._run(self._llm.load_adapter(name, path))

    def unload_adapter(self, name: str) -> None:
        """Returns when the last output it is for is done. Raises AdapterNotFoundError."""
        self._run(self._llm.cores.adapters.unload(name))

    def close(self) -> None:
        """Ends the engine's processes. Idempotent."""
        if self._thread.is_alive():
            self._run(self._llm.close())
            self._stop_loop()

    async def _generate(self, requests: list[GenerationRequest]) -> list[RequestOutput]:
        # No more sequences than the engine admits at once; the rest wait here rather than being refused.
        most = max((request.params.n for request in requests), default=1)
        slots = asyncio.Semaphore(max(1, self._llm.ready.max_num_seqs * 2 // max(1, most)))
        bar = tqdm(total=len(requests), desc="generating", unit="prompt", disable=None if self._progress else True)

        async def one(request: GenerationRequest) -> RequestOutput:
            async with slots:
                output = await gather(request.prompt, self._llm.generate(request))
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

    def _encode(self, text: str | list[int]) -> list[int]:
        return self._llm.model.tokenizer.encode(text, add_special_tokens=True) if isinstance(text, str) else text

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


def _requests(
    prompts: list[Prompt], params: SamplingParams | Sequence[SamplingParams] | None, **options: Any
) -> list[GenerationRequest]:
    if params is None or isinstance(params, SamplingParams):
        each = [params or SamplingParams()] * len(prompts)
    else:
        each = list(params)
    if len(each) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts, but {len(each)} params")
    return [GenerationRequest(prompt=prompt, params=one, **options) for prompt, one in zip(prompts, each, strict=True)]


def _is_one(prompts: Any) -> bool:
    return isinstance(prompts, str | ChatPrompt) or (bool(prompts) and isinstance(prompts[0], int))
