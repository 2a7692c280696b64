"""NullWorker: draws among what grammars allow, and scripted log-probabilities of drawn and prompt tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gpu_executor.null import VOCAB_SIZE, NullWorker
from protos.config import EngineConfig, ModelOptions
from protos.messages import Sampling
from protos.step import GrammarMask, NewRow, SchedulerOutput

if TYPE_CHECKING:
    from collections.abc import Iterable

    from protos.step import ModelRunnerOutput

CONFIG = EngineConfig(model=ModelOptions(model="null"))


def ints(*numbers: int) -> Any:
    return np.array(numbers, np.int32)


def mask_of(allowed: dict[int, Iterable[int]]) -> GrammarMask:
    bools = np.zeros((len(allowed), VOCAB_SIZE), np.bool_)
    for row, token_ids in zip(bools, allowed.values(), strict=True):
        row[list(token_ids)] = True
    return GrammarMask(ints(*allowed), np.packbits(bools, axis=1, bitorder="little").view(np.int32))


def run(samplings: list[Sampling], mask: GrammarMask | None = None, prompt: range = range(5)) -> ModelRunnerOutput:
    """One step that computes whole prompts, in rows from 1 on."""
    worker = NullWorker(CONFIG)
    token_ids = np.array(prompt, np.int32)
    new_rows = [NewRow(row, token_ids, len(prompt), [1], one) for row, one in enumerate(samplings, 1)]
    rows = np.arange(1, 1 + len(samplings), dtype=np.int32)
    counts = np.full(len(rows), len(prompt), np.int32)
    worker.execute(SchedulerOutput(1, rows, np.zeros_like(rows), counts, np.ones(len(rows), np.bool_), new_rows))
    return worker.sample(mask).result()


def test_draws_one_of_what_a_grammar_allows_and_others_as_without() -> None:
    samplings = [Sampling(1.0, seed=seed) for seed in range(60)]
    plain = run(samplings).token_ids.tolist()
    allowed: dict[int, Iterable[int]] = dict.fromkeys(range(1, 60, 2), (0, 31, 32, 300, 511))
    masked = run(samplings, mask_of(allowed | {0: (), 2: (400,), 4: range(VOCAB_SIZE)})).token_ids.tolist()
    assert masked[0] == -1
    assert masked[2] == 400
    assert masked[6::2] == plain[6::2]
    assert set(masked[1::2]) == {0, 31, 32, 300, 511}
    assert masked == run(samplings, mask_of(allowed | {0: (), 2: (400,), 4: range(VOCAB_SIZE)})).token_ids.tolist()


def test_reports_nothing_that_is_not_asked_for() -> None:
    output = run([Sampling()] * 3)
    assert output.logprobs is None
    assert output.prompt_logprobs == []


def test_reports_drawn_tokens_in_ragged_columns() -> None:
    samplings = [
        Sampling(logprobs=3),
        Sampling(),
        Sampling(logprobs=0),
        Sampling(logprobs=1, seed=3, temperature=1.0),
        Sampling(logprobs=2),
    ]
    output = run(samplings, mask_of({4: ()}))
    found, drawn = output.logprobs, output.token_ids.tolist()
    assert found is not None
    assert found.index.tolist() == [0, 2, 3]
    assert found.ranks.tolist() == [1, 1, 1]
    assert found.widths.tolist() == [3, 0, 1]
    assert found.top_ids.tolist() == [drawn[0], drawn[0] + 1, drawn[0] + 2, drawn[3]]
    half = np.log(np.float32(0.5))
    assert found.top_logprobs.tolist() == [half, 2 * half, 3 * half, half]
    assert found.logprobs.tolist() == [half] * 3


def test_reports_ids_that_are_asked_for() -> None:
    output = run(
        [Sampling(logprobs=2, logprob_token_ids=(7, 9)), Sampling(logprob_token_ids=(8,)), Sampling(logprobs=1)]
    )
    found, drawn = output.logprobs, output.token_ids.tolist()
    assert found is not None
    assert found.widths.tolist() == [4, 1, 1]
    assert found.top_ids.tolist() == [drawn[0], drawn[0] + 1, 7, 9, 8, drawn[2]]
    assert found.top_logprobs[[0, 5]].tolist() == found.logprobs[[0, 2]].tolist()
    for column in (found.index, found.ranks, found.widths, found.top_ids):
        assert column.dtype == np.int32
    assert found.logprobs.dtype == found.top_logprobs.dtype == np.float32


def test_reports_prompts_chunk_by_chunk() -> None:
    worker = NullWorker(CONFIG)
    prompt = np.arange(50, 60, dtype=np.int32)
    new_rows = [NewRow(3, prompt, 10, [1], Sampling(prompt_logprobs=2), prompt_logprobs_from=2)]
    told = []
    for start, count in ((0, 4), (4, 5), (9, 1), (10, 1)):
        worker.execute(
            SchedulerOutput(1, ints(3), ints(start), ints(count), np.array([start >= 9]), [] if start else new_rows)
        )
        told += worker.sample().result().prompt_logprobs
    assert [(one.row, one.start, len(one.logprobs.index)) for one in told] == [(3, 2, 3), (3, 5, 5)]
    assert told[0].logprobs.top_ids.tolist() == [52, 53, 53, 54, 54, 55]
    assert told[1].logprobs.top_ids[::2].tolist() == [55, 56, 57, 58, 59]
