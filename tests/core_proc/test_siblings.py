"""Sequences drawn from one prompt: computed once, shared by all."""

from __future__ import annotations

import pytest

from core_proc.request import State
from protos.messages import FinishReason
from tests.core_proc.harness import Harness


@pytest.mark.parametrize("depth", [1, 2])
def test_siblings_wait_for_the_prompt_and_share_all_its_full_blocks(depth: int) -> None:
    harness = Harness(budget=16, depth=depth)
    leader = harness.add(range(2, 42), num_sequences=4)  # 40 tokens: three chunks, ten blocks
    while not leader.token_ids:
        assert all(not sibling.admitted for sibling in leader.siblings)
        harness.step()
    harness.run_to_end()
    assert [sibling.admitted[0].cached_tokens for sibling in leader.siblings] == [36, 36, 36]
    assert sum(step.num_tokens for step in harness.worker.steps) == 40 + 3 * 4 + 4 * 3
    assert len({tuple(stream.token_ids) for stream in [leader, *leader.siblings]}) == 4


def test_held_siblings_do_not_slow_the_prompt_down() -> None:
    harness = Harness(budget=16, prefill_cap=3)
    harness.add(range(2, 42), num_sequences=3)
    step = harness.issue()
    assert step is not None
    assert step.counts.tolist() == [16]


def test_request_behind_held_siblings_is_served() -> None:
    harness = Harness(budget=16, prefill_cap=8)
    leader = harness.add(range(2, 42), num_sequences=3)
    other = harness.add(range(50, 58))
    harness.step()
    assert other.admitted
    assert not leader.siblings[0].admitted
    harness.run_to_end()


def test_siblings_run_on_when_the_first_ends_with_its_first_token() -> None:
    harness = Harness()
    leader = harness.add(range(2, 10), max_tokens=5, num_sequences=3, forced={0: 0})
    harness.run_to_end()
    assert leader.reason is FinishReason.EOS
    assert [sibling.reason for sibling in leader.siblings] == [FinishReason.MAX_TOKENS] * 2


def test_what_ends_the_first_before_its_prompt_is_computed_ends_all() -> None:
    harness = Harness(budget=16)
    aborted = harness.add(range(2, 42), num_sequences=3)
    harness.step()
    harness.abort(aborted)
    assert [stream.reason for stream in aborted.siblings] == [FinishReason.ABORTED] * 2
    harness.scheduler.admission = "paused"
    late = harness.add(range(2, 42), num_sequences=2, queue_timeout=1.0)
    harness.clock.now = 2.0
    harness.scheduler.expire(2.0)
    harness.check()
    assert [stream.reason for stream in [late, *late.siblings]] == [FinishReason.QUEUE_TIMEOUT] * 2
    harness.scheduler.admission = "open"
    endless = harness.add(range(2, 2 + 150), num_sequences=2)
    assert [stream.reason for stream in [endless, *endless.siblings]] == [FinishReason.ERROR] * 2
    harness.run_to_end()


def test_wait_for_the_prompt_is_no_wait_for_admission() -> None:
    harness = Harness(budget=16)
    leader = harness.add(range(2, 42), num_sequences=2, queue_timeout=1.0)
    harness.step()
    harness.clock.now = 5.0
    harness.run_to_end()
    assert leader.siblings[0].reason is FinishReason.MAX_TOKENS


def test_sibling_aborted_before_it_starts_leaves_the_others_alone() -> None:
    harness = Harness(budget=16)
    leader = harness.add(range(2, 42), num_sequences=3)
    harness.step()
    harness.abort(leader.siblings[0])
    harness.run_to_end()
    assert leader.siblings[0].reason is FinishReason.ABORTED
    assert leader.reason is leader.siblings[1].reason is FinishReason.MAX_TOKENS


def test_preempted_in_its_prompt_the_first_still_holds_its_siblings() -> None:
    harness = Harness(budget=16)
    leader = harness.add(range(2, 42), num_sequences=2)
    harness.step()
    harness.preempt(leader)
    harness.step()
    assert leader.state is State.RUNNING
    assert leader.siblings[0].state is State.WAITING
    harness.run_to_end()
    assert leader.siblings[0].admitted[0].cached_tokens == 36


def test_prompt_is_told_of_once_for_all_its_sequences() -> None:
    harness = Harness()
    leader = harness.add(range(2, 42), num_sequences=3, prompt_logprobs=0)
    harness.run_to_end()
    assert leader.prompt_logprobs == list(range(1, 40))
    assert [sibling.prompt_logprobs for sibling in leader.siblings] == [[], []]
    assert [sibling.admitted[0].cached_tokens for sibling in leader.siblings] == [36, 36]


def test_first_may_end_after_a_sibling_that_never_started() -> None:
    harness = Harness(budget=16)
    leader = harness.add(range(2, 42), num_sequences=3)
    harness.step()
    harness.abort(leader.siblings[0])
    harness.abort(leader)
    assert [sibling.reason for sibling in leader.siblings] == [FinishReason.ABORTED] * 2
    harness.run_to_end()


def test_outputs_of_sequences_are_cached_apart() -> None:
    harness = Harness()
    leader = harness.add(range(2, 10), 16, num_sequences=2)
    harness.run_to_end()
    for stream in [leader, *leader.siblings]:
        again = harness.add([*stream.prompt, *stream.token_ids], 1)
        harness.run_to_end()
        assert again.admitted[0].cached_tokens == 20
