"""What a fleet is asked: requests at random moments, steady or in bursts, with shared prefixes or in conversations."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tests.core_proc.plant import Visit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

VOCABULARY = 50_000
BURST_SECONDS, BURST_FACTOR = 1.0, 3.0
"""Of every four such spells one has three times the mean rate, the others a third of it."""


@dataclass
class Turn(Visit):
    """A request, and perhaps the one that follows it by `think` seconds. Prompts are made when they are due."""

    make_prompt: Callable[[], npt.NDArray[np.int32]] = lambda: np.zeros(0, np.int32)
    is_first: bool = True
    then: Turn | None = None
    think: float = 0.0


@dataclass(frozen=True)
class Load:
    """Requests with a prompt of a shared prefix and a tail, lengths in tokens; `groups` prefixes, the k-th asked for
    as 1 / (k + 10). With `turns` over 1 each is the start of a conversation, whose later prompts hold all before."""

    rate: float
    """Requests a second, in the mean, first turns only."""
    seconds: float
    groups: int
    prefix: int = 1024
    tail: tuple[int, int] = (64, 192)
    output: tuple[int, int] = (32, 160)
    turns: int = 1
    think: tuple[float, float] = (1.0, 3.0)
    bursty: bool = False

    @property
    def longest(self) -> int:
        """Tokens of a prompt and its output at most."""
        return self.prefix + self.turns * (self.tail[1] + self.output[1])

    def visits(self, seed: int = 0) -> Iterator[Turn]:
        chance = random.Random(seed)
        weights = np.cumsum([1 / (group + 10) for group in range(self.groups)])
        for now in self._moments(chance):
            group = int(np.searchsorted(weights, chance.random() * weights[-1]))
            yield self._conversation(now, group, chance)

    def _moments(self, chance: random.Random) -> Iterator[float]:
        now, most = 0.0, self.rate * (BURST_FACTOR if self.bursty else 1.0)
        while (now := now + chance.expovariate(most)) < self.seconds:
            in_burst = int(now / BURST_SECONDS) % 4 == 0
            if not self.bursty or in_burst or chance.random() < 1 / BURST_FACTOR**2:
                yield now

    def _conversation(self, now: float, group: int, chance: random.Random) -> Turn:
        """The turns share one list of ids, each with its part of it."""
        tails = [chance.randint(*self.tail) for _ in range(self.turns)]
        outputs = [chance.randint(*self.output) for _ in range(self.turns)]
        seed = chance.getrandbits(32)

        def prompt(turn: int) -> Callable[[], npt.NDArray[np.int32]]:
            def make() -> npt.NDArray[np.int32]:
                parts = [_ids(group, self.prefix)]
                for number in range(turn + 1):
                    parts.append(_ids(seed + number, tails[number]))
                    if number < turn:
                        parts.append(np.ones(outputs[number], np.int32))  # what the plant draws
                return np.concatenate(parts)

            return make

        then: Turn | None = None
        for turn in reversed(range(self.turns)):
            then = Turn(
                at=now,
                prompt_tokens=0,
                length=outputs[turn],
                deadline=None,
                ignore_eos=True,
                make_prompt=prompt(turn),
                is_first=turn == 0,
                then=then,
                think=chance.uniform(*self.think),
            )
        assert then is not None
        return then


def _ids(seed: int, count: int) -> npt.NDArray[np.int32]:
    return np.random.default_rng(seed).integers(3, VOCABULARY, count, np.int32)
