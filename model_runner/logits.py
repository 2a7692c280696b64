"""Edits of logits: masks, biases and penalties, in place, before the temperature.

In this order; a token at -inf stays there, so what comes first wins:

1. grammar mask: what the grammar does not allow becomes -inf.
2. logit_bias is added.
3. allowed_token_ids: all others become -inf, tokens that end a row among them.
4. min_tokens: while the output is shorter, tokens that would end it become -inf. Not where that would
   leave a grammar nothing: its text is complete, and only an end can follow.
5. repetition_penalty, over prompt and output: logits above 0 are divided by it, the others multiplied.
   Then frequency_penalty times the token's count in the output, and presence_penalty if it is there at
   all, are subtracted.
6. bad_words: the last token of a sequence becomes -inf where the row ends with the tokens before it.

Penalties and bad words look at the row's tokens as they are now, in the device's table, and keep nothing
between steps: after a preemption or a resumed stream they are right because the tokens are. Each edit is a
few operations on flat (place, token) pairs of the rows that use it, whatever their number, and touches no
other row. None waits for the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from model_runner.columns import to_columns
from model_runner.features import ALLOWED, BAD_WORDS, BIAS, MIN_TOKENS, PENALTIES, spread

if TYPE_CHECKING:
    from model_runner.device import DevicePolicy
    from model_runner.draws import Draws
    from protos.step import GrammarMask

Int64s = npt.NDArray[np.int64]


def edit_logits(logits: torch.Tensor, draws: Draws, policy: DevicePolicy) -> None:
    """All edits of logits [S, vocabulary] float32, contiguous."""
    used = draws.used
    if draws.mask is not None:
        apply_grammar(logits, draws.mask, policy)
    if used & BIAS:
        add_biases(logits, draws, policy)
    if used & ALLOWED:
        keep_allowed(logits, draws, policy)
    if used & MIN_TOKENS:
        mask_early_ends(logits, draws, policy)
    if used & PENALTIES:
        penalise(logits, draws, policy)
    if used & BAD_WORDS:
        ban_words(logits, draws, policy)


def apply_grammar(logits: torch.Tensor, mask: GrammarMask, policy: DevicePolicy) -> None:
    step = max(1, policy.chunk_cells // logits.shape[1])
    for first in range(0, len(mask.index), step):
        places = policy.tensor(mask.index[first : first + step].astype(np.int64))
        policy.ops.apply_grammar(logits, places, policy.tensor(mask.bits[first : first + step]))


def add_biases(logits: torch.Tensor, draws: Draws, policy: DevicePolicy) -> None:
    places = draws.places(BIAS)
    lists = [draws.batch.lists[row] for row in draws.rows[places]]
    ids = [one.bias_ids for one in lists]
    pairs = _pairs(logits, spread(places, ids), np.concatenate(ids), policy)
    # A dict has each id once, so no pair occurs twice.
    logits.view(-1)[pairs] += policy.tensor(np.concatenate([one.biases for one in lists]))


def keep_allowed(logits: torch.Tensor, draws: Draws, policy: DevicePolicy) -> None:
    places = draws.places(ALLOWED)
    ids = [draws.batch.lists[row].allowed_ids for row in draws.rows[places]]
    flat = logits.view(-1)
    pairs = _pairs(logits, spread(places, ids), np.concatenate(ids), policy)
    kept = flat[pairs]
    logits.index_fill_(0, policy.tensor(places), -torch.inf)
    flat[pairs] = kept


def mask_early_ends(logits: torch.Tensor, draws: Draws, policy: DevicePolicy) -> None:
    batch, rows, positions = draws.batch, draws.rows, draws.positions
    short = np.flatnonzero(positions - batch.num_prompt_tokens[rows] < batch.min_tokens[rows])
    ids = [np.array(batch.end_token_ids[row], np.int64) for row in rows[short]]
    if not len(short):
        return
    owners, ids_flat = spread(short, ids), np.concatenate(ids)
    flat = logits.view(-1)
    pairs = _pairs(logits, owners, ids_flat, policy)
    ends = flat[pairs]
    flat[pairs] = -torch.inf
    if draws.mask is None:
        return
    masked = np.intersect1d(draws.mask.index, short)
    left = torch.ones(len(draws), dtype=torch.bool, device=logits.device)
    constrained = policy.tensor(masked.astype(np.int64))
    left[constrained] = logits.index_select(0, constrained).amax(-1) > -torch.inf
    flat[pairs] = torch.where(left[policy.tensor(owners)], -torch.inf, ends)


def penalise(logits: torch.Tensor, draws: Draws, policy: DevicePolicy) -> None:
    places, batch = draws.places(PENALTIES), draws.batch
    rows, positions = draws.rows[places], draws.positions[places]
    chosen, table_rows, num_prompt_tokens, num_tokens, repetition, frequency, presence = to_columns(
        policy,
        places,
        rows,
        batch.num_prompt_tokens[rows],
        positions,
        batch.repetition_penalty[rows],
        batch.frequency_penalty[rows],
        batch.presence_penalty[rows],
    )
    policy.ops.penalise(
        logits,
        chosen,
        batch.token_table,
        table_rows,
        num_prompt_tokens,
        num_tokens,
        int(positions.max()),
        repetition,
        frequency,
        presence,
    )


def ban_words(logits: torch.Tensor, draws: Draws, policy: DevicePolicy) -> None:
    places = draws.places(BAD_WORDS)
    lists = [draws.batch.lists[row] for row in draws.rows[places]]
    words = [one.bad_ids for one in lists]
    owners, last_ids = spread(places, words), np.concatenate(words)
    first_words = np.cumsum([0, *map(len, words)])[:-1]
    word = np.concatenate([one.before_word for one in lists]) + spread(first_words, [one.before_word for one in lists])
    expected = np.concatenate([one.before_ids for one in lists])
    place = owners[word]
    position = draws.positions[place] - np.concatenate([one.before_distance for one in lists])
    # What a row is too short for is looked up where no token is equal.
    expected = np.where(position < 0, -1, expected)
    at_row, at_position, expected_ids, of_word = to_columns(
        policy, draws.rows[place], np.maximum(position, 0), expected, word
    )
    differs = draws.batch.token_table[at_row, at_position] != expected_ids
    num_different = torch.zeros(len(last_ids), device=logits.device).index_add_(0, of_word, differs.float())
    # Two words may have the same last token. (Only an infinite logit less infinity is no number.)
    logits.view(-1).index_add_(
        0, _pairs(logits, owners, last_ids, policy), torch.where(num_different == 0, -torch.inf, 0.0)
    )


def _pairs(logits: torch.Tensor, places: Int64s, token_ids: Int64s, policy: DevicePolicy) -> torch.Tensor:
    """[n] int64: where (place, token) lies in the flat logits."""
    return policy.tensor(places * logits.shape[1] + token_ids)
