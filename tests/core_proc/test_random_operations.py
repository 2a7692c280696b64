"""Random operations in random order: the books balance after each, and every token is the right one."""

from __future__ import annotations

import pytest

from protos.messages import FinishReason
from tests.core_proc.random_user import ImpatientUser, RandomUser


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_books_balance_and_tokens_are_exact_after_10_000_random_operations(depth: int) -> None:
    users = [RandomUser(seed, depth) for seed in range(24)]
    for user in users:
        user.play(500)
    # The runs are worth something only if they got into trouble.
    stats = [user.harness.table.stats(0, 0) for user in users]
    assert sum(stat.preemptions for stat in stats) > 200
    assert sum(stat.prefix_hits for stat in stats) > 2000
    assert sum(user.harness.num_followed for user in users) > 100
    reasons = {stream.reason for user in users for stream in user.streams}
    assert reasons >= {
        FinishReason.EOS,
        FinishReason.STOP_TOKEN,
        FinishReason.MAX_TOKENS,
        FinishReason.ABORTED,
        FinishReason.DEADLINE,
        FinishReason.QUEUE_TIMEOUT,
        FinishReason.TIME_LIMIT,
        FinishReason.CONSTRAINT_DONE,
        FinishReason.REPETITION,
        FinishReason.INVALID,
    }
    assert FinishReason.ERROR not in reasons


@pytest.mark.parametrize("depth", [2, 3])
def test_tokens_arrive_once_and_in_order_whatever_happens_to_steps_in_flight(depth: int) -> None:
    for seed in range(200, 210):
        ImpatientUser(seed, depth).play(400)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_failing_steps_never_falsify_tokens(depth: int) -> None:
    users = [RandomUser(seed, depth, failures=True) for seed in range(100, 110)]
    for user in users:
        user.play(400)
    reasons = [stream.reason for user in users for stream in user.streams]
    assert sum(user.harness.worker.num_failed for user in users) > 20
    assert reasons.count(FinishReason.MAX_TOKENS) > 30


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_requests_that_make_steps_fail_end_and_no_others(depth: int) -> None:
    users = [RandomUser(seed, depth, poison=True) for seed in range(300, 310)]
    for user in users:
        user.play(400)
        for stream in user.streams:
            assert stream.reason is not FinishReason.ERROR or stream in user.guilty
            poison = user.harness.worker.poison_seeds.get(stream.sampling.seed)
            assert poison is None or len(stream.token_ids) <= max(0, poison + 1 - len(stream.prompt))
    reasons = [stream.reason for user in users for stream in user.streams]
    assert reasons.count(FinishReason.ERROR) > 20
    assert reasons.count(FinishReason.MAX_TOKENS) > 100


@pytest.mark.parametrize("depth", [2, 4])
def test_stages_learn_all_tokens_from_steps_and_compute_none_before_it_is_back(depth: int) -> None:
    users = [RandomUser(seed, depth, pipeline=True) for seed in (400, 401, 402, 1067, 1233)]
    users += [ImpatientUser(seed, depth, pipeline=True) for seed in range(405, 408)]
    users += [RandomUser(seed, depth, failures=True, pipeline=True) for seed in range(408, 411)]
    users += [RandomUser(seed, depth, poison=True, pipeline=True) for seed in range(411, 414)]
    for user in users:
        user.play(300)
    assert sum(user.harness.table.stats(0, 0).preemptions for user in users) > 100
    assert sum(len(stream.token_ids) for user in users for stream in user.streams) > 2000
