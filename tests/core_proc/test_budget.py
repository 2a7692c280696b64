"""Who gets how many tokens of a step."""

from __future__ import annotations

import pytest

from core_proc.request import State
from protos.messages import FinishReason
from tests.core_proc.harness import Harness
from tests.fakes import expected_tokens


def test_prompt_longer_than_budget_is_computed_in_chunks() -> None:
    harness = Harness(budget=8)
    stream = harness.add(range(20))
    chunks = []
    while not stream.token_ids:
        harness.issue()
        chunks.append(harness.scheduled[stream.handle])
        assert harness.worker.steps[-1].samples.tolist() == [sum(chunks) == 20]
        harness.land()
    assert chunks == [8, 8, 4]
    harness.run_to_end()
    assert stream.token_ids == expected_tokens(range(20), 4, seed=stream.sampling.seed)


def test_two_prompts_over_the_budget_are_split_between_steps() -> None:
    harness = Harness(budget=16, prefill_cap=16)
    first, second = harness.add(range(10)), harness.add(range(50, 62))
    harness.issue()
    assert harness.scheduled == {first.handle: 10, second.handle: 6}
    harness.land()
    assert (len(first.token_ids), len(second.token_ids)) == (1, 0)
    harness.issue()
    assert harness.scheduled == {first.handle: 1, second.handle: 6}
    harness.land()
    assert (len(first.token_ids), len(second.token_ids)) == (2, 1)
    harness.run_to_end()


def test_running_requests_are_served_before_waiting_ones_in_order_of_arrival() -> None:
    harness = Harness(budget=8, prefill_cap=8)
    running = [harness.add([10 * number], 8) for number in range(3)]
    harness.step()
    waiting = [harness.add(range(100, 120)), harness.add(range(20))]
    harness.issue()
    assert list(harness.scheduled.items()) == [*((s.handle, 1) for s in running), (waiting[0].handle, 5)]
    harness.land()
    harness.issue()
    assert list(harness.scheduled) == [*(s.handle for s in running), waiting[0].handle]
    harness.land()
    assert waiting[1].state is State.WAITING
    harness.run_to_end()


def test_budget_smaller_than_the_batch_serves_the_oldest() -> None:
    harness = Harness(budget=2)
    streams = [harness.add([number], 3) for number in range(4)]
    harness.step()
    assert [stream.state for stream in streams[2:]] == [State.WAITING] * 2
    harness.issue()
    assert list(harness.scheduled) == [streams[0].handle, streams[1].handle]
    harness.land()
    harness.run_to_end()


def test_rows_are_limited_and_a_free_one_is_taken_in_the_next_step() -> None:
    harness = Harness(max_num_seqs=2)
    short, long, waiting = harness.add([1], 2), harness.add([2], 6), harness.add([3], 2)
    harness.step()
    assert waiting.state is State.WAITING
    harness.issue()
    assert list(harness.scheduled) == [short.handle, long.handle]
    harness.land()
    assert short.reason is FinishReason.MAX_TOKENS
    harness.issue()
    assert harness.scheduled == {long.handle: 1, waiting.handle: 1}
    harness.land()
    harness.run_to_end()


def test_long_prompt_alone_takes_the_whole_budget() -> None:
    harness = Harness(budget=32, prefill_cap=8)
    stream = harness.add(range(50))
    harness.issue()
    assert harness.scheduled == {stream.handle: 32}
    harness.land()
    harness.issue()
    assert harness.scheduled == {stream.handle: 18}
    harness.land()
    harness.run_to_end()


@pytest.mark.parametrize("other_runs", [True, False], ids=["beside a running one", "beside a waiting one"])
def test_long_prompt_is_capped_while_another_request_has_work(other_runs: bool) -> None:
    harness = Harness(budget=32, prefill_cap=8)
    if other_runs:
        harness.add([1], 20)
        harness.step()
    long = harness.add(range(50))
    if not other_runs:
        harness.add([1], 20)
    for _ in range(2):  # when it starts, and when it goes on
        harness.issue()
        assert harness.scheduled[long.handle] == 8
        harness.land()
    harness.run_to_end()


def test_a_prompt_that_would_fit_into_the_budget_is_capped_beside_another() -> None:
    harness = Harness(budget=32, prefill_cap=8)
    harness.add([1], 20)
    harness.step()
    prompt = harness.add(range(20))
    for _ in range(2):  # when it starts, and when it goes on
        harness.issue()
        assert harness.scheduled[prompt.handle] == 8
        harness.land()
    harness.run_to_end()


def test_cap_defaults_to_a_quarter_of_the_budget() -> None:
    harness = Harness(budget=32)
    streams = [harness.add(range(50)), harness.add(range(100, 150))]
    harness.issue()
    assert harness.scheduled == {stream.handle: 8 for stream in streams}
    harness.land()
    harness.run_to_end()


def test_request_with_nothing_to_compute_does_not_block_those_behind_it() -> None:
    harness = Harness(depth=2)
    done, behind = harness.add([1], 1), harness.add([2], 4)
    harness.issue()
    harness.issue()
    assert harness.scheduled == {behind.handle: 1}, "the first ends when its step returns"
    assert done.state is State.RUNNING
    harness.run_to_end()


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_no_step_is_issued_for_a_request_that_is_certain_to_reach_max_tokens(depth: int, max_tokens: int) -> None:
    harness = Harness(depth=depth)
    stream = harness.add(range(6), max_tokens)
    harness.run_to_end()
    assert stream.reason is FinishReason.MAX_TOKENS
    assert sum(step.num_tokens for step in harness.worker.steps) == 6 + max_tokens - 1


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_no_step_is_issued_for_a_request_that_is_certain_to_fill_the_context(depth: int) -> None:
    harness = Harness(num_blocks=5, depth=depth)
    stream = harness.add(range(12), 100)
    harness.run_to_end()
    assert stream.reason is FinishReason.CONTEXT_FULL
    assert sum(step.num_tokens for step in harness.worker.steps) == 15


@pytest.mark.parametrize("prompt_length", [16, 17, 0])
def test_prompt_that_can_never_fit_is_refused(prompt_length: int) -> None:
    harness = Harness(num_blocks=5)
    stream = harness.add(range(prompt_length))
    assert stream.reason is FinishReason.ERROR
    assert stream.finished is not None
    assert "within 1 and 15" in stream.finished.message
    fits = harness.add(range(15))
    harness.run_to_end()
    assert fits.reason is FinishReason.CONTEXT_FULL


def test_context_longer_than_the_cache_is_refused_at_birth() -> None:
    with pytest.raises(AssertionError, match="never fit"):
        Harness(num_blocks=5, max_model_len=17)


def test_prompt_that_does_not_fit_whole_is_not_admitted_while_others_run() -> None:
    harness = Harness(num_blocks=9, budget=4)
    running = harness.add(range(16), 5)
    while not running.token_ids:
        harness.step()
    large = harness.add(range(100, 117), 1)
    while running.reason is None:
        assert large.state is State.WAITING, "its first chunk would fit, but not all of it"
        harness.step()
    harness.step()
    assert large.state is State.RUNNING
    harness.run_to_end()
    assert large.finished is not None
    assert large.finished.preemptions == running.finished.preemptions == 0  # type: ignore[union-attr]


def test_prompt_as_long_as_the_cache_runs_alone() -> None:
    harness = Harness(num_blocks=9, budget=8)
    stream = harness.add(range(31), 1)
    harness.run_to_end()
    assert stream.reason is FinishReason.MAX_TOKENS


def test_resumed_output_is_prefilled_and_only_the_rest_is_sent() -> None:
    harness = Harness()
    whole = harness.add(range(6), 8, seed=5)
    harness.run_to_end()
    rest = harness.add(range(6), 8, seed=5, output=whole.token_ids[:3])
    harness.issue()
    (new_row,) = harness.worker.steps[-1].new_rows
    assert (new_row.num_prompt_tokens, len(new_row.token_ids)) == (6, 9)
    harness.run_to_end()
    assert rest.token_ids == whole.token_ids
    assert rest.reason is FinishReason.MAX_TOKENS


def test_progress_tells_place_in_queue_then_prompt_tokens_computed() -> None:
    harness = Harness(budget=8, max_num_seqs=1)
    first, second, third = harness.add(range(20), 2), harness.add([1]), harness.add([2], 1, priority=-1)
    progress = harness.scheduler.table.progress
    assert [progress(0, stream.handle) for stream in (third, first, second)] == [[0, 0], [1, 0], [2, 0]]
    harness.step()
    assert third.reason is FinishReason.MAX_TOKENS
    harness.step()
    assert progress(0, first.handle) == [0, 2]
    assert progress(0, third.handle) == []
    harness.run_to_end()
