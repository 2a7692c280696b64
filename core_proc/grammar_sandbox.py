"""The sandbox: a process in which a constraint is compiled before the core dares to.

The engine bounds much by counting, but not all: schemas of a few hundred bytes take it minutes, gigabytes, or more
stack than there is, and what runs inside the core cannot be stopped. Here the kernel stops it: the child has little
memory and stack, and timers that kill it. What it came through, the core compiles again for its own vocabulary, with
more of each. The child starts with the first constraint, sleeps between two, and leaves with its parent.
"""

from __future__ import annotations

import contextlib
import random
import resource
import signal
import struct
import subprocess
import sys
import time
from typing import IO

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from core_proc.grammar_source import refuse, translate
from protos.child_process import child_environment, die_with_parent
from protos.errors import InvalidRequestError, RequestFailedError
from protos.messages import GrammarSpec

CPU_SECONDS = 2.0
"""Processor time that compiling and trying one constraint may take."""
WALL_SECONDS = 20.0
"""The same by the clock: a machine so loaded that it matters has no time for it."""
MEMORY_BYTES = 512 << 20
STACK_BYTES = 4 << 20
STEPS_TRIED = 48
MAX_STEP_SECONDS = 0.1
"""Processor time that one step of a trial may take."""
LIMITS = LLParserLimits(
    max_items_in_row=1_000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=20_000,  # about 1 kB each
    max_grammar_size=200_000,
    verbose_errors=False,
)
"""What the engine counts: about 15 ms for the mask of a step, and 30 MB for a grammar in use."""
_LENGTH = struct.Struct("<I")


class Verdict(msgspec.Struct, array_like=True):
    """Of a constraint: what to compile, or why not."""

    lark: str
    refusal: str = ""


class Sandbox:
    """A child process and the pipes to it. One thread at a time."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._decoder = msgspec.msgpack.Decoder(Verdict)

    def try_out(self, spec: GrammarSpec) -> str:
        """The Lark text of a constraint that compiles within the limits.

        Takes up to WALL_SECONDS. Raises InvalidRequestError for one that does not, and
        RequestFailedError where that cannot be told.
        """
        is_new = self._child is None
        child = self._child = self._child or _start()
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            _write(child.stdin, msgspec.msgpack.encode(spec))
            verdict = self._decoder.decode(_read(child.stdout))
        except (OSError, EOFError):
            code = self._exit_code(child)
            if code in (-signal.SIGPROF, -signal.SIGALRM):
                refuse(spec, f"takes longer to compile than {CPU_SECONDS:g} s")
            if code in (-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS):
                refuse(spec, "takes too much memory to compile")
            if is_new or self._closed:
                raise RequestFailedError(f"the grammar sandbox ended with code {code}") from None
            return self.try_out(spec)  # something may have killed it before it saw this one
        if verdict.refusal:
            raise InvalidRequestError(f"constraint.{spec.kind}", verdict.refusal)
        return verdict.lark

    def close(self) -> None:
        """Ends the child, busy or not; from any thread. `try_out` must not be called any more."""
        self._closed = True
        if (child := self._child) is not None:
            child.kill()
            self._exit_code(child)

    def _exit_code(self, child: subprocess.Popen[bytes]) -> int:
        self._child = None
        try:
            code = child.wait(timeout=1.0)  # its end of a pipe closes a moment before it is gone
        except subprocess.TimeoutExpired:
            child.kill()
            code = child.wait()
        for pipe in (child.stdin, child.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # what it did not read any more
                pipe.close()
        return code


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "core_proc.grammar_sandbox"],
        env=child_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


def _write(pipe: IO[bytes], body: bytes) -> None:
    pipe.write(_LENGTH.pack(len(body)) + body)
    pipe.flush()


def _read(pipe: IO[bytes]) -> bytes:
    """Raises EOFError where the other side has gone."""
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    (length,) = _LENGTH.unpack(head)
    body = pipe.read(length)
    if len(body) < length:
        raise EOFError
    return body


# The child -----------------------------------------------------------------------------------


def judge(spec: GrammarSpec, tokenizer: LLTokenizer) -> Verdict:
    """Compiles a constraint for a vocabulary of single bytes and follows it for some steps at random."""
    try:
        lark = translate(spec)
        matcher = LLMatcher(tokenizer, lark, log_level=0, limits=LIMITS)
        rng = random.Random(0)
        for _ in range(STEPS_TRIED):
            start = time.process_time()
            mask = matcher.compute_bitmask()
            if matcher.is_error():
                refuse(spec, explain(matcher))
            if matcher.is_stopped():
                break
            matcher.consume_token(rng.choice([i for i in range(tokenizer.vocab_size) if mask[i >> 3] >> (i & 7) & 1]))
            if time.process_time() - start > MAX_STEP_SECONDS:
                refuse(spec, "too complex: a step takes too long")
    except InvalidRequestError as error:
        return Verdict("", error.description)
    except MemoryError:
        return Verdict("", "takes too much memory to compile")
    return Verdict(lark)


def explain(matcher: LLMatcher) -> str:
    """Why a matcher is in error."""
    return "nothing can match it" if "NoExtension" in matcher.get_error() else matcher.get_error()


def main() -> None:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: our parent decides
    for kind, limit in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_STACK, STACK_BYTES),
        (resource.RLIMIT_DATA, MEMORY_BYTES),
    ):
        resource.setrlimit(kind, (limit, resource.getrlimit(kind)[1]))
    tokenizer = LLTokenizer("byte")
    decoder = msgspec.msgpack.Decoder(GrammarSpec)
    while True:
        try:
            body = _read(sys.stdin.buffer)
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # no handler: they end us wherever we are
        signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS)
        verdict = judge(decoder.decode(body), tokenizer)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        _write(sys.stdout.buffer, msgspec.msgpack.encode(verdict))


if __name__ == "__main__":
    main()
