"""Outputs go on while long prompts are computed beside them. In simulated time."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

import numpy as np
import pytest

from core_proc.chunk import Chunks
from protos.config import SchedulerOptions
from tests.core_proc.plant import Plant, Visit
from tests.core_proc.test_step_time import learn, step, taught, truth

if TYPE_CHECKING:
    from protos.step import SchedulerOutput

LONG = 8192
ARRIVES = 3.0
USUAL = 8e-3 + 16 * 1.5e-3
"""Seconds of a step of 16 outputs, but for their contexts."""


def cpu(output: SchedulerOutput) -> float:
    """Seconds of a step of a small model on a CPU: 0.9 ms for a token at the start of a prompt, 2.5 ms at 8,192, where
    a piece of it reads for 3.3 ms however few its tokens are."""
    counts = output.counts.astype(np.float64)
    cells = counts @ output.starts + counts @ counts / 2
    reads = output.starts.sum()
    tokens = 0.6e-3 * np.count_nonzero(output.samples) + 0.9e-3 * counts.sum()
    return float(8e-3 + tokens + 0.2e-6 * cells + 0.4e-6 * reads)


def run(gap: float, *others: Visit, length: int = LONG, tokens: int = 300) -> tuple[list[Visit], Visit, float]:
    """16 outputs, among which a prompt comes: they, it, and when all is done."""
    plant = Plant(budget=2048, max_model_len=2 * LONG, step_seconds=cpu, max_inter_token_gap=gap)
    streams = [Visit(0.0, 64, tokens, None, ignore_eos=True) for _ in range(16)]
    late = Visit(ARRIVES, length, 8, None, ignore_eos=True)
    plant.run([*streams, late, *others])
    return streams, late, max(visit.ended_at for visit in [*streams, late])


def gaps(streams: list[Visit], start: float, end: float) -> list[float]:
    return [
        b - a
        for stream in streams
        for a, b in zip(stream.token_times, stream.token_times[1:], strict=False)
        if b > start and a < end
    ]


def test_beside_a_long_prompt_outputs_wait_no_longer_than_they_are_to_and_all_is_done_as_soon() -> None:
    streams, late, end = run(1.5 * USUAL)
    usual = float(np.median(gaps(streams, 1.5, ARRIVES)))
    assert late.first_token_at is not None
    during = gaps(streams, ARRIVES, late.first_token_at)
    assert np.quantile(during, 0.99) <= 1.5 * usual
    assert max(during) <= 1.6 * usual
    unlimited, late, end_without = run(3600.0)
    assert late.first_token_at is not None
    assert max(gaps(unlimited, ARRIVES, late.first_token_at)) > 15 * usual
    assert end <= 1.1 * end_without


def test_by_default_a_step_takes_2_5_times_as_long_as_without_prompts() -> None:
    streams, late, _ = run(0.0, length=2048)
    usual = float(np.median(gaps(streams, 1.5, ARRIVES)))
    assert late.first_token_at is not None
    during = gaps(streams, ARRIVES, late.first_token_at)
    assert max(during) <= 2.75 * usual
    assert np.median(during) >= 2.3 * usual


def test_prompts_come_to_an_end_however_short_the_gap() -> None:
    streams, late, _ = run(1e-6, length=400)
    assert late.first_token_at is not None
    during = gaps(streams, ARRIVES, late.first_token_at)
    assert len(during) == pytest.approx(16 * 400 / Chunks.FEWEST, rel=0.05)


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    short = Visit(ARRIVES + 0.5, 64, 4, None, ignore_eos=True)
    _, late, _ = run(0.0, short)
    assert short.first_token_at is not None
    assert late.first_token_at is not None
    assert short.first_token_at < ARRIVES + 1.5 < late.first_token_at - 5


def test_a_prompt_alone_takes_whole_steps_again_when_outputs_have_ended() -> None:
    streams, late, _ = run(1.2 * USUAL, tokens=100)
    assert late.first_token_at is not None
    last = max(stream.ended_at for stream in streams)
    assert late.first_token_at > last + 1
    plant = Plant(budget=2048, max_model_len=2 * LONG, step_seconds=cpu, max_inter_token_gap=1.2 * USUAL)
    alone = Visit(0.0, LONG, 8, None, ignore_eos=True)
    plant.run([alone])
    assert alone.first_token_at is not None
    assert late.first_token_at - last < alone.first_token_at


def test_until_steps_were_seen_a_prompt_is_capped_by_tokens_alone() -> None:
    chunks = Chunks(SchedulerOptions(max_num_batched_tokens=2048, max_inter_token_gap=1e-3))
    todo, starts = np.array([1, 5000], np.int32), np.array([10, 0], np.int32)
    budget = chunks.budget(todo, starts, np.zeros(2, np.bool_), 0)
    assert budget.deal(todo, starts).tolist() == [1, 512]
    assert budget.tokens == 2048 - 513


def seconds_beside_an_output(chunks: Chunks, todo: int, waits: bool) -> float:
    """Of the step in which a prompt is computed beside an output, when it is known what steps take."""
    chunks.times = taught(random.Random(0))
    tokens, starts = np.array([todo, 5000], np.int32), np.array([10, 0], np.int32)
    counts = chunks.budget(tokens, starts, np.array([waits, False]), 0).deal(tokens, starts)
    return truth(step([1, int(counts[1])], [10, 0], [True, False]))


def test_in_a_pipeline_a_gap_is_that_of_a_round_of_steps() -> None:
    options = SchedulerOptions(max_inter_token_gap=0.4)
    for steps_per_token in (1, 4):
        seconds = seconds_beside_an_output(Chunks(options, steps_per_token), 1, waits=False)
        assert seconds == pytest.approx(0.4 / steps_per_token, rel=0.05)


def test_a_row_that_waits_for_its_token_counts_as_an_output() -> None:
    chunks = Chunks(SchedulerOptions(max_inter_token_gap=0.1))
    assert seconds_beside_an_output(chunks, 0, waits=True) == pytest.approx(0.1, rel=0.05)


def test_pieces_so_small_that_they_mostly_read_are_not_dealt_out() -> None:
    chunks = Chunks(SchedulerOptions(max_inter_token_gap=0.09))
    chunks.times = taught(random.Random(0))
    deep = 30_000  # to read as much takes 24 ms, a token 7
    todo, starts = np.array([1, 500, 500, 500, 500], np.int32), np.array([10, deep, deep, deep, 0], np.int32)
    counts = chunks.budget(todo, starts, np.zeros(5, np.bool_), 0).deal(todo, starts).tolist()
    assert counts[0] == 1
    assert counts[2:4] == [0, 0]
    assert counts[1] == 3, "it computes about as much as it reads"
    assert counts[4] >= 8, "a short prompt does not wait for those"
    assert truth(step(counts[:2] + counts[4:], [10, deep, 0], [True, False, False])) == pytest.approx(0.075, rel=0.1)


def test_what_is_expected_of_a_chunk_is_what_fits() -> None:
    times = Chunks(SchedulerOptions()).times
    assert times.tokens_within(1.0, 0) == math.inf
    learn(times, step([512], [0], [True]), 0.512)
    for start in (0, 100, 8000):
        tokens = times.tokens_within(0.2, start)
        assert times.added(tokens, start) == pytest.approx(0.2)
    reading = times.of_reading(8000)
    assert times.added(0, 8000) == pytest.approx(reading)
    assert times.tokens_within(0.9 * reading, 8000) == 0.0
