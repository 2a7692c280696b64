"""Requests that begin alike and come at once: the beginning is computed once, and nobody waits for nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from core_proc.request import State
from protos.messages import FinishReason
from tests.core_proc.harness import Harness
from tests.core_proc.plant import Plant, Visit
from tests.core_proc.test_chunk import cpu

if TYPE_CHECKING:
    from protos.step import SchedulerOutput
    from tests.core_proc.harness import Stream

PREFIX = range(10, 50)
"""Ten blocks."""
OUTPUT = 30


def crumbs(**options: int) -> Harness:
    """A scheduler that computes two blocks of a prompt in a step, beside an output."""
    harness = Harness(**{"num_blocks": 129, "prefill_cap": 8, "max_model_len": 64} | options)
    harness.add([1], OUTPUT, ignore_eos=True)
    harness.step()
    return harness


def add(harness: Harness, number: int, **options: object) -> Stream:
    """A prompt of the prefix and three tokens of its own."""
    return harness.add([*PREFIX, 100 + number, 200 + number, 300 + number], 2, **options)


def prompt_tokens(harness: Harness, streams: list[Stream]) -> int:
    """Computed of prompts, of requests that drew two tokens each, when all has ended."""
    return sum(step.num_tokens for step in harness.worker.steps) - OUTPUT - len(streams)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_prompts_that_begin_alike_compute_that_once_however_small_the_pieces(depth: int) -> None:
    harness = crumbs(depth=depth)
    streams = [add(harness, number) for number in range(6)]
    harness.run_to_end()
    assert prompt_tokens(harness, streams) == len(PREFIX) + 6 * 3
    assert [stream.admitted[0].cached_tokens for stream in streams] == [0] + 5 * [len(PREFIX)]


def test_a_follower_starts_in_the_step_after_the_one_that_has_the_last_common_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = crumbs()
    leader, follower = add(harness, 0), add(harness, 1)
    asides = []
    set_aside = harness.table.waiting.set_aside
    monkeypatch.setattr(
        harness.table.waiting, "set_aside", lambda request: (asides.append(request), set_aside(request))
    )
    for _ in range(5):
        assert not follower.admitted
        harness.issue()
        assert harness.scheduled == {1: 1, leader.handle: 8}
        harness.land()
    harness.issue()
    assert harness.scheduled == {1: 1, leader.handle: 3, follower.handle: 3}
    assert asides == [follower.request], "it is looked at once"
    harness.land()
    assert not harness.issue() or not harness.scheduler._followers._followers, "nothing is kept of them"
    harness.run_to_end()


def test_who_shares_less_starts_earlier() -> None:
    harness = crumbs()
    streams = [add(harness, 0), add(harness, 1), harness.add([*PREFIX[:16], 1, 2, 3], 2)]
    for _ in range(3):
        harness.step()
    assert [bool(stream.admitted) for stream in streams] == [True, False, True]
    harness.run_to_end()
    assert prompt_tokens(harness, streams) == len(PREFIX) + 3 * 3


def test_beginnings_of_beginnings_are_each_computed_once() -> None:
    harness = crumbs()
    prompts = [[*PREFIX[:24], *[1000 + branch] * 16, 2000 + leaf] for branch in range(2) for leaf in range(3)]
    streams = [harness.add(prompt, 2) for prompt in prompts]
    harness.run_to_end()
    assert prompt_tokens(harness, streams) == 24 + 2 * 16 + 6


@pytest.mark.parametrize("end", ["abort", "preempt"])
def test_when_the_leader_goes_the_next_one_leads(end: str) -> None:
    harness = crumbs()
    streams = [add(harness, number) for number in range(4)]
    harness.step()
    harness.step()
    if end == "abort":
        harness.abort(streams.pop(0))
    else:
        harness.preempt(streams[0])
    assert harness.scheduler.has_work
    harness.run_to_end()
    assert all(stream.reason is FinishReason.MAX_TOKENS for stream in streams)
    assert prompt_tokens(harness, streams) == len(PREFIX) + 3 * len(streams)


def test_when_nothing_runs_any_more_the_next_one_starts() -> None:
    harness = Harness(prefill_cap=8)
    leader, follower = add(harness, 0), add(harness, 1)
    harness.step()
    assert not follower.admitted
    harness.abort(leader)
    assert harness.scheduler.has_work
    harness.run_to_end()
    assert follower.reason is FinishReason.MAX_TOKENS


def test_nobody_waits_for_blocks_that_were_published_and_cannot_be_found() -> None:
    harness = crumbs()
    add(harness, 0)
    harness.step()
    harness.pool.forget_all()
    other = add(harness, 1)
    harness.step()
    assert other.admitted
    harness.run_to_end()


def test_suspects_are_tried_and_wait_for_nobody() -> None:
    harness = Harness(prefill_cap=8, num_blocks=129, max_model_len=64)
    streams = [add(harness, 0), harness.add(range(500, 505), 2)]
    assert harness.issue() is not None
    harness.land(fail=True)
    assert all(stream.request.is_suspect for stream in streams)
    streams += [harness.add(range(600, 640), 2), add(harness, 1)]
    harness.run_to_end()
    assert all(stream.reason is FinishReason.MAX_TOKENS for stream in streams)


@pytest.mark.parametrize(
    "options",
    [{"cache_salt": "other"}, {"bypass_cache": True}, {"prompt_logprobs": 0}, {"priority": -1}],
    ids=lambda options: next(iter(options)),
)
def test_who_cannot_share_or_goes_first_does_not_wait(options: dict[str, object]) -> None:
    harness = crumbs()
    add(harness, 0)
    harness.step()
    other = add(harness, 1, **options)
    harness.step()
    assert other.state is State.RUNNING
    harness.run_to_end()


def test_without_a_prefix_cache_nobody_waits() -> None:
    harness = crumbs(prefix_caching=False)
    streams = [add(harness, number) for number in range(3)]
    harness.step()
    assert all(stream.admitted for stream in streams)
    harness.run_to_end()


def test_others_go_on_meanwhile_but_take_no_places_of_those_that_wait() -> None:
    harness = crumbs(max_num_seqs=6)
    streams = [add(harness, number) for number in range(3)]
    others = [harness.add(range(500 + 10 * number, 505 + 10 * number), 30) for number in range(2)]
    urgent = harness.add(range(600, 605), 2, priority=-1)
    harness.step()
    assert [stream.state for stream in [*streams, *others, urgent]] == [
        *(State.RUNNING, State.WAITING, State.WAITING),
        *(State.RUNNING, State.WAITING),
        State.RUNNING,
    ]
    late = harness.add(range(700, 705), 2, priority=-1)
    harness.step()
    assert late.state is State.RUNNING, "it was to be served before those that wait"
    harness.abort(streams[1])
    harness.step()
    assert others[1].state is State.RUNNING
    harness.run_to_end()


@pytest.mark.parametrize(("length", "fits"), [(41, False), (40, True)])
def test_others_take_no_blocks_of_those_that_wait(length: int, fits: bool) -> None:
    harness = crumbs(num_blocks=17)
    streams = [add(harness, 0), add(harness, 1)]
    assert harness.issue() is not None
    assert harness.pool.num_free == 13
    harness.land()
    other = harness.add(range(500, 500 + length), 2)
    harness.issue()  # two for the leader: 11 are left, of which one is the follower's
    assert bool(other.admitted) is fits
    assert [stream.state for stream in streams] == [State.RUNNING, State.WAITING]
    harness.land()
    harness.run_to_end()


def test_a_follower_whose_time_is_up_ends_and_the_others_wait_on() -> None:
    harness = crumbs()
    add(harness, 0)
    hasty, patient = add(harness, 1, queue_timeout=1.0), add(harness, 2)
    harness.step()
    harness.clock.now = 2.0
    harness.step()
    assert hasty.reason is FinishReason.QUEUE_TIMEOUT
    assert patient.state is State.WAITING
    harness.run_to_end()
    assert patient.admitted[0].cached_tokens == len(PREFIX)


def test_nobody_waits_for_a_leader_whose_front_end_takes_nothing() -> None:
    harness = crumbs()
    leader = add(harness, 0, client=1)
    follower = add(harness, 1)
    harness.step()
    assert not follower.admitted
    harness.scheduler.held_back = [1]
    harness.step()
    assert follower.admitted
    harness.run_until_idle()
    assert follower.reason is FinishReason.MAX_TOKENS
    harness.scheduler.held_back = []
    harness.run_to_end()
    assert leader.reason is FinishReason.MAX_TOKENS


def test_32_prompts_behind_a_common_prefix_compute_it_once_beside_outputs() -> None:
    steps: list[SchedulerOutput] = []

    def seconds(step: SchedulerOutput) -> float:
        steps.append(step)
        return cpu(step)

    plant = Plant(num_rows=64, budget=2048, max_model_len=1024, num_blocks=4097, step_seconds=seconds)
    rng = np.random.default_rng(0)

    def prompt(length: int) -> np.ndarray:
        return rng.integers(10, 30_000, length, dtype=np.int32)

    prefix = prompt(512)
    outputs = [Visit(0.0, 64, 300, None, ignore_eos=True, prompt=prompt(64)) for _ in range(8)]
    burst = [Visit(3.0, 544, 4, None, ignore_eos=True, prompt=np.concatenate([prefix, prompt(32)])) for _ in range(32)]
    plant.run([*outputs, *burst])
    drawn = 8 * 300 + 32 * 4
    # A prompt's last step draws, and each token but the last is computed in a step of its own.
    assert sum(step.num_tokens for step in steps) == 8 * 64 + 512 + 32 * 32 + drawn - 40
    assert max(len(step.rows) for step in steps) > 12, "they run side by side"
