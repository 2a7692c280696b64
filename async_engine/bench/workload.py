"""Workload: the conversations that a load consists of."""

from __future__ import annotations

import random
import uuid
from typing import TYPE_CHECKING

from protos.tailrace.v1 import generation_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterator

    from async_engine.bench.options import ServeBenchOptions


class Conversation:
    """Turns that follow one another: each prompt is the one before, the answer to it, and new tokens."""

    def __init__(self, options: ServeBenchOptions, name: str, turns: list[list[int]]) -> None:
        """`turns` are the tokens that each turn adds."""
        self._options = options
        self._name = name
        self._turns = turns
        self._history: list[int] = []

    def specs(self) -> Iterator[pb.GenerationSpec]:
        """The requests. Before each but the first, `answered` must have been told the output of the one before."""
        for index, added in enumerate(self._turns):
            self._history += added
            yield pb.GenerationSpec(
                request_id=f"{self._name}-{index}",
                token_ids=pb.TokenIds(ids=self._history),
                stop=pb.StopOptions(max_tokens=self._options.output_tokens, ignore_eos=True),
                output=pb.OutputOptions(text=self._options.text),
                scheduling=pb.SchedulingOptions(session_id=self._name if len(self._turns) > 1 else ""),
            )

    def answered(self, token_ids: list[int]) -> None:
        self._history += token_ids


def make_conversations(options: ServeBenchOptions) -> Iterator[Conversation]:
    """Random ids behind a common prefix, outputs of exactly the length asked for; `num_requests` turns in all."""
    chance = random.Random(options.seed)
    run_id = uuid.uuid4().hex

    def token_ids(count: int) -> list[int]:
        return [chance.randrange(options.vocab_size) for _ in range(count)]

    prefix = token_ids(options.shared_prefix_tokens)
    for first in range(0, options.num_requests, options.turns):
        own = [token_ids(options.prompt_tokens) for _ in range(min(options.turns, options.num_requests - first))]
        own[0] = prefix + own[0][len(prefix) :]
        yield Conversation(options, f"bench-{run_id}-{first}", own)
