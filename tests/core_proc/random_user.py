"""RandomUser: operations on a scheduler, drawn at random, again the same for the same seed."""

from __future__ import annotations

import random
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, ClassVar

from core_proc.request import State
from protos.errors import AdapterExistsError, AdapterLeavingError, InvalidRequestError
from protos.messages import Repetition
from tests.core_proc.harness import Harness
from tests.fakes import EOS, VOCAB_SIZE, ScriptedMatcher

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.core_proc.harness import Stream

MAX_LIVE = 14
UNKNOWN = 999_999


class RandomUser:
    """All that is random comes from the seed; a failure carries a note that names it."""

    WEIGHTS: ClassVar[dict[str, float]] = {
        "_add": 14,
        "_issue": 36,
        "_land": 34,
        "_step": 10,
        "_compile": 4,
        "_abort": 2,
        "_preempt": 2,
        "_pass_time": 2,
        "_pause": 0.5,
        "_freeze": 0.5,
        "_resume": 3,
        "_reset": 0.5,
        "_new_weights": 0.5,
        "_load_adapter": 1,
        "_close_adapter": 1,
    }

    def __init__(
        self, seed: int, depth: int, *, failures: bool = False, poison: bool = False, pipeline: bool = False
    ) -> None:
        options = f"failures={failures}, poison={poison}, pipeline={pipeline}"
        self._name = f"{type(self).__name__}(seed={seed}, depth={depth}, {options})"
        self._random = random.Random(seed)
        rng = self._random
        self.harness = Harness(
            num_blocks=rng.choice([9, 12, 18, 40]),
            budget=rng.choice([5, 9, 16, 64]),
            max_num_seqs=rng.choice([2, 4, 8]),
            prefill_cap=rng.choice([0, 3, 64]),
            depth=depth,
            pipeline=pipeline,
        )
        self.streams: list[Stream] = []
        self.guilty: list[Stream] = []
        """Those that make steps fail, and those that wait for them."""
        self._adapters: set[str] = set()
        """Loaded, and not closed."""
        self._failures = failures
        self._poison = poison
        self._compiling: list[tuple[Stream, ScriptedMatcher]] = []
        self._prefixes = [[rng.randrange(VOCAB_SIZE) for _ in range(24)] for _ in range(2)]

    def play(self, num_operations: int) -> None:
        """Does so many operations, then lets everything come to its end."""
        names, weights = list(self.WEIGHTS), list(self.WEIGHTS.values())
        for number in range(num_operations):
            name = self._random.choices(names, weights)[0]
            with self._explained(f"operation {number}, {name}"):
                getattr(self, name)()
        with self._explained("coming to the end"):
            self._resume()
            while self._compiling:
                self._compile()
            self.harness.run_to_end()

    @contextmanager
    def _explained(self, where: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            error.add_note(f"{self._name}, {where}")
            raise

    def _add(self) -> None:
        rng = self._random
        if len(self.harness.live) >= MAX_LIVE:
            return
        prompt = rng.choice(self._prefixes)[: rng.randrange(1, 24)]
        prompt += [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([0, 0, 1, 5]))]
        max_tokens = rng.choice([1, 2, 5, 9, 30])
        timers: dict[str, Any] = {
            name: rng.uniform(0, 30) for name in ("deadline", "time_limit", "queue_timeout") if rng.random() < 0.1
        }
        grammar = ScriptedMatcher(rng.randrange(1 << 30), rng.choice([2, 6, 40])) if rng.random() < 0.2 else None
        stream = self.harness.add(
            prompt,
            max_tokens,
            grammar=grammar,
            compiled=False,
            num_sequences=rng.choice([1, 1, 1, 1, 2, 3]),
            logprobs=rng.choice([None, None, 0, 2]),
            prompt_logprobs=rng.choice([None, None, None, None, 1]),
            repetition=Repetition(1, 3, 2) if rng.random() < 0.1 else None,
            client=rng.randrange(2),
            forced={rng.randrange(max_tokens): rng.choice([EOS, 1])} if rng.random() < 0.5 else None,
            seed=rng.randrange(1 << 30),
            min_tokens=rng.choice([0, 0, 3]),
            stop_token_ids=rng.choice([(), (1,), (1, 7)]),
            ignore_eos=rng.random() < 0.1,
            priority=rng.choice([0, 0, 0, 1, -1]),
            cache_salt=rng.choice(["", "", "tenant"]),
            bypass_cache=rng.random() < 0.1,
            adapter=rng.choice(["", "", *sorted(self._adapters)]),
            **timers,
        )
        self.streams += [stream, *stream.siblings]
        if self._poison and rng.random() < 0.2:
            family = [stream, *stream.siblings]
            chosen = rng.choice(family)
            self.harness.worker.poison_seeds[chosen.sampling.seed] = rng.randrange(len(prompt) + max_tokens)
            self.guilty += family if chosen is stream else [chosen]
        if grammar is not None:
            self._compiling.append((stream, grammar))

    def _compile(self) -> None:
        if self._compiling:
            stream, grammar = self._compiling.pop(self._random.randrange(len(self._compiling)))
            broken = InvalidRequestError("constraint.regex", "is broken")
            self.harness.scheduler.attach_matcher(stream.request, broken if self._random.random() < 0.1 else grammar)
            self.harness.check()

    def _issue(self) -> None:
        if len(self.harness.in_flight) < self.harness.depth:
            self.harness.issue()

    def _land(self) -> None:
        if self.harness.in_flight:
            self.harness.land(fail=self._failures and self._random.random() < 0.05)

    def _step(self) -> None:
        self.harness.step()

    def _abort(self) -> None:
        if self.harness.live:
            stream = self._random.choice(list(self.harness.live.values()))
            if self.harness.in_flight and self._random.random() < 0.5:
                fail = self._failures and self._random.random() < 0.5
                self.harness.land(fail=fail, before_update=lambda: self.harness.abort(stream))
            self.harness.abort(stream)
        self.harness.scheduler.abort(0, [UNKNOWN])

    def _preempt(self) -> None:
        running = [stream for stream in self.harness.live.values() if stream.state is State.RUNNING]
        if running:
            self.harness.preempt(self._random.choice(running))

    def _pass_time(self) -> None:
        self.harness.clock.now += self._random.uniform(0, 2)

    def _pause(self) -> None:
        self.harness.scheduler.admission = "paused"

    def _freeze(self) -> None:
        self.harness.scheduler.admission = "frozen"

    def _resume(self) -> None:
        self.harness.scheduler.admission = "open"

    def _reset(self) -> None:
        self.harness.reset()

    def _load_adapter(self) -> None:
        name = self._random.choice("ab")
        with suppress(AdapterExistsError, AdapterLeavingError):
            self.harness.load_adapter(name, self._random.randrange(1, 4))
            self._adapters.add(name)

    def _close_adapter(self) -> None:
        if self._adapters:
            name = self._random.choice(sorted(self._adapters))
            self._adapters.remove(name)
            self.harness.close_adapter(name)

    def _new_weights(self) -> None:
        self.harness.reset(weights=self._random.randrange(1 << 30))


class ImpatientUser(RandomUser):
    """Aborts, preempts and resets far more often."""

    WEIGHTS: ClassVar[dict[str, float]] = RandomUser.WEIGHTS | {
        "_preempt": 12,
        "_abort": 6,
        "_new_weights": 4,
        "_reset": 2,
    }
