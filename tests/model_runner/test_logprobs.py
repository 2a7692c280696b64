"""Log-probabilities, ranks and candidates against float64, and prompts' against transformers, in whatever chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from msgspec.structs import replace

from model_runner.logprobs import join, split
from model_runner.prompt_spans import prompt_spans
from protos.messages import Sampling
from protos.step import Logprobs, SchedulerOutput
from tests.model_runner.driver import Driver
from tests.model_runner.reported import check_generation
from tests.model_runner.rows import VOCAB, History, Rows, edited_twin, kept_in_float64, logits_of, mask_of
from tests.model_runner.tiny import VOCAB as TINY_VOCAB
from tests.model_runner.tiny import load_tiny, save_tiny

if TYPE_CHECKING:
    from pathlib import Path

    from model_runner.runner import ModelRunner

TOLERANCE = 1e-5


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))


def check_row(row: Logprobs, token_id: int, logits: np.ndarray, sampling: Sampling) -> None:
    """One row's columns against the float64 logits it reports of: exactly their order where they are raw, which
    edits in float32 can change by a rounding."""
    expected, slack = log_softmax(logits), TOLERANCE if sampling.processed_logprobs else 0.0
    num_top, extra = min(sampling.logprobs or 0, len(logits)), sampling.logprob_token_ids
    assert row.widths.tolist() == [num_top + len(extra)] == [len(row.top_ids)] == [len(row.top_logprobs)]
    larger = int((logits > logits[token_id] + slack).sum()), int((logits > logits[token_id] - slack).sum())
    assert larger[0] < row.ranks[0] <= larger[1] + 1
    top_ids = row.top_ids[:num_top].tolist()
    assert len(set(top_ids)) == num_top
    # Of equal tokens any may come first.
    np.testing.assert_allclose(logits[top_ids], np.sort(logits)[::-1][:num_top], rtol=0, atol=slack)
    assert tuple(row.top_ids[num_top:].tolist()) == extra
    np.testing.assert_allclose(row.logprobs, [expected[token_id]], atol=TOLERANCE)
    np.testing.assert_allclose(row.top_logprobs, expected[row.top_ids], atol=TOLERANCE)


def rows_of(logprobs: Logprobs | None) -> dict[int, Logprobs]:
    assert logprobs is not None
    for name, kind in (("index", "i4"), ("ranks", "i4"), ("widths", "i4"), ("top_ids", "i4"), ("logprobs", "f4")):
        assert getattr(logprobs, name).dtype == kind, name
    assert logprobs.top_logprobs.dtype == np.float32
    return dict(zip(logprobs.index.tolist(), split(logprobs, np.ones_like(logprobs.index)), strict=True))


REPORTS: list[dict[str, Any]] = [
    {},
    {"logprobs": 1},
    {"logprobs": 0},
    {"logprobs": 5},
    {"logprobs": VOCAB + 5},
    {"logprob_token_ids": (4, 2999, 0)},
    {"logprobs": 20, "logprob_token_ids": (4, 4)},
]
EDITED: dict[str, Any] = {
    "repetition_penalty": 1.4,
    "frequency_penalty": 0.5,
    "logit_bias": {5: 3.0, 6: -3.0},
    "bad_words": ((8,),),
}


KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8},
    EDITED,
    {"temperature": 1.6, "top_k": 50, "top_p": 0.9, **EDITED},
]


def mixed(size: int) -> list[Sampling]:
    """Every report, raw and processed, of greedy, random, edited and filtered rows: 56 kinds."""
    every = [
        {**kind, **report, "processed_logprobs": processed}
        for processed in (False, True)
        for report in REPORTS
        for kind in KINDS
    ]
    return [Sampling(seed=row, **every[row % len(every)]) for row in range(size)]


@pytest.mark.parametrize("chunk_cells", [1, 1 << 14, 1 << 30])
def test_49_raw_and_processed_equal_float64_with_ties_beside_all_kinds_of_rows(chunk_cells: int):
    samplings, random = mixed(64), np.random.default_rng(3)
    histories: list[History] = [(random.integers(20, size=12).tolist(), 4) for _ in samplings]
    allowed = {place: random.random(VOCAB) < 0.5 for place in range(0, 64, 3)}
    logits = (logits_of(64, seed=9) * 8).round() / 8
    rows = Rows(samplings, chunk_cells, histories)
    token_ids, logprobs = rows.sample(logits, mask=mask_of(allowed))
    found = rows_of(logprobs)
    asking = [place for place, one in enumerate(samplings) if one.logprobs is not None or one.logprob_token_ids]
    assert list(found) == asking
    for place in asking:
        one, reported = samplings[place], logits[place].double().numpy()
        if one.processed_logprobs:
            reported = edited_twin(logits[place].numpy(), one, histories[place], allowed.get(place))
            if one.temperature:
                scaled = reported.astype(np.float32) / np.float32(one.temperature)
                reported = np.where(kept_in_float64(scaled, one.top_k, one.top_p, one.min_p), scaled, -np.inf)
        check_row(found[place], token_ids[place], reported.astype(np.float64), one)
    # Neither tokens nor numbers depend on who else asks for what.
    for place in range(0, 64, 7):
        alone = Rows(samplings[place : place + 1], chunk_cells, histories[place : place + 1])
        mask = mask_of({0: allowed[place]}) if place in allowed else None
        drawn, own = alone.sample(logits[place : place + 1], mask=mask)
        assert drawn == [token_ids[place]]
        if place in found:
            assert own is not None
            assert np.array_equal(own.logprobs, found[place].logprobs)
            assert np.array_equal(own.top_logprobs, found[place].top_logprobs)
        else:
            assert own is None


def test_49_reporting_changes_no_token():
    samplings = mixed(64)
    silent = [replace(one, logprobs=None, logprob_token_ids=(), processed_logprobs=False) for one in samplings]
    assert Rows(samplings).draw(logits_of(64)) == Rows(silent).draw(logits_of(64))
    assert Rows(silent).sample(logits_of(64))[1] is None


def test_huge_logits_have_finite_logprobs():
    logits = logits_of(2, scale=1e4)
    _, logprobs = Rows([Sampling(logprobs=2)] * 2).sample(logits)
    assert logprobs is not None
    assert logprobs.logprobs.tolist() == [0.0, 0.0]
    assert np.isfinite(logprobs.top_logprobs).all()


def test_a_row_that_drew_nothing_reports_nothing():
    empty = {0: np.zeros(VOCAB, np.bool_)}
    _, logprobs = Rows([Sampling(logprobs=1), Sampling(logprobs=1)]).sample(logits_of(2), mask=mask_of(empty))
    assert logprobs is not None
    assert logprobs.index.tolist() == [1]
    assert Rows([Sampling(logprobs=1)]).sample(logits_of(1), mask=mask_of(empty)) == ([-1], None)


def test_split_undoes_join():
    _, logprobs = Rows(mixed(56)).sample(logits_of(56))
    assert logprobs is not None
    parts = split(logprobs, np.array([3, 0, 5, len(logprobs.index) - 8]))
    assert [part.index.tolist() for part in parts[:3]] == [[0, 1, 2], [], [0, 1, 2, 3, 4]]
    joined = join(parts)
    for name in ("logprobs", "ranks", "widths", "top_ids", "top_logprobs"):
        assert np.array_equal(getattr(joined, name), getattr(logprobs, name)), name


# prompts --------------------------------------------------------------------------------------


def test_spans_of_a_step():
    def ints(*numbers: int) -> Any:
        return np.array(numbers, np.int32)

    # Rows: a whole prompt of 4; a middle chunk; a last chunk; one that decodes; one that asks for nothing; a
    # resume with output behind its prompt of 6, of which 5 positions are told; a prompt of one token.
    step = SchedulerOutput(
        1, ints(9, 8, 7, 6, 5, 4, 3), ints(0, 10, 20, 30, 0, 0, 0), ints(4, 5, 3, 1, 9, 8, 1), np.ones(7, np.bool_)
    )
    asking = np.array([True, True, True, True, False, True, True])
    spans = prompt_spans(step, asking, ints(1, 1, 1, 1, 1, 5, 1), ints(4, 40, 23, 30, 9, 6, 1))
    assert spans is not None
    assert spans.rows.tolist() == [9, 8, 7, 4]
    assert spans.starts.tolist() == [1, 11, 21, 5]
    assert spans.counts.tolist() == [3, 5, 2, 1]
    # The tokens of the step begin at 0, 4, 9, 12, 13, 22, 30.
    assert spans.tokens.tolist() == [0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 22 + 4]
    rows, positions = spans.flat()
    assert rows.tolist() == [9] * 3 + [8] * 5 + [7] * 2 + [4]
    assert positions.tolist() == [1, 2, 3, 11, 12, 13, 14, 15, 21, 22, 5]
    assert prompt_spans(step, ~asking, ints(1, 1, 1, 1, 9, 1, 1), ints(4, 40, 23, 30, 9, 6, 1)) is None


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelRunner, Any]:
    path: Path = tmp_path_factory.mktemp("tiny")
    model = save_tiny(path, "LlamaForCausalLM")
    return load_tiny(path, num_kv_blocks=128), model


ASKING = [
    Sampling(prompt_logprobs=3),
    Sampling(prompt_logprobs=0, logprobs=2, logprob_token_ids=(3, 198)),
    Sampling(),
    Sampling(prompt_logprobs=7, temperature=1.0, seed=3, logprobs=0, repetition_penalty=1.3),
    Sampling(logprobs=4),
]
LENGTHS = (150, 1, 90, 2, 17)


@pytest.mark.parametrize("budget", [4096, 64, 7])
def test_prompts_equal_transformers_in_chunks_of_any_size(tiny: tuple[ModelRunner, Any], budget: int):
    runner, model = tiny
    driver = Driver(runner, 128, 8)
    generator = np.random.default_rng(budget)
    generations = [
        driver.add(generator.integers(0, TINY_VOCAB, length).tolist(), 6, sampling)
        for length, sampling in zip(LENGTHS, ASKING, strict=True)
    ]
    driver.run(generations, budget)
    for generation in generations:
        check_generation(model, generation)
    assert (len(generations[0].prompt_logprobs) > 1) == (budget < 150)


def test_a_preempted_prompt_is_told_once(tiny: tuple[ModelRunner, Any]):
    """In the middle of its prefill, and again while it decodes."""
    runner, model = tiny
    driver = Driver(runner, 128, 8)
    generations = [driver.add(np.arange(70 + row).tolist(), 9, ASKING[row]) for row in (0, 1, 3)]
    for num_steps in (2, 12):
        driver.run(generations, budget=25, num_steps=num_steps)
        for generation in generations:
            driver.preempt(generation)
    driver.run(generations, budget=25)
    for generation in generations:
        check_generation(model, generation)


def test_a_prefix_hit_tells_of_what_is_computed(tiny: tuple[ModelRunner, Any]):
    runner, model = tiny
    driver = Driver(runner, 128, 8)
    prompt = np.arange(60).tolist()
    first = driver.add(prompt, 1)
    driver.run([first])
    second = driver.add([*prompt[:40], *range(30)], 5, ASKING[1])
    assert driver.share_prefix(second, first) == 32
    driver.run([second], budget=10)
    check_generation(model, second, first=33)
