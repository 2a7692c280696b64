"""Grammars: which tokens may follow, for sequences whose output must have a form.

    submit ──► worker thread: sandbox, compile, replay ──► done(matcher)
    each step: fill(row) for each while the forward runs, accept(token) when it is drawn

The engine is llguidance (README.md has the measurements). It releases the GIL while it compiles and fills masks.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from core_proc.grammar_sandbox import LIMITS, Sandbox, explain
from core_proc.grammar_source import check_size, refuse
from protos.errors import InvalidRequestError, OverloadedError, RequestFailedError, TailraceError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeAlias

    from protos.messages import GrammarSpec, Vocabulary

    Done: TypeAlias = Callable[["Matcher | TailraceError"], None]
    Wanted: TypeAlias = Callable[[], bool]

logger = logging.getLogger(__name__)

Bits = npt.NDArray[np.int32]

MAX_CACHED = 32
"""Constraints whose compiled form, or error, is kept."""
MAX_COPIES = 256
"""Matchers of one compiled grammar. They share the states that it grows as they go, and the limit on those:
a grammar in steady use is compiled afresh before old sequences use up the room of new ones."""
MAX_WAITING = 256
"""Constraints that wait for the worker."""
STACK_BYTES = 64 << 20
"""Of the worker: whatever compiled on the sandbox's stack compiles on this one. Only what is used is ever allocated."""
SLOW_ACCEPT_SECONDS = 0.005
SLOW_MASK_SECONDS = 0.02
"""Processor time of an `accept`, and of a `fill`, that is counted: common ones take a thousandth of it, first visits of
a state up to a half. Ambiguous grammars, of which the engine follows all readings at once, get this slow before they
reach its limits."""
MAX_SLOW_SECONDS = 0.25
"""What slow ones of a request may take together, before it fails: everybody waits for them."""


class Budget:
    """Processor time that the slow steps of one request have taken, all its sequences together."""

    def __init__(self) -> None:
        self._seconds = 0.0

    @property
    def is_spent(self) -> bool:
        return self._seconds > MAX_SLOW_SECONDS

    def charge(self, start: float, least: float) -> None:
        """Counts the time since `start`, by this thread's clock, unless it is less than that."""
        seconds = time.thread_time() - start
        if seconds > least:
            self._seconds += seconds


class Matcher:
    """Where one sequence stands in its grammar. One thread at a time."""

    __slots__ = ("_budget", "_drawable", "_grammar", "_matcher", "is_done")

    def __init__(self, matcher: LLMatcher, drawable: Bits, grammar: _Grammar, budget: Budget) -> None:
        """Takes over a matcher of the engine. `drawable`: the tokens that are text, and the end-of-sequence tokens."""
        self._matcher = matcher
        self._drawable = drawable
        self._grammar = grammar
        self._budget = budget
        matcher.consume_tokens([])  # notices that nothing may follow
        self.is_done = matcher.is_stopped() and not matcher.is_error()
        """The output is complete and nothing may follow: it ends now, without an end-of-sequence token."""

    def accept(self, token_id: int) -> bool:
        """Moves on by a token. False: it is not allowed, and nothing has changed, or there is an `error`.

        An end-of-sequence token is accepted where the grammar may end.
        """
        if not 0 <= token_id < 32 * len(self._drawable) or not self._drawable[token_id >> 5] >> (token_id & 31) & 1:
            return False
        start = time.thread_time()
        accepted = self._matcher.try_consume_tokens([token_id]) == 1
        self._budget.charge(start, SLOW_ACCEPT_SECONDS)
        self.is_done = self._matcher.is_stopped() and not self._has_failed
        return accepted and not self._has_failed

    def fill(self, row: Bits) -> None:
        """Writes which tokens may follow to `row`, [ceil(vocab_size / 32)], contiguous, as `GrammarMask.bits` has them.

        End-of-sequence tokens are among them where the grammar may end. None are set after an `error`.
        """
        assert row.dtype == np.int32
        assert row.flags.c_contiguous
        start = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        self._budget.charge(start, SLOW_MASK_SECONDS)
        self._finish(row)

    @property
    def error(self) -> str | None:
        """Why no token can follow, though the output is not complete: the grammar outgrew its limits on the way."""
        if self._matcher.is_error():
            return explain(self._matcher).partition("\n")[0]
        return "too complex: its steps take too long" if self._has_failed else None

    @property
    def _has_failed(self) -> bool:
        return self._matcher.is_error() or self._budget.is_spent

    def copy(self) -> Matcher:
        """An independent matcher at the same place, for another sequence of the request: only its budget is shared."""
        self._grammar.num_copies += 1
        return Matcher(self._matcher.deep_copy(), self._drawable, self._grammar, self._budget)

    def _finish(self, row: Bits) -> None:
        if self._has_failed:
            self._grammar.is_broken = True
            self.is_done = False
            row.fill(0)
        else:
            np.bitwise_and(row, self._drawable, out=row)

    def __repr__(self) -> str:
        return f"Matcher(is_done={self.is_done}, may_end={self._matcher.is_accepting()}, error={self.error!r})"


class _Grammar:
    """A compiled grammar: a matcher at its start that is only ever copied."""

    def __init__(self, lark: str, start: LLMatcher) -> None:
        self.lark = lark
        self.start = start
        self.num_copies = 0
        self.is_broken = False
        """A matcher of it failed. They share states, so others may not get far either."""

    @property
    def is_fresh(self) -> bool:
        return not self.is_broken and self.num_copies < MAX_COPIES


class GrammarCompiler:
    """Makes matchers from constraints, on a thread of its own.

    That thread first builds what the engine needs of the vocabulary. This holds the GIL, once: about 0.3 s for
    49,152 tokens and 2 s for 262,144.
    """

    def __init__(self, vocabulary: Vocabulary, vocab_size: int) -> None:
        """`vocab_size` is the width of the logits, at least the number of tokens that the vocabulary spells."""
        assert len(vocabulary.tokens) <= vocab_size
        self._sandbox = Sandbox()
        self._cache: OrderedDict[tuple[str, str], _Grammar | InvalidRequestError] = OrderedDict()
        self._lock = threading.Lock()
        self._drawable = np.zeros(0, np.int32)
        self._jobs: queue.SimpleQueue[tuple[GrammarSpec, Sequence[int], Done, Wanted] | None] = queue.SimpleQueue()
        worker = threading.Thread(target=self._work, args=(vocabulary, vocab_size), name="grammar", daemon=True)
        before = threading.stack_size(STACK_BYTES)
        worker.start()
        threading.stack_size(before)

    def submit(
        self, spec: GrammarSpec, output_token_ids: Sequence[int], done: Done, is_wanted: Wanted = lambda: True
    ) -> None:
        """Calls `done` once: with a matcher that has accepted `output_token_ids`, or the error that ends the request;
        not at all if it is not wanted any more when its turn comes.

        `done` runs on the worker's thread, or on this one before `submit` returns if nothing is left to do; it
        must be quick and not raise. An InvalidRequestError names the field `constraint.<kind>`; other errors are ours.
        """
        try:
            check_size(spec)
        except InvalidRequestError as error:
            return done(error)
        known = self._lookup(spec)
        if isinstance(known, InvalidRequestError):
            done(known)
        elif known is not None and known.is_fresh and not output_token_ids:
            done(self._start(known))
        elif self._jobs.qsize() >= MAX_WAITING:
            done(OverloadedError("too many constraints wait to be compiled"))
        else:
            self._jobs.put((spec, output_token_ids, done, is_wanted))

    def close(self) -> None:
        """Ends the sandbox. What still waits is dropped or fails."""
        self._jobs.put(None)
        self._sandbox.close()

    def _lookup(self, spec: GrammarSpec) -> _Grammar | InvalidRequestError | None:
        """What is kept of a constraint, which is then the last to be forgotten."""
        with self._lock:
            if (known := self._cache.get((spec.kind, spec.value))) is not None:
                self._cache.move_to_end((spec.kind, spec.value))
            return known

    # The worker's thread --------------------------------------------------------------------

    def _work(self, vocabulary: Vocabulary, vocab_size: int) -> None:
        tokenizer = None
        try:
            self._drawable = drawable(vocabulary, vocab_size)
            tokenizer = build_tokenizer(vocabulary, vocab_size)
        except Exception:
            logger.exception("the vocabulary is not one that grammars can use")
        while (job := self._jobs.get()) is not None:
            spec, output_token_ids, done, is_wanted = job
            if not is_wanted():
                continue
            try:
                if tokenizer is None:
                    raise RequestFailedError("this model's vocabulary cannot be constrained")
                result: Matcher | TailraceError = self._make(spec, output_token_ids, tokenizer)
            except TailraceError as error:
                result = error
            except Exception:
                logger.exception("a constraint could not be compiled")
                result = RequestFailedError("the constraint could not be compiled")
            done(result)

    def _make(self, spec: GrammarSpec, output_token_ids: Sequence[int], tokenizer: LLTokenizer) -> Matcher:
        known = self._lookup(spec)
        if known is None or (isinstance(known, _Grammar) and not known.is_fresh):
            try:
                known = self._compile(spec, known.lark if known else self._sandbox.try_out(spec), tokenizer)
            except InvalidRequestError as error:
                known = error
            with self._lock:
                self._cache[spec.kind, spec.value] = known
                if len(self._cache) > MAX_CACHED:
                    self._cache.popitem(last=False)
        if isinstance(known, InvalidRequestError):
            raise known
        matcher = self._start(known)
        if not all(map(matcher.accept, output_token_ids)):
            refuse(spec, "the output there is does not match it")
        return matcher

    def _compile(self, spec: GrammarSpec, lark: str, tokenizer: LLTokenizer) -> _Grammar:
        start = LLMatcher(tokenizer, lark, log_level=0, limits=LIMITS)
        if not start.is_error():
            start.compute_bitmask()  # the first mask is the dearest, and its states are shared
        if start.is_error():
            refuse(spec, explain(start))
        return _Grammar(lark, start)

    def _start(self, grammar: _Grammar) -> Matcher:
        grammar.num_copies += 1
        return Matcher(grammar.start.deep_copy(), self._drawable, grammar, Budget())


class _Spelling:
    """What the engine wants to be told of a vocabulary. It never needs to tokenize, as our grammars force no text."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special_token_ids: list[int], eos_token_id: int) -> None:
        self.tokens = tokens
        self.special_token_ids = special_token_ids
        self.eos_token_id = eos_token_id

    def __call__(self, text: bytes) -> list[int]:
        raise NotImplementedError


def build_tokenizer(vocabulary: Vocabulary, vocab_size: int) -> LLTokenizer:
    """The engine's view of a vocabulary, padded to `vocab_size` with tokens that spell nothing."""
    tokens = vocabulary.tokens + [b""] * (vocab_size - len(vocabulary.tokens))
    # The engine insists on one: without any, token 0 poses, and `drawable` hides it.
    eos = list(vocabulary.eos_token_ids) or [0]
    special = sorted({*vocabulary.special_token_ids, *eos})
    return LLTokenizer(TokenizerWrapper(_Spelling(tokens, special, eos[0])), eos_token=eos)


def drawable(vocabulary: Vocabulary, vocab_size: int) -> Bits:
    """[ceil(vocab_size / 32)]: the tokens that are text, and the end-of-sequence tokens."""
    flags = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    flags[: len(vocabulary.tokens)] = [bool(token) for token in vocabulary.tokens]
    flags[list(vocabulary.special_token_ids)] = False
    flags[list(vocabulary.eos_token_ids) or [0]] = bool(vocabulary.eos_token_ids)
    return np.packbits(flags, bitorder="little").view(np.int32)
