"""What requests share of the KV cache, and what they must not."""

from __future__ import annotations

import pytest

from core_proc.request import State
from protos.messages import FinishReason
from tests.core_proc.harness import Harness, Stream


def cached_tokens(stream: Stream) -> int:
    (admitted,) = stream.admitted
    return admitted.cached_tokens


def run(harness: Harness, *prompts: range, max_tokens: int = 1) -> list[Stream]:
    streams = [harness.add(prompt, max_tokens) for prompt in prompts]
    harness.run_to_end()
    return streams


@pytest.mark.parametrize(("length", "hit"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (16, 12)])
def test_hit_on_the_full_prompt_still_computes_at_least_one_token(length: int, hit: int) -> None:
    harness = Harness()
    run(harness, range(length))
    again = harness.add(range(length), 3)
    harness.issue()
    assert cached_tokens(again) == hit
    assert harness.scheduled == {again.handle: length - hit}
    harness.run_to_end()
    assert again.finished is not None
    assert again.finished.cached_tokens == hit


def test_output_is_shared_like_a_prompt() -> None:
    harness = Harness()
    (first,) = run(harness, range(6), max_tokens=9)
    follow_up = harness.add([*first.prompt, *first.token_ids, 1, 2])
    harness.run_to_end()
    assert cached_tokens(follow_up) == 12, "14 tokens were computed, three full blocks"


def test_output_is_shared_while_its_request_runs() -> None:
    harness = Harness()
    first = harness.add(range(6), 9)
    while len(first.token_ids) < 8:
        harness.step()
    follow_up = harness.add([*first.prompt, *first.token_ids])
    harness.issue()
    assert first.reason is None
    assert cached_tokens(follow_up) == 12
    harness.run_to_end()


def test_only_a_common_beginning_is_shared() -> None:
    harness = Harness()
    run(harness, range(12))
    same_middle = harness.add([99, *range(1, 12)])
    forked = harness.add([*range(6), 99, *range(7, 12)])
    harness.run_to_end()
    assert (cached_tokens(same_middle), cached_tokens(forked)) == (0, 4)


def test_another_salt_shares_nothing() -> None:
    harness = Harness()
    streams = [harness.add(range(12), 1, cache_salt=salt) for salt in ("", "a", "b", "a", "")]
    harness.run_to_end()
    assert [cached_tokens(stream) for stream in streams] == [0, 0, 0, 8, 8]


def test_identical_prompts_in_one_step_share_all_full_blocks() -> None:
    harness = Harness(prefill_cap=64)
    streams = [harness.add(range(14), 5) for _ in range(3)]
    harness.issue()
    assert harness.scheduled == {streams[0].handle: 14, streams[1].handle: 2, streams[2].handle: 2}
    assert harness.pool.num_free == 32 - 3 - 3
    tables = [new_row.block_ids for new_row in harness.worker.steps[0].new_rows]
    assert tables[0][:3] == tables[1][:3] == tables[2][:3]
    assert len({table[3] for table in tables}) == 3
    harness.run_to_end()


def test_chunk_shares_what_earlier_chunks_filled() -> None:
    harness = Harness(budget=8, prefill_cap=8)
    first = harness.add(range(20), 1)
    harness.step()
    second = harness.add(range(20), 1)
    harness.step()
    harness.step()
    assert cached_tokens(second) >= 8
    harness.run_to_end()
    assert first.token_ids == first.expected(1)


def test_block_that_a_last_chunk_completes_is_shared_in_the_next_step() -> None:
    harness = Harness(budget=6, prefill_cap=6)
    harness.add(range(8), 9)
    harness.step()
    harness.step()
    second = harness.add(range(9))
    harness.issue()
    assert cached_tokens(second) == 8
    harness.run_to_end()


def test_disabled_prefix_caching_shares_nothing() -> None:
    harness = Harness(prefix_caching=False)
    streams = run(harness, range(12), range(12))
    assert [cached_tokens(stream) for stream in streams] == [0, 0]
    assert not harness.pool._block_of


def test_request_that_bypasses_the_cache_reads_nothing_of_it() -> None:
    harness = Harness()
    run(harness, range(12))
    bypassing = harness.add(range(12), 9, bypass_cache=True)
    harness.step()
    harness.preempt(bypassing)
    harness.run_to_end()
    assert cached_tokens(bypassing) == 0
    assert sum(step.num_tokens for step in harness.worker.steps) == 12 + 12 + 13 + 7
    after = harness.add(range(12))
    harness.run_to_end()
    assert cached_tokens(after) == 8, "what others cached is still there"


@pytest.mark.parametrize("num_evicted", range(6))
def test_head_of_a_prefix_survives_longest(num_evicted: int) -> None:
    harness = Harness(num_blocks=9)
    run(harness, range(20))  # 5 cached, 3 empty
    run(harness, range(100, 100 + 4 * (3 + num_evicted) - 1))
    (again,) = run(harness, range(21))
    assert cached_tokens(again) == 20 - 4 * num_evicted


def test_least_recently_used_prefix_is_evicted_first() -> None:
    harness = Harness(num_blocks=9)
    run(harness, range(8))
    run(harness, range(50, 58))
    run(harness, range(9))  # uses the first again
    run(harness, range(100, 124))  # takes 4 empty blocks, then evicts 2
    (recent,) = run(harness, range(9))
    (old,) = run(harness, range(50, 59))
    assert (cached_tokens(old), cached_tokens(recent)) == (0, 8)


def test_empty_blocks_are_taken_before_cached_ones() -> None:
    harness = Harness(num_blocks=9)
    run(harness, range(12))  # leaves 3 cached and 5 empty
    run(harness, range(100, 119))  # takes the 5 empty
    (again,) = run(harness, range(13))
    assert cached_tokens(again) == 12


def test_idle_cached_blocks_that_are_hit_are_not_counted_as_free_too() -> None:
    harness = Harness(num_blocks=9)
    run(harness, range(16))  # 4 cached, 4 empty
    holder = harness.add(range(100, 111), 5)
    harness.step()
    assert harness.pool.num_free == 5
    hitting = harness.add(range(23), 1)  # 4 hits and 2 more: one too many
    harness.step()
    assert hitting.state is State.WAITING
    harness.run_to_end()
    assert hitting.reason is holder.reason is FinishReason.MAX_TOKENS


def test_reset_is_refused_while_a_block_is_referenced() -> None:
    harness = Harness(depth=2)
    stream = harness.add(range(12), 9)
    harness.issue()
    assert not harness.reset()
    harness.abort(stream)
    assert not harness.reset(), "a step in flight still touches them"
    harness.land()
    assert harness.reset()
    assert not harness.pool._block_of
    (again,) = run(harness, range(12))
    assert cached_tokens(again) == 0


def test_refused_reset_forgets_nothing() -> None:
    harness = Harness()
    run(harness, range(12))
    stream = harness.add([1], 5)
    harness.step()
    assert not harness.reset()
    (again,) = run(harness, range(12))
    assert stream.reason is FinishReason.MAX_TOKENS
    assert cached_tokens(again) == 8
