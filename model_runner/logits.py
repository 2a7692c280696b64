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

Penalties and bad words look at the row's tokens as they are now, and keep nothing between steps: after
a preemption or a resumed stream they are right because the tokens are. Each edit is a few operations on
flat (place, token) pairs of the rows that use it, whatever their number, and touches no other row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

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
        repetition_penalty(logits, draws, policy)
        output_penalties(logits, draws, policy)
    if used & BAD_WORDS:
        ban_words(logits, draws, policy)


def apply_grammar(logits: torch.Tensor, mask: GrammarMask, policy: DevicePolicy) -> None:
    vocab_size = logits.shape[1]
    # Eight bits at a time: of each byte, the highest that its eight tokens' logits may be. A lookup and a minimum
    # take the same time for any mask; filling by it takes ten times as long where its bits are irregular.
    bits = (torch.arange(256, device=logits.device)[:, None] >> torch.arange(8, device=logits.device)) & 1
    limit_of_byte = torch.where(bits == 1, torch.inf, -torch.inf)
    step = max(1, policy.chunk_cells // vocab_size)
    for first in range(0, len(mask.index), step):
        index = policy.tensor(mask.index[first : first + step].astype(np.int64))
        octets = policy.tensor(np.ascontiguousarray(mask.bits[first : first + step]).view(np.uint8)).int()
        limits = limit_of_byte.index_select(0, octets.view(-1)).view(len(index), -1)[:, :vocab_size]
        logits.index_copy_(0, index, torch.minimum(logits.index_select(0, index), limits))


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
    left = (logits.index_select(0, policy.tensor(masked.astype(np.int64))).amax(-1) > -torch.inf).cpu().numpy()
    restored = policy.tensor(np.isin(owners, masked[~left]))
    flat[pairs[restored]] = ends[restored]


def repetition_penalty(logits: torch.Tensor, draws: Draws, policy: DevicePolicy) -> None:
    places = draws.places(PENALTIES)
    places = places[draws.batch.repetition_penalty[draws.rows[places]] != 1]
    if not len(places):
        return
    owners, token_ids = _history(draws, places, np.zeros(len(places), np.int64))
    penalties = policy.tensor(draws.batch.repetition_penalty[draws.rows[owners]])
    pairs, flat = _pairs(logits, owners, token_ids, policy), logits.view(-1)
    before = flat[pairs]
    # A token that occurs n times writes the same number n times.
    flat[pairs] = torch.where(before > 0, before / penalties, before * penalties)


def output_penalties(logits: torch.Tensor, draws: Draws, policy: DevicePolicy) -> None:
    batch, rows = draws.batch, draws.rows
    places = draws.places(PENALTIES)
    places = places[(batch.frequency_penalty[rows[places]] != 0) | (batch.presence_penalty[rows[places]] != 0)]
    owners, token_ids = _history(draws, places, batch.num_prompt_tokens[rows[places]])
    if not len(owners):
        return
    frequency = policy.tensor(batch.frequency_penalty[rows[owners]])
    presence = policy.tensor(batch.presence_penalty[rows[owners]])
    pairs, flat = _pairs(logits, owners, token_ids, policy), logits.view(-1)
    # The logits themselves are where occurrences are counted, so nothing of the vocabulary's size is allocated.
    # Measured, for 1 to 256 rows of 100 to 4,000 tokens: torch.unique takes 0.8 to 1.3 times as long, and dense
    # counts 3 to 65 times.
    before = flat[pairs]
    flat[pairs] = 0.0
    flat.index_add_(0, pairs, torch.ones((), device=logits.device).expand(len(pairs)))
    flat[pairs] = before - frequency * flat[pairs] - presence


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
    found = draws.batch.token_ids[draws.rows[place], np.maximum(position, 0)]
    differs = (position < 0) | (found != expected)
    banned = np.bincount(word[differs], minlength=len(last_ids)) == 0
    logits.view(-1)[_pairs(logits, owners[banned], last_ids[banned], policy)] = -torch.inf


def _history(draws: Draws, places: npt.NDArray[np.intp], starts: npt.NDArray[np.integer]) -> tuple[Int64s, Int64s]:
    """(place, token) of every token from `starts` on, of the rows at the places."""
    if not len(places):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    known = zip(draws.rows[places].tolist(), starts.tolist(), draws.positions[places].tolist(), strict=True)
    tokens = [draws.batch.token_ids[row, start:end] for row, start, end in known]
    return spread(places, tokens), np.concatenate(tokens).astype(np.int64)


def _pairs(logits: torch.Tensor, places: Int64s, token_ids: Int64s, policy: DevicePolicy) -> torch.Tensor:
    """[n] int64: where (place, token) lies in the flat logits."""
    return policy.tensor(places * logits.shape[1] + token_ids)
