"""What steps that came back tell of those to come."""

from __future__ import annotations

import random

import numpy as np
import pytest

from core_proc.step_time import StepTime
from protos.step import EMPTY, SchedulerOutput

FIXED, DRAW, TOKEN, CELL, READ = 8e-3, 0.6e-3, 0.9e-3, 0.2e-6, 0.8e-6


def step(counts: list[int], starts: list[int], samples: list[bool]) -> SchedulerOutput:
    return SchedulerOutput(
        step_id=0,
        rows=np.arange(len(counts), dtype=np.int32),
        starts=np.array(starts, np.int32),
        counts=np.array(counts, np.int32),
        samples=np.array(samples),
        new_rows=[],
        block_rows=EMPTY,
        block_ids=EMPTY,
        last_ids=EMPTY,
    )


def outputs(num_rows: int, context: int) -> SchedulerOutput:
    return step([1] * num_rows, [context] * num_rows, [True] * num_rows)


def mixed(num_rows: int, context: int, tokens: int, start: int) -> SchedulerOutput:
    return step([1] * num_rows + [tokens], [context] * num_rows + [start], [True] * num_rows + [False])


def learn(times: StepTime, step: SchedulerOutput, seconds: float) -> None:
    times.learn(step, step.num_tokens - len(step.rows), seconds)


def truth(step: SchedulerOutput, slow: float = 1.0) -> float:
    counts = step.counts.astype(float)
    cells = float(counts @ step.starts + counts @ counts / 2)
    tokens = DRAW * float(step.samples.sum()) + TOKEN * float(counts.sum())
    return slow * (FIXED + tokens + CELL * cells + READ * float(step.starts.sum()))


def taught(rng: random.Random, num_steps: int = 100, slow: float = 1.0, times: StepTime | None = None) -> StepTime:
    times = times or StepTime()
    for number in range(num_steps):
        one = outputs(rng.randint(1, 32), rng.randint(1, 2000))
        if number % 3 == 0:
            one = mixed(rng.randint(0, 32), rng.randint(1, 2000), rng.randint(2, 500), rng.randint(0, 8000))
        learn(times, one, truth(one, slow))
    return times


def errors(times: StepTime, slow: float = 1.0) -> list[float]:
    steps = [outputs(16, 500), outputs(1, 100), mixed(16, 500, 64, 0), mixed(16, 500, 64, 8000), mixed(0, 0, 512, 0)]
    return [times.of_step(one) / truth(one, slow) - 1 for one in steps]


def test_what_steps_are_made_of_is_learnt() -> None:
    assert errors(taught(random.Random(0))) == pytest.approx([0.0] * 5, abs=0.03)


def test_a_device_that_turns_slow_is_followed() -> None:
    rng = random.Random(1)
    times = taught(rng)
    assert errors(taught(rng, 160, slow=1.6, times=times), slow=1.6) == pytest.approx([0.0] * 5, abs=0.15)


def test_one_step_that_took_ages_changes_little() -> None:
    times = taught(random.Random(2))
    learn(times, mixed(16, 500, 64, 0), 60.0)
    assert max(map(abs, errors(times))) < 0.5


def test_thousands_of_steps_without_prompts_do_not_make_it_forget_what_prompts_take() -> None:
    times = taught(random.Random(3))
    for number in range(3000):
        learn(times, outputs(16, 500 + number % 100), truth(outputs(16, 500 + number % 100)))
    assert errors(times) == pytest.approx([0.0] * 5, abs=0.05)


def test_one_step_tells_what_others_like_it_take_and_no_time_is_negative() -> None:
    times = StepTime()
    assert times.of_step(outputs(16, 500)) == times.of_outputs(16, 8000) == 0.0
    learn(times, outputs(16, 500), 0.03)
    assert times.of_step(outputs(16, 500)) == pytest.approx(0.03, rel=0.01)
    learn(times, mixed(0, 0, 512, 0), 0.01)  # shorter than a step of 16 tokens: noise
    assert min(times.costs) >= 0.0
    for _ in range(StepTime.EVERY[0]):
        learn(times, outputs(16, 500), 0.0)
    assert times.of_step(outputs(16, 500)) > 0.0


def test_what_a_piece_reads_is_told_from_what_its_tokens_take() -> None:
    rng = random.Random(4)
    times = taught(rng)
    for start in (1000, 8000):
        assert times.of_reading(start) == pytest.approx(READ * start, rel=0.1)
        few, many = times.added(2, start), times.added(200, start)
        assert few == pytest.approx(2 * TOKEN + (READ + 2 * CELL) * start, rel=0.1)
        assert many == pytest.approx(200 * TOKEN + 200 * 100 * CELL + (READ + 200 * CELL) * start, rel=0.1)


def test_however_noisy_steps_are_the_next_is_not_much_larger() -> None:
    for seed in range(20):
        rng = random.Random(seed)
        times = StepTime()
        learn(times, mixed(0, 0, 512, 0), truth(mixed(0, 0, 512, 0)))
        for number in range(100):
            one = mixed(16, 300 + number, rng.randint(2, 12), 20 * number) if number % 2 else outputs(16, 300 + number)
            learn(times, one, truth(one) * rng.lognormvariate(0, 0.2))
            assert number < 90 or times.tokens_within(0.025, 20 * number) <= 24


def test_pieces_grow_in_a_few_steps_to_what_fits() -> None:
    times = taught(random.Random(5))
    for _ in range(60):
        learn(times, mixed(16, 500, 4, 100), truth(mixed(16, 500, 4, 100)))
    for _ in range(6):
        tokens = round(times.tokens_within(0.2, 0))
        learn(times, mixed(16, 500, tokens, 0), truth(mixed(16, 500, tokens, 0)))
    assert times.added(tokens, 0) == pytest.approx(0.2, rel=0.1)
