"""Requests with a grammar among others: when they wait, what they may draw, how they end."""

from __future__ import annotations

import pytest

from core_proc.request import State
from protos.errors import InvalidRequestError, OverloadedError, RequestFailedError, TailraceError
from protos.messages import FinishReason
from tests.core_proc.harness import Harness
from tests.fakes import ScriptedMatcher


def test_request_waits_for_its_grammar_and_those_behind_it_do_not() -> None:
    harness = Harness()
    grammar = ScriptedMatcher(key=7, length=3)
    waiting = harness.add(range(2, 10), grammar=grammar, compiled=False)
    assert not harness.scheduler.has_work
    other = harness.add(range(20, 28))
    harness.run_until_idle()
    assert other.reason is FinishReason.MAX_TOKENS
    assert not waiting.admitted
    harness.scheduler.attach_matcher(waiting.request, grammar)
    harness.run_to_end()
    assert waiting.reason is FinishReason.CONSTRAINT_DONE
    assert len(waiting.token_ids) == 3


def test_broken_grammar_ends_its_request_and_its_siblings_alone() -> None:
    harness = Harness()
    broken = harness.add(range(2, 10), grammar=ScriptedMatcher(1, 3), compiled=False, num_sequences=2)
    other = harness.add(range(2, 10))
    harness.scheduler.attach_matcher(broken.request, InvalidRequestError("constraint.regex", "is broken"))
    harness.run_to_end()
    for stream in [broken, *broken.siblings]:
        assert stream.finished is not None
        assert stream.finished.reason is FinishReason.INVALID
        assert (stream.finished.field, stream.finished.message) == ("constraint.regex", "is broken")
    assert other.reason is FinishReason.MAX_TOKENS


def test_request_aborted_while_its_grammar_compiles_stays_ended() -> None:
    harness = Harness()
    stream = harness.add(range(2, 10), grammar=ScriptedMatcher(1, 3), compiled=False)
    harness.abort(stream)
    harness.scheduler.attach_matcher(stream.request, ScriptedMatcher(1, 3))
    harness.scheduler.attach_matcher(stream.request, InvalidRequestError("constraint.regex", "is broken"))
    harness.run_to_end()
    assert stream.reason is FinishReason.ABORTED


@pytest.mark.parametrize("depth", [2, 3])
def test_mask_is_built_from_the_token_before_and_batch_mates_run_ahead(depth: int) -> None:
    harness = Harness(depth=depth)
    constrained = harness.add(range(2, 10), max_tokens=20, grammar=ScriptedMatcher(3, 12))
    free = harness.add(range(20, 28), max_tokens=20)
    together = 0
    while harness.live:
        while len(harness.in_flight) < depth and harness.issue() is not None:
            pass
        flying = [request.handle for step in harness.in_flight for request in step.requests]
        assert flying.count(constrained.handle) <= 1
        together += flying.count(free.handle) == depth
        harness.land()
    assert together > 5
    assert constrained.reason is FinishReason.CONSTRAINT_DONE
    harness.run_to_end()


def test_siblings_follow_the_grammar_each_by_itself() -> None:
    harness = Harness(depth=2)
    leader = harness.add(range(2, 10), max_tokens=20, grammar=ScriptedMatcher(3, 5), num_sequences=3)
    harness.run_to_end()
    streams = [leader, *leader.siblings]
    assert [stream.reason for stream in streams] == [FinishReason.CONSTRAINT_DONE] * 3
    assert len({tuple(stream.token_ids) for stream in streams}) == 3


def test_preempted_with_a_token_in_flight_the_grammar_takes_it_in() -> None:
    harness = Harness(depth=2)
    stream = harness.add(range(2, 10), max_tokens=20, grammar=ScriptedMatcher(3, 6))
    while len(stream.token_ids) < 2:
        harness.step()
    harness.issue()
    harness.preempt(stream)
    assert stream.state is State.WAITING
    harness.run_to_end()
    assert stream.reason is FinishReason.CONSTRAINT_DONE
    assert len(stream.token_ids) == 6


class DeadEnd(ScriptedMatcher):
    """Allows nothing after its second token."""

    def allowed(self) -> set[int]:
        return super().allowed() if self._left > 4 else set()

    def copy(self) -> DeadEnd:
        return DeadEnd(self._state, self._left)


def test_nothing_left_to_draw_ends_that_request_alone() -> None:
    harness = Harness()
    stuck = harness.add(range(2, 10), max_tokens=20, grammar=DeadEnd(3, 6))
    other = harness.add(range(2, 10), max_tokens=9)
    harness.run_to_end()
    assert stuck.finished is not None
    assert (stuck.reason, stuck.finished.field) == (FinishReason.INVALID, "constraint.regex")
    assert "no token is left" in stuck.finished.message
    assert len(stuck.token_ids) == 2
    assert other.reason is FinishReason.MAX_TOKENS


def test_token_the_grammar_does_not_allow_ends_that_request_alone() -> None:
    harness = Harness()
    stream = harness.add(range(2, 10), max_tokens=20, grammar=ScriptedMatcher(3, 6))
    other = harness.add(range(2, 10), max_tokens=9)
    harness.issue()
    harness.masks[0] = None  # a worker that does not look at the mask
    forbidden = (set(range(2, 256)) - ScriptedMatcher(3, 6).allowed()).pop()
    harness.worker.forced[stream.sampling.seed] = stream.reference._forced = {0: forbidden}
    stream.reference._matcher = None
    harness.run_to_end()
    assert stream.reason is FinishReason.ERROR
    assert other.reason is FinishReason.MAX_TOKENS


def test_length_comes_before_the_end_of_the_grammar() -> None:
    harness = Harness()
    stream = harness.add(range(2, 10), max_tokens=4, grammar=ScriptedMatcher(3, 4))
    harness.run_to_end()
    assert stream.reason is FinishReason.MAX_TOKENS


def test_grammar_that_is_done_before_the_first_token_ends_its_request_there() -> None:
    harness = Harness()
    stream = harness.add(range(2, 10), grammar=ScriptedMatcher(3, 0), num_sequences=2)
    harness.run_to_end()
    assert [each.reason for each in [stream, *stream.siblings]] == [FinishReason.CONSTRAINT_DONE] * 2
    assert not stream.token_ids


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OverloadedError("too many"), FinishReason.OVERLOADED),
        (RequestFailedError("the sandbox died"), FinishReason.ERROR),
    ],
)
def test_grammar_that_could_not_be_tried_is_no_fault_of_the_request(error: TailraceError, reason: FinishReason) -> None:
    harness = Harness()
    stream = harness.add(range(2, 10), grammar=ScriptedMatcher(3, 1), compiled=False)
    harness.scheduler.attach_matcher(stream.request, error)
    harness.check()
    assert stream.reason is reason


class Overgrown(ScriptedMatcher):
    """Outgrows its limits after two tokens, as a mask or as a token finds out."""

    def __init__(self, when: str) -> None:
        super().__init__(3, 9)
        self.when = when

    def accept(self, token_id: int) -> bool:
        accepted = super().accept(token_id)
        if self._left < 8 and self.when == "token":
            self.error = "too complex"
            return False
        return accepted

    def allowed(self) -> set[int]:
        if self._left < 8 and self.when == "mask":
            self.error = "too complex"
            return set()
        return super().allowed()


@pytest.mark.parametrize("when", ["mask", "token"])
def test_grammar_that_outgrows_its_limits_says_so(when: str) -> None:
    harness = Harness()
    stream = harness.add(range(2, 10), max_tokens=20, grammar=Overgrown(when))
    stream.reference._matcher = ScriptedMatcher(3, 9)
    harness.run_to_end()
    assert stream.finished is not None
    assert (stream.reason, stream.finished.message) == (FinishReason.INVALID, "too complex")
