"""A step that fails ends the requests that make steps fail, no others, and nothing false is left for anybody."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from core_proc.request import State
from protos.messages import FinishReason
from tests.core_proc.harness import Harness, Stream
from tests.fakes import ScriptedMatcher


def cached_tokens(harness: Harness, prompt: list[int]) -> int:
    """What a new request with this prompt finds. The harness compares its tokens, too."""
    stream = harness.add(prompt)
    harness.run_to_end()
    (admitted,) = stream.admitted
    return admitted.cached_tokens


def test_failed_step_of_one_request_ends_it_and_no_others() -> None:
    harness = Harness(budget=4, prefill_cap=4)
    first, second = harness.add(range(4), 5), harness.add(range(20, 24), 5)
    harness.issue()
    assert list(harness.scheduled) == [first.handle]
    harness.land(fail=True)
    assert first.reason is FinishReason.ERROR
    assert first.finished is not None
    assert first.finished.message
    harness.run_to_end()
    assert second.token_ids == second.expected(5)


def test_request_that_did_not_compute_in_the_failed_step_goes_on_in_its_row() -> None:
    harness = Harness(budget=2)
    streams = [harness.add([n], 2 if n else 6) for n in range(3)]
    harness.step()
    harness.step()
    harness.issue()
    outside = [stream for stream in streams if stream.handle not in harness.scheduled]
    before = {stream.handle: stream.state for stream in outside}
    harness.land(fail=True)
    assert {stream.handle: stream.state for stream in outside} == before
    assert all(stream.state is State.WAITING for stream in streams if stream not in outside and not stream.finished)
    harness.run_to_end()
    for stream in streams:
        assert stream.reason is FinishReason.MAX_TOKENS


def test_prompt_blocks_of_a_failed_step_are_withdrawn() -> None:
    harness = Harness()
    harness.add(range(12))
    harness.issue()
    assert len(harness.pool._block_of) == 3
    harness.land(fail=True)
    assert not harness.pool._block_of
    assert cached_tokens(harness, [*range(12)]) == 0


def test_blocks_of_earlier_steps_stay_published() -> None:
    harness = Harness(budget=8)
    harness.add(range(20))
    harness.step()
    harness.issue()
    harness.land(fail=True)
    assert cached_tokens(harness, [*range(20)]) == 8


def completing_a_block(harness: Harness) -> Stream:
    """A request whose step in flight computes the last token of its second block."""
    stream = harness.add(range(5), 30)
    for _ in range(3):
        harness.issue()
        harness.land()
    harness.issue()
    assert harness.table.rows.computed[stream.request.row] == 8
    return stream


def whole(stream: Stream) -> list[int]:
    """Its prompt and output, as another request's prompt."""
    return [*stream.prompt, *stream.expected(20)]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_block_that_a_failed_decoding_step_was_to_complete_is_not_published(depth: int) -> None:
    harness = Harness(depth=depth)
    stream = completing_a_block(harness)
    for _ in range(depth - 1):
        harness.issue()  # the next one takes a third block, and publishes the second
    harness.land(fail=True)
    assert stream.reason is FinishReason.ERROR
    assert cached_tokens(harness, whole(stream)) == 4


@pytest.mark.parametrize("end", ["abort", "preempt"])
@pytest.mark.parametrize("when", ["in flight", "at its end"])
def test_block_of_a_request_that_left_before_the_step_failed_is_not_published(end: str, when: str) -> None:
    harness = Harness()
    stream = completing_a_block(harness)

    def leave() -> None:
        harness.abort(stream) if end == "abort" else harness.preempt(stream)

    if when == "in flight":
        leave()
        harness.land(fail=True)
    else:
        harness.land(fail=True, before_update=leave)
    harness.run_to_end()
    if end == "abort":
        assert cached_tokens(harness, whole(stream)) == 4
    else:
        assert stream.token_ids == stream.expected(30)


def test_request_that_shared_blocks_of_a_failed_step_starts_over() -> None:
    harness = Harness(depth=2, prefill_cap=64)
    failing = harness.add(range(12), 5)
    harness.issue()
    sharing = harness.add([*range(12), 50, 51], 5)
    harness.issue()
    assert harness.scheduled[sharing.handle] == 2
    harness.land(fail=True)
    assert failing.reason is FinishReason.ERROR
    assert sharing.state is State.WAITING
    harness.run_to_end()
    assert sharing.token_ids == sharing.expected(5)


def test_blocks_built_on_those_of_a_failed_step_are_withdrawn_with_them() -> None:
    harness = Harness(depth=2, prefill_cap=64)
    harness.add(range(8), 1)
    harness.issue()
    sharing = harness.add(range(16), 1)
    harness.issue()
    assert harness.scheduled[sharing.handle] == 8
    harness.land(fail=True)
    harness.abort(sharing)
    harness.land()
    assert cached_tokens(harness, [*range(9)]) == 0
    assert cached_tokens(harness, [*range(17)]) == 8, "the beginning was computed again, the rest was not"


def test_tokens_that_a_preempted_request_drew_after_a_failed_chunk_are_dropped() -> None:
    harness = Harness(depth=3, budget=8)
    stream = harness.add(range(16), 5)
    harness.issue()
    harness.issue()  # draws from what both wrote
    harness.preempt(stream)
    harness.land(fail=True)
    harness.land()
    assert stream.token_ids == []
    harness.run_to_end()
    assert stream.token_ids == stream.expected(5)


def test_tokens_that_a_preempted_request_drew_from_shared_false_blocks_are_dropped() -> None:
    harness = Harness(depth=3, prefill_cap=64)
    harness.add(range(12), 5)
    harness.issue()
    sharing = harness.add([*range(12), 50, 51], 5)
    harness.issue()
    harness.preempt(sharing)
    harness.land(fail=True)
    harness.land()
    assert sharing.token_ids == []
    harness.run_to_end()
    assert sharing.token_ids == sharing.expected(5)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("num_requests", [1, 5, 32])
def test_every_step_failing_ends_every_request_and_holds_nothing(num_requests: int, depth: int) -> None:
    harness = spacious(depth)
    streams = [harness.add(range(n, n + 6), 5) for n in range(num_requests)]
    while harness.live:
        while len(harness.in_flight) < depth and harness.issue():
            pass
        harness.land(fail=True)
    while harness.in_flight:
        harness.land(fail=True)
    assert {stream.reason for stream in streams} == {FinishReason.ERROR}
    assert harness.worker.num_failed <= 2 * num_requests + depth
    harness.assert_empty()
    assert not harness.pool._block_of


# Suspects: who among several makes a step fail ---------------------------------------------------


def spacious(depth: int = 1, budget: int = 512) -> Harness:
    """Room for 64 requests, and more."""
    return Harness(num_blocks=1025, budget=budget, max_num_seqs=80, max_model_len=128, depth=depth)


def most_failures(num_rows: int, num_guilty: int, depth: int) -> int:
    """Steps that may fail until the guilty of a step are found: one more level for those new in it, and the steps
    that were already in flight."""
    return num_guilty * (math.ceil(math.log2(num_rows)) + 2) + depth - 1


def check_ends(harness: Harness, innocent: list[Stream], guilty: list[Stream]) -> None:
    harness.run_to_end()
    for stream in innocent:
        assert stream.reason is FinishReason.MAX_TOKENS, stream
        assert stream.token_ids == stream.expected(stream.max_tokens)
    for stream in guilty:
        assert stream.reason is FinishReason.ERROR, stream
        assert stream.finished is not None
        assert stream.finished.message


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("num_rows", [1, 2, 8, 64])
def test_guilty_request_ends_alone(num_rows: int, depth: int) -> None:
    harness = spacious(depth)
    at = random.Random(num_rows + depth).randrange(num_rows)
    streams = [harness.add([n, n + 1, 7, 8, 9], 6, poison=0 if n == at else None) for n in range(num_rows)]
    guilty = [streams.pop(at)]
    check_ends(harness, streams, guilty)
    assert not guilty[0].token_ids
    assert harness.worker.num_failed <= most_failures(num_rows, 1, depth)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("num_guilty", [2, 5, 63])
def test_several_guilty_requests_end_and_the_others_do_not(num_guilty: int, depth: int) -> None:
    harness = spacious(depth)
    at = random.Random(num_guilty + depth).sample(range(64), num_guilty)
    streams = [harness.add([n, 6, 7], 6, poison=0 if n in at else None) for n in range(64)]
    guilty = [streams[n] for n in at]
    check_ends(harness, [stream for stream in streams if stream not in guilty], guilty)
    assert harness.worker.num_failed <= most_failures(64, num_guilty, depth)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("index", [1, 4, 11])
def test_request_that_is_guilty_at_a_later_token_ends_with_those_before_it(index: int, depth: int) -> None:
    harness = spacious(depth)
    streams = [harness.add([n, 6, 7], 16, poison=3 + index if n == 5 else None) for n in range(16)]
    guilty = streams.pop(5)
    check_ends(harness, streams, [guilty])
    # The one at its poisoned position is drawn, but never computed.
    assert guilty.token_ids == guilty.expected(index + 1)
    assert harness.worker.num_failed <= most_failures(16, 1, depth)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("poison", [1, 20, 50, 79])
def test_request_that_is_guilty_at_a_later_chunk_ends_alone(poison: int, depth: int) -> None:
    harness = spacious(depth, budget=16)
    short = [harness.add([n, n], 12) for n in range(4)]
    long = [harness.add([n, *range(80)], 3, poison=poison if n == 1 else None) for n in range(3)]
    guilty = long.pop(1)
    check_ends(harness, short + long, [guilty])
    assert not guilty.token_ids
    # Each of its chunks may be the first to fail only once; the others' are no trial of it.
    assert harness.worker.num_failed <= most_failures(8, 1, depth)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_step_that_fails_once_ends_nobody(depth: int) -> None:
    harness = spacious(depth)
    streams = [harness.add([n, 6, 7], 9) for n in range(9)]
    for _ in range(3):
        harness.step()
    harness.issue()
    harness.land(fail=True)
    check_ends(harness, streams, [])
    assert harness.worker.num_failed == 1


@pytest.mark.parametrize("depth", [2, 3])
def test_steps_in_flight_behind_a_failed_one_blame_nobody_else(depth: int) -> None:
    harness = spacious(depth)
    guilty, *streams = [harness.add([n, 6], 9, poison=0 if n == 0 else None) for n in range(4)]
    harness.issue()
    later = [harness.add([n], 9) for n in range(10, 13)]
    harness.issue()
    for _ in range(2):
        harness.land()
    assert harness.worker.num_failed == 2
    assert all(stream.request.is_suspect for stream in streams)
    assert not any(stream.request.is_suspect for stream in later)
    check_ends(harness, [*streams, *later], [guilty])
    assert harness.worker.num_failed <= most_failures(4, 1, depth)


def test_request_whose_batch_mate_was_aborted_is_tried_before_it_ends() -> None:
    harness = spacious()
    gone, stays = harness.add(range(6)), harness.add(range(7))
    harness.issue()
    harness.land(fail=True, before_update=lambda: harness.abort(gone))
    assert stays.state is State.WAITING
    check_ends(harness, [stays], [])


def test_requests_that_were_new_in_the_failed_step_are_tried_apart_from_the_others() -> None:
    harness = spacious()
    streams = [harness.add([n, 6, 7], 9) for n in range(7)]
    harness.step()
    harness.step()
    guilty = harness.add([1], poison=0)
    check_ends(harness, streams, [guilty])
    assert harness.worker.num_failed == 2


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_others_are_served_between_trials(depth: int) -> None:
    harness = spacious(depth)
    streams = [harness.add([n, 6, 7], 3, poison=0 if n % 8 == 0 else None) for n in range(32)]
    harness.issue()
    others = [harness.add([n, 100], 60) for n in range(5)]
    harness.land(fail=True)
    suspects = harness.scheduler._suspects
    trials = []
    while suspects:
        if step := harness.issue():
            trials.append(step.step_id == suspects.last_trial)
        if step is None or len(harness.in_flight) == depth:
            harness.land()
    assert sum(trials) > 10
    assert (True, True) not in itertools.pairwise(trials), "an ordinary step is between two trials"
    assert min(len(other.token_ids) for other in others) > trials.count(False) // 2
    check_ends(harness, [each for n, each in enumerate(streams) if n % 8] + others, streams[::8])


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_suspects_keep_their_place_before_those_who_came_later(depth: int) -> None:
    harness = Harness(num_blocks=65, max_num_seqs=4, depth=depth, max_model_len=64)
    streams = [harness.add([n, 6, 7], 20, poison=5 if n == 2 else None) for n in range(4)]
    for _ in range(depth):
        harness.step()
    later = [harness.add([n, 100], 20) for n in range(12)]
    while not streams[2].finished:
        assert harness.step()
        assert not any(stream.admitted for stream in later), "a row is for the one that gave it up"
    check_ends(harness, streams[:2] + streams[3:] + later, [streams[2]])


def test_suspects_keep_the_blocks_they_need_from_those_who_come_later() -> None:
    harness = Harness(num_blocks=13, max_num_seqs=8, max_model_len=44)
    streams = [harness.add([n, *range(20, 30)], 3) for n in range(3)]  # three blocks each
    harness.issue()
    later = harness.add([*range(100, 116)], 3)  # would fit beside two of them
    harness.land(fail=True)
    while not all(stream.finished for stream in streams):
        harness.step()
        assert not later.admitted or not any(stream.state is State.WAITING for stream in streams)
    check_ends(harness, [*streams, later], [])


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_guilty_sequence_of_a_prompt_ends_without_its_siblings(depth: int) -> None:
    harness = spacious(depth)
    leader = harness.add(range(2, 15), 6, num_sequences=4, seed=7)
    guilty = leader.siblings[1]
    harness.worker.poison_seeds[guilty.sampling.seed] = 0
    other = harness.add([5, 6], 9)
    check_ends(harness, [leader, other, *(each for each in leader.siblings if each is not guilty)], [guilty])


def test_guilty_leader_of_several_sequences_ends_with_those_that_wait_for_its_prompt() -> None:
    harness = spacious(budget=8)
    other = harness.add([5, 6], 9)
    leader = harness.add(range(2, 42), 6, num_sequences=3, poison=20)
    check_ends(harness, [other], [leader, *leader.siblings])


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_suspects_with_grammars_go_on_exactly(depth: int) -> None:
    harness = spacious(depth)
    streams = [harness.add([n, 6], 8, grammar=ScriptedMatcher(n, 40), logprobs=1) for n in range(6)]
    guilty = harness.add([9, 9], 8, grammar=ScriptedMatcher(9, 40), poison=5)
    check_ends(harness, streams, [guilty])
    assert guilty.token_ids == guilty.expected(4)


def on_trial(depth: int = 1) -> tuple[Harness, list[Stream]]:
    """Eight requests, all suspects."""
    harness = spacious(depth)
    streams = [harness.add([n, *range(10)], 6) for n in range(8)]
    harness.issue()
    harness.land(fail=True)
    assert all(stream.request.is_suspect for stream in streams)
    assert harness.scheduler.has_work
    return harness, streams


def test_aborted_suspects_leave_nothing_behind() -> None:
    harness, streams = on_trial()
    harness.abort(*streams[:3])
    harness.issue()
    harness.abort(*streams[3:])
    harness.land(fail=True)
    assert not harness.scheduler.has_work
    harness.run_to_end()


def test_suspects_run_out_of_time_as_others_do() -> None:
    harness = spacious()
    late, other = harness.add(range(6), deadline=5.0), harness.add(range(7))
    harness.issue()
    harness.land(fail=True)
    harness.clock.now = 6.0
    check_ends(harness, [other], [])
    assert late.reason is FinishReason.DEADLINE


def test_trials_go_on_while_admission_is_paused_and_stop_while_it_is_frozen() -> None:
    harness, streams = on_trial()
    late = harness.add([1, 2])
    harness.scheduler.admission = "frozen"
    assert not harness.scheduler.has_work
    assert harness.issue() is None
    harness.scheduler.admission = "paused"
    harness.run_until_idle()
    assert all(stream.finished for stream in streams)
    assert not late.admitted
    harness.scheduler.admission = "open"
    check_ends(harness, [*streams, late], [])


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_suspects_survive_a_reset_of_the_prefix_cache(depth: int) -> None:
    harness, streams = on_trial(depth)
    harness.step()
    harness.issue()
    harness.reset(weights=5)
    check_ends(harness, streams, [])


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_suspects_that_are_preempted_in_their_trial_are_tried_again(depth: int) -> None:
    harness, streams = on_trial(depth)
    harness.issue()
    running = [stream for stream in streams if stream.state is State.RUNNING]
    assert running
    for stream in running:
        harness.preempt(stream)
    harness.land()
    assert all(stream.request.is_suspect for stream in running)
    check_ends(harness, streams, [])


def test_suspects_with_short_prompts_do_not_wait_for_long_ones() -> None:
    harness = spacious(budget=32)
    long, *short = [harness.add(range(100, 150)), *(harness.add([n], 9) for n in range(3))]
    harness.issue()
    assert len(harness.scheduled) == 4
    harness.land(fail=True)
    while long.request.is_suspect:
        assert harness.step()
    assert all(not stream.request.is_suspect for stream in short)
    assert max(len(stream.token_ids) for stream in short) > 2, "they were served meanwhile"
    check_ends(harness, [long, *short], [])
