"""Random operations in random order: the books balance after each, and every token is the right one."""

from __future__ import annotations

import pytest

from protos.messages import FinishReason
from tests.core_proc.random_user import ImpatientUser, RandomUser


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_books_balance_and_tokens_are_exact_after_10_000_random_operations(depth: int) -> None:
    users = [RandomUser(seed, depth) for seed in range(20)]
    for user in users:
        user.play(500)
    # The runs are worth something only if they got into trouble.
    stats = [user.harness.table.stats(0, 0) for user in users]
    assert sum(stat.preemptions for stat in stats) > 200
    assert sum(stat.prefix_hits for stat in stats) > 2000
    reasons = {stream.reason for user in users for stream in user.streams}
    assert reasons >= {
        FinishReason.EOS,
        FinishReason.STOP_TOKEN,
        FinishReason.MAX_TOKENS,
        FinishReason.ABORTED,
        FinishReason.DEADLINE,
        FinishReason.QUEUE_TIMEOUT,
        FinishReason.TIME_LIMIT,
    }
    assert FinishReason.ERROR not in reasons


@pytest.mark.parametrize("depth", [2, 3])
def test_tokens_arrive_once_and_in_order_whatever_happens_to_steps_in_flight(depth: int) -> None:
    for seed in range(200, 210):
        ImpatientUser(seed, depth).play(400)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_failing_steps_end_requests_but_never_falsify_others(depth: int) -> None:
    users = [RandomUser(seed, depth, failures=True) for seed in range(100, 110)]
    for user in users:
        user.play(400)
    reasons = [stream.reason for user in users for stream in user.streams]
    assert reasons.count(FinishReason.ERROR) > 30
    assert reasons.count(FinishReason.MAX_TOKENS) > 30
