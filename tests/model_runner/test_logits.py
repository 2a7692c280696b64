"""Edits of logits against a twin that does them row by row in float64; and which of two edits wins."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from model_runner.features import EDITS, features
from model_runner.logits import edit_logits
from protos.messages import Sampling
from protos.step import GrammarMask
from tests.model_runner.rows import EOS, PROMPT, VOCAB, History, Rows, edited_twin, logits_of, mask_of

RANDOM = np.random.default_rng(2)
END = EOS[0]


def random_history() -> History:
    """Tokens that often repeat, of which the first are a prompt."""
    length = int(RANDOM.integers(1, 80))
    return (RANDOM.zipf(1.5, length) % 40).tolist(), int(RANDOM.integers(1, length + 1))


def random_words(token_ids: list[int]) -> tuple[tuple[int, ...], ...]:
    """Bad words of one token, some that the row is just about to say, some that only nearly so or are too long."""
    words = [(int(RANDOM.integers(VOCAB)),), (*token_ids, 3, 4), (1, *token_ids[-1:], 5)]
    for length in (1, 2, 3):
        words += [(*token_ids[-length:], int(token)) for token in RANDOM.integers(VOCAB, size=2)]
    return tuple(words)


def ids(count: int) -> tuple[int, ...]:
    return tuple(RANDOM.choice(VOCAB, count, replace=False).tolist())


ONE_BY_ONE: dict[str, Any] = {
    "plain": lambda token_ids: {},
    "bias": lambda token_ids: {"logit_bias": dict(zip(ids(50), RANDOM.normal(0, 30, 50).tolist(), strict=True))},
    "allowed": lambda token_ids: {"allowed_token_ids": ids(int(RANDOM.integers(1, 300)))},
    "min_tokens": lambda token_ids: {"min_tokens": int(RANDOM.integers(80)), "stop_token_ids": (*ids(3), END)},
    "min_tokens, no EOS": lambda token_ids: {"min_tokens": 80, "ignore_eos": True},
    "repetition": lambda token_ids: {"repetition_penalty": float(RANDOM.choice([0.3, 1.2, 5.0]))},
    "frequency": lambda token_ids: {"frequency_penalty": float(RANDOM.uniform(-2, 2))},
    "presence": lambda token_ids: {"presence_penalty": float(RANDOM.uniform(-2, 2))},
    "bad words": lambda token_ids: {"bad_words": random_words(token_ids)},
}


def everything(token_ids: list[int]) -> dict[str, Any]:
    """Every edit by chance."""
    return {
        name: value for make in ONE_BY_ONE.values() if RANDOM.random() < 0.6 for name, value in make(token_ids).items()
    }


def check(rows: Rows, samplings: list[Sampling], histories: list[History], mask: dict[int, np.ndarray]) -> None:
    """On random logits with many ties, beside rows that use other edits, and each row alone."""
    logits = (logits_of(len(samplings)) * 4).round() / 4
    edited = logits.clone()
    edit_logits(edited, rows.draws(mask=mask_of(mask) if mask else None), rows.policy)
    for place, (sampling, history) in enumerate(zip(samplings, histories, strict=True)):
        expected = edited_twin(logits[place].numpy(), sampling, history, mask.get(place))
        np.testing.assert_allclose(edited[place].numpy(), expected, rtol=3e-6, atol=3e-6, err_msg=repr(sampling))
        if not features(sampling) & EDITS and place not in mask:
            assert torch.equal(edited[place], logits[place])
        alone = Rows([sampling], histories=[history])
        one = logits[place : place + 1].clone()
        edit_logits(one, alone.draws(mask=mask_of({0: mask[place]}) if place in mask else None), alone.policy)
        assert torch.equal(one[0], edited[place])


@pytest.mark.parametrize("edit", ONE_BY_ONE)
def test_each_edit_equals_its_twin(edit: str):
    histories = [random_history() for _ in range(24)]
    samplings = [Sampling(**ONE_BY_ONE[edit](token_ids)) for token_ids, _ in histories]
    samplings[::4] = [Sampling()] * 6
    check(Rows(samplings, histories=histories), samplings, histories, {})


def test_all_edits_together_equal_the_twin_in_order():
    histories = [random_history() for _ in range(64)]
    samplings = [Sampling(**everything(token_ids)) for token_ids, _ in histories]
    mask = {place: RANDOM.random(VOCAB) < 0.3 for place in RANDOM.permutation(64)[:40].tolist()}
    check(Rows(samplings, histories=histories), samplings, histories, mask)


def test_a_step_without_edits_looks_at_nothing(monkeypatch: pytest.MonkeyPatch):
    def fail(*arguments: object) -> None:
        raise AssertionError("edited")

    monkeypatch.setattr("model_runner.sampler.edit_logits", fail)
    Rows([Sampling(), Sampling(temperature=1.0, logprobs=2)]).draw(logits_of(2))
    with pytest.raises(AssertionError, match="edited"):
        Rows([Sampling(), Sampling(presence_penalty=0.1)]).draw(logits_of(2))


# 55 -------------------------------------------------------------------------------------------


def test_55_repetition_counts_prompt_and_output_the_others_output_only():
    history = [1, 1, 2, 3, 3, 3], 3  # prompt 1 1 2, output 3 3 3
    logits = torch.zeros(3, VOCAB)
    logits[:, :5] = 4.0
    logits[:, 2] = -4.0
    samplings = [Sampling(repetition_penalty=2.0), Sampling(frequency_penalty=0.5), Sampling(presence_penalty=0.5)]
    rows = Rows(samplings, histories=[history] * 3)
    edit_logits(logits, rows.draws(), rows.policy)
    assert logits[:, :5].tolist() == [[4, 2, -8, 2, 4], [4, 4, -4, 2.5, 4], [4, 4, -4, 3.5, 4]]


def test_55_counts_are_right_while_tokens_are_drawn_and_after_a_resume():
    """The tokens drawn step by step are those of a row that enters with all before them."""
    sampling = Sampling(1.0, seed=4, repetition_penalty=1.5, frequency_penalty=1.0, presence_penalty=0.5)
    logits = logits_of(1, vocab=20, scale=1.0)
    rows = Rows([sampling], histories=[([3, 5, 5], 3)])
    known = [3, 5, 5]
    for _ in range(40):
        drawn = rows.draw(logits, len(known))
        assert Rows([sampling], histories=[(known, 3)]).draw(logits) == drawn
        rows.batch.record(rows.rows, np.array([len(known)]), torch.tensor(drawn, dtype=torch.int32))
        known += drawn
    assert len(set(known)) > 10


def test_many_occurrences_are_counted_exactly():
    sampling, history = Sampling(frequency_penalty=0.1), ([9] * 3000, 5)
    rows, logits = Rows([sampling], histories=[history]), logits_of(1)
    expected = edited_twin(logits[0].numpy(), sampling, history)
    edit_logits(logits, rows.draws(), rows.policy)
    np.testing.assert_allclose(logits[0].numpy(), expected, rtol=1e-6)


# 56 -------------------------------------------------------------------------------------------


def only(*token_ids: int) -> np.ndarray:
    allowed = np.zeros(VOCAB, np.bool_)
    allowed[list(token_ids)] = True
    return allowed


def test_56_the_grammar_wins_over_bias_allowed_ids_and_penalties():
    logits = torch.zeros(4, VOCAB)
    logits[:, 20] = 10.0
    samplings = [
        Sampling(logit_bias={20: 100.0}),
        Sampling(logit_bias={20: 100.0}, temperature=1.0),
        Sampling(allowed_token_ids=(20, 31)),
        Sampling(frequency_penalty=-2.0, presence_penalty=-2.0, repetition_penalty=0.01),
    ]
    histories = [([20] * 9, 2)] * 4
    drawn = Rows(samplings, histories=histories).draw(logits, mask=mask_of({row: only(30, 31) for row in range(4)}))
    assert drawn[2] == 31
    assert set(drawn) <= {30, 31}
    assert Rows(samplings, histories=histories).draw(logits) == [20] * 4


def test_56_min_tokens_gives_way_where_the_grammar_allows_only_ends():
    logits = torch.zeros(6, VOCAB)
    logits[:, END] = 10.0
    short = Sampling(min_tokens=9)
    samplings = [short, short, short, replace(short, stop_token_ids=(40,)), replace(short, temperature=1.0), short]
    mask = {0: only(*EOS), 1: only(END, 50), 3: only(END, 40), 4: only(EOS[1]), 5: only(*range(VOCAB))}
    drawn = Rows(samplings).draw(logits, mask=mask_of(mask))
    assert drawn == [END, 50, 0, END, EOS[1], 0]


def test_56_an_empty_mask_ends_its_row_only():
    kinds = Sampling(), Sampling(temperature=1.0, seed=1), Sampling(0.5, top_p=0.5, min_p=0.1, top_k=5)
    samplings = [sampling for sampling in kinds for _ in range(2)]
    logits = logits_of(6)
    plain = Rows(samplings).draw(logits)
    masked = Rows(samplings).draw(logits, mask=mask_of({row: only() for row in (4, 0, 2)}))
    assert masked == [-1, plain[1], -1, plain[3], -1, plain[5]]


def test_56_masks_that_contradict_one_another_leave_nothing():
    samplings = [
        Sampling(allowed_token_ids=(1, 2), bad_words=((1,), (2,))),
        Sampling(allowed_token_ids=EOS, min_tokens=1),
        Sampling(allowed_token_ids=(1,)),
        Sampling(),
    ]
    assert Rows(samplings).draw(torch.zeros(4, VOCAB), mask=mask_of({2: only(2)})) == [-1, -1, -1, 0]


def test_57_logits_that_are_no_numbers_end_their_row_only():
    samplings = [Sampling(), Sampling(temperature=1.0, top_p=0.9)] * 4
    logits = logits_of(8)
    plain = Rows(samplings).draw(logits)
    logits[0] = torch.nan
    logits[3, 5] = torch.nan
    drawn = Rows(samplings).draw(logits)
    assert drawn == [-1, *plain[1:3], -1, *plain[4:]]
    assert Rows([replace(one, repetition_penalty=1.1) for one in samplings]).draw(logits)[::3] == [-1, -1, drawn[6]]


def test_a_row_that_drew_nothing_still_has_a_token_for_the_step_in_flight():
    rows = Rows([Sampling()])
    rows.batch.record(rows.rows, np.array([5]), torch.tensor([-1], dtype=torch.int32))
    assert rows.batch.token_ids[0, 5] == 0


@pytest.mark.parametrize("vocab", [31, 32, 33, 257, 3000])
def test_masks_of_any_vocabulary(vocab: int):
    allowed = {place: RANDOM.random(vocab) < 0.5 for place in (2, 0)}
    logits = logits_of(4, vocab=vocab)
    edited, rows = logits.clone(), Rows([Sampling()] * 4)
    edit_logits(edited, rows.draws(mask=mask_of(allowed)), rows.policy)
    for place in range(4):
        expected = np.where(allowed.get(place, np.True_), logits[place].numpy(), -np.inf)
        assert np.array_equal(edited[place].numpy(), expected)


def test_a_mask_of_no_rows_is_no_mask():
    mask = GrammarMask(np.zeros(0, np.int32), np.zeros((0, 94), np.int32))
    assert not Rows([Sampling()]).draws(mask=mask).edited


# one by one -----------------------------------------------------------------------------------


def test_bad_words_look_across_the_border_of_prompt_and_output():
    words = ((1, 2, 3), (9, 2, 4), (2, 5), (0, 0, 0, 0, 0, 0, 6), (7,))
    rows = Rows([Sampling(bad_words=words)] * 2, histories=[([0, 1, 2], 2), PROMPT])
    logits = torch.zeros(2, VOCAB)
    edit_logits(logits, rows.draws(), rows.policy)
    assert (logits[0] == -torch.inf).nonzero()[:, 0].tolist() == [3, 5, 7]
    assert (logits[1] == -torch.inf).nonzero()[:, 0].tolist() == [7]


def test_allowed_ids_allow_an_end_only_where_it_is_listed():
    logits = torch.zeros(2, VOCAB)
    logits[:, END] = 5.0
    samplings = [Sampling(allowed_token_ids=(11, 12)), Sampling(allowed_token_ids=(11, END))]
    assert Rows(samplings).draw(logits) == [11, END]


def test_another_request_in_the_row_inherits_nothing():
    first = Sampling(logit_bias={1: 9.0}, bad_words=((2,),), repetition_penalty=2.0, logprobs=3, prompt_logprobs=1)
    rows = Rows([first])
    assert rows.draws().edited
    again = Rows([Sampling()])
    rows.batch._enter(_new_row(Sampling()))
    for name, column in vars(again.batch).items():
        if isinstance(column, np.ndarray) and name not in ("token_ids", "block_tables"):
            assert np.array_equal(getattr(rows.batch, name), column), name
    assert rows.batch.lists == again.batch.lists


def _new_row(sampling: Sampling) -> Any:
    from protos.step import NewRow

    return NewRow(0, np.zeros(5, np.int32), 5, [1], sampling)
