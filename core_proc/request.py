"""Request: the scheduler's mutable view of one sequence."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from core_proc.block_hash import extend_chain, request_root

if TYPE_CHECKING:
    import numpy.typing as npt

    from core_proc.adapters import HeldAdapter
    from core_proc.grammar import Matcher
    from protos.messages import EngineCoreRequest, Sibling


OUTPUT_COST = 2.0
"""Of a token drawn, in tokens of prompts: it takes a step of its own, if a shared one."""


class State(Enum):
    WAITING = auto()
    """Queued, for the first time or after a preemption."""
    RUNNING = auto()
    """Holds a row and blocks."""
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Request:
    """While it runs, its lengths and tokens live in the columns of `Rows`; while it waits, in `token_ids`."""

    client: int
    handle: int
    arrival: int
    """Number of the request in order of arrival and, once it is admitted, of admission: breaks ties of priority."""
    arrival_time: float
    params: EngineCoreRequest
    token_ids: npt.NDArray[np.int32]
    """All tokens known: prompt and output. Stale while RUNNING."""
    num_prompt_tokens: int
    max_len: int
    """Length of prompt + output at which it ends."""
    hash_root: bytes
    block_hashes: list[bytes]
    """Chain hashes of the full blocks of known tokens, as far as they were computed; at least the prompt's."""
    adapter: HeldAdapter | None
    """What computes it with the model; None also where it asks for one that was not there when it came."""

    state: State = State.WAITING
    row: int = -1
    block_ids: list[int] = field(default_factory=list)
    num_published: int = 0
    """Leading blocks that were offered to the prefix cache."""
    last_step: int = -1
    """Number of the last step that computed some of it."""
    is_sibling: bool = False
    """Its prompt is another request's."""
    siblings: list[Request] = field(default_factory=list)
    """Sequences of the same prompt that wait until it is computed."""
    matcher: Matcher | None = None
    """Where its grammar is behind the output so far."""
    prompt_logprobs_from: int = 1
    """First position of the prompt whose log-probability is still to be told, if any is asked for."""
    is_suspect: bool = False
    """A step that computed it failed, and it has not drawn a token in a trial since; or it ended as guilty."""
    dropped_step: int = -1
    """Results of steps up to this one are ignored."""
    expected_output: int = 0
    """Tokens it was expected to draw when it came."""
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    admitted_time: float = -math.inf
    first_token_time: float = -math.inf

    @property
    def is_new(self) -> bool:
        """Whether it takes its turn among all callers: not what was admitted before, here or by another core, nor what
        shares the prompt of that."""
        return self.admitted_time == -math.inf and not self.is_sibling and not self.params.was_admitted

    @property
    def has_time_limit(self) -> bool:
        """Whether it may come too late."""
        return self.params.deadline is not None or self.params.queue_timeout is not None

    @property
    def num_given_tokens(self) -> int:
        """Of prompt and output, those it came with."""
        return self.num_prompt_tokens + len(self.params.output_token_ids) // 4

    @property
    def cost(self) -> float:
        """What serving it is expected to take, in tokens of prompts."""
        return (0 if self.is_sibling else self.num_given_tokens) + OUTPUT_COST * self.expected_output

    @property
    def key(self) -> tuple[int, int]:
        """Order of service: priority, then arrival. Smaller is served first and preempted last."""
        return (self.params.priority, self.arrival)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens to compute before it can draw its next one; meaningful while it waits."""
        return len(self.token_ids)

    @property
    def reads_cache(self) -> bool:
        """Not while log-probabilities of its prompt are to be told: they come only from computing it."""
        return self.params.sampling.prompt_logprobs is None or self.prompt_logprobs_from >= self.num_prompt_tokens

    def __repr__(self) -> str:
        return (
            f"Request({self.client}/{self.handle}, {self.state.name}, row={self.row}, "
            f"prompt={self.num_prompt_tokens}, blocks={len(self.block_ids)}, last_step={self.last_step})"
        )


def make_request(
    message: EngineCoreRequest,
    client: int,
    block_size: int,
    max_model_len: int,
    now: float,
    adapter: HeldAdapter | None = None,
) -> Request:
    """The scheduler's view of a message and its siblings, the prompt hashed: all that can be done off the main loop.

    `adapter` is the one it names, if there is one. `arrival` is given when it is queued.
    """
    prompt = np.frombuffer(message.prompt_token_ids, "<i4")
    token_ids = np.concatenate([prompt, np.frombuffer(message.output_token_ids, "<i4")])
    request = Request(
        client=client,
        handle=message.handle,
        arrival=-1,
        arrival_time=now,
        params=message,
        token_ids=token_ids,
        num_prompt_tokens=len(prompt),
        max_len=min(len(prompt) + message.max_tokens, max_model_len),
        hash_root=request_root(message.cache_salt, "" if adapter is None else adapter.adapter.digest),
        block_hashes=[],
        adapter=adapter,
        prompt_logprobs_from=message.prompt_logprobs_from,
    )
    if not message.bypass_cache:
        extend_chain(request.block_hashes, request.hash_root, token_ids, block_size)
    request.siblings = [_sibling(request, sibling) for sibling in message.siblings]
    return request


def _sibling(request: Request, sibling: Sibling) -> Request:
    """The same prompt under another handle and seed. Its wait for the prompt is not a wait for admission."""
    params = msgspec.structs.replace(
        request.params,
        handle=sibling.handle,
        sampling=msgspec.structs.replace(request.params.sampling, seed=sibling.seed, prompt_logprobs=None),
        siblings=[],
        queue_timeout=None,
    )
    return replace(
        request,
        handle=sibling.handle,
        params=params,
        block_hashes=list(request.block_hashes),
        block_ids=[],
        is_sibling=True,
        siblings=[],
    )
