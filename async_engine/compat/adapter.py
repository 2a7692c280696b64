"""Adapter: what all compatible services are to the server, and what they share."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from async_engine import from_proto
from async_engine.auth import principal
from async_engine.stream import RequestStream
from protos.errors import InvalidRequestError, UnsupportedFeatureError
from protos.messages import FinishReason, GrammarKind, GrammarSpec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable

    import grpc

    from async_engine.async_llm import AsyncLLM
    from async_engine.input_processor import Accepted
    from async_engine.profiler import Profiler
    from async_engine.request import GenerationRequest
    from protos.server_config import ServerOptions

MAX_ANSWER_BYTES = 4 << 20
"""Of one message: what clients accept that were not told otherwise."""
TOKEN_BYTES = 5
LOGPROB_BYTES = 12
"""One log-probability with its id and, where there is one, its rank; by estimate."""


@dataclass(frozen=True)
class Adapter:
    """One entry of `--services`."""

    names: tuple[str, ...]
    """Of the gRPC services it brings; health lists them."""
    add: Callable[[AsyncLLM, ServerOptions, Profiler, grpc.aio.Server], None]


async def abort(llm: AsyncLLM, request_ids: Iterable[str]) -> None:
    """Ends those of the requests that are live, and the caller's; their streams then end by themselves."""
    for request_id in request_ids:
        await llm.cancel_anywhere(request_id, principal.get())


@contextlib.asynccontextmanager
async def opened(
    llm: AsyncLLM, request: GenerationRequest, request_id: str, *, whole: bool
) -> AsyncIterator[tuple[RequestStream, Accepted]]:
    """A live request and its events; aborted on exit if it is not over. `whole`: each sequence goes into one message.

    Raises InvalidRequestError also for answers that would be larger than messages can be.
    """
    from_proto.check_id(request_id)
    request.params.verify(llm.model.vocab_size)
    stream = RequestStream(num_sequences=request.params.n)
    async with llm.open(request, stream, request_id) as (_, accepted):
        _check_size(accepted, whole)
        yield stream, accepted


def _check_size(accepted: Accepted, whole: bool) -> None:
    params, size = accepted.params, 0
    if params.prompt_logprobs is not None:
        size += len(accepted.prompt_token_ids) * (TOKEN_BYTES + LOGPROB_BYTES * (2 + params.prompt_logprobs))
    if whole:
        candidates = 0 if params.logprobs is None else 2 + params.logprobs + len(params.logprob_token_ids)
        size += accepted.max_tokens * (TOKEN_BYTES + LOGPROB_BYTES * candidates)
    if size > MAX_ANSWER_BYTES:
        raise InvalidRequestError(
            "logprobs" if params.logprobs is not None or params.prompt_logprobs is not None else "max_tokens",
            f"the answer could have {size} bytes in one message of at most {MAX_ANSWER_BYTES}; stream, or ask for less",
        )


def refuse(message: Any, *fields: str) -> None:
    """Raises UnsupportedFeatureError if one of the fields is set: to pass over what matters would be to lie."""
    for field, value in message.ListFields():
        if field.name in fields and value:
            raise UnsupportedFeatureError(field.name, "is not supported by this server")


def grammar(kind: GrammarKind, value: str | bool) -> GrammarSpec | None:
    """A constraint that was set: its source, or whether it is on."""
    if isinstance(value, bool):
        return GrammarSpec(kind) if value else None
    return GrammarSpec(kind, value)


def unless_zero(value: Any) -> Any:
    """What is set, where zero says that nothing is."""
    return value or None


LENGTH_REASONS = frozenset({FinishReason.MAX_TOKENS, FinishReason.CONTEXT_FULL, FinishReason.TIME_LIMIT})
"""Ends for want of room or time; all others but ABORTED are the output's own."""
