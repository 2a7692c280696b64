"""Sampler: from logits to one token per row, all rows at once; what no row asks for costs nothing.

In this order:

1. edits: grammar mask, logit_bias, allowed_token_ids, min_tokens, penalties, bad_words (logits.py).
2. temperature: below TEMPERATURE_GREEDY the row is greedy, and takes the largest logit; else divide by it.
3. min_p, top_k, top_p: one threshold per row (thresholds.py); logits below it become -inf.
4. draw: add Gumbel noise of (seed, position, token id) (gumbel.py), and take the largest.

Raw log-probabilities are of the logits before 1; processed ones of what 4 adds noise to, or for a greedy
row of what 1 left. A row with no token above -inf, or whose logits are not numbers, draws -1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from model_runner.features import LOGPROBS, PROCESSED
from model_runner.gumbel import gumbel_noise, row_keys
from model_runner.logits import edit_logits
from model_runner.logprobs import chunk_scratch, join, token_logprobs
from model_runner.thresholds import Filters, thresholds
from protos.params import TEMPERATURE_GREEDY

if TYPE_CHECKING:
    from collections.abc import Iterator

    from model_runner.device import DevicePolicy
    from model_runner.draws import Draws
    from protos.step import Logprobs

Int32s = npt.NDArray[np.int32]
Places = npt.NDArray[np.intp]


class Sampler:
    def __init__(self, policy: DevicePolicy) -> None:
        self._policy = policy

    def __call__(self, logits: torch.Tensor, draws: Draws) -> tuple[Int32s, Logprobs | None]:
        """Token ids [S], and the log-probabilities of the places that ask, of logits [S, vocabulary] float32,
        contiguous, which are overwritten."""
        reports = bool(draws.used & LOGPROBS)
        if not draws.edited:
            token_ids = self._draw(logits, draws)
            return token_ids, self._logprobs(logits, draws, token_ids) if reports else None
        # Ranks need the drawn token, so the raw logits that edits change are kept until then.
        raw_places = self._policy.tensor(_raw_places(draws))
        raw = logits.index_select(0, raw_places) if reports else None
        edit_logits(logits, draws, self._policy)
        token_ids = self._draw(logits, draws)
        if raw is None:
            return token_ids, None
        logits.index_copy_(0, raw_places, raw)
        return token_ids, self._logprobs(logits, draws, token_ids)

    def _draw(self, logits: torch.Tensor, draws: Draws) -> Int32s:
        tensor = self._policy.tensor
        is_random = draws.batch.temperature[draws.rows] >= TEMPERATURE_GREEDY
        random = np.flatnonzero(is_random)
        if not len(random):
            return _drawn(*logits.max(-1))
        highest = torch.empty(len(draws), device=logits.device)
        token_ids = torch.empty(len(draws), dtype=torch.int64, device=logits.device)
        if len(random) < len(draws):
            greedy = tensor(np.flatnonzero(~is_random))
            highest[greedy], token_ids[greedy] = logits.index_select(0, greedy).max(-1)
        for places in self._chunks(random, logits):
            chosen = tensor(places)
            highest[chosen], token_ids[chosen] = self._draw_random(logits.index_select(0, chosen), draws, places)
        return _drawn(highest, token_ids)

    def _draw_random(self, logits: torch.Tensor, draws: Draws, places: Places) -> tuple[torch.Tensor, torch.Tensor]:
        scaled = self._scale_and_filter(logits, draws, places)
        seeds, positions = draws.batch.seed[draws.rows[places]], draws.positions[places]
        noise = gumbel_noise(self._policy.tensor(row_keys(seeds, positions)), scaled.shape[1])
        highest, token_ids = scaled.add_(noise).max(-1)
        return highest, token_ids

    def _scale_and_filter(self, logits: torch.Tensor, draws: Draws, places: Places) -> torch.Tensor:
        """What the random places draw from, of their logits [places, vocabulary], which are overwritten."""
        batch, rows = draws.batch, draws.rows[places]
        scaled = logits.div_(self._policy.tensor(batch.temperature[rows])[:, None])
        filters = Filters(batch.top_k[rows], batch.top_p[rows], batch.min_p[rows])
        if filters.any():
            scaled.masked_fill_(scaled < thresholds(scaled, filters)[:, None], -torch.inf)
        return scaled

    def _logprobs(self, logits: torch.Tensor, draws: Draws, token_ids: Int32s) -> Logprobs | None:
        """Of the places that ask and drew a token, by their logits: raw, or edited where processed ones are wanted."""
        batch, rows = draws.batch, draws.rows
        asking = draws.places(LOGPROBS)
        asking = asking[token_ids[asking] >= 0]
        scratch = chunk_scratch(logits, self._policy)
        parts = []
        for places in self._chunks(asking, logits):
            source = _rows_of(logits, places, self._policy)
            processed = (draws.uses[places] & PROCESSED) != 0
            processed &= batch.temperature[rows[places]] >= TEMPERATURE_GREEDY
            if processed.any():
                within = self._policy.tensor(np.flatnonzero(processed))
                source[within] = self._scale_and_filter(source[within], draws, places[processed])
            extra_ids = [batch.lists[row].logprob_ids for row in rows[places]]
            num_top = batch.num_logprobs[rows[places]]
            parts.append(token_logprobs(source, places, token_ids[places], num_top, extra_ids, self._policy, scratch))
        return join(parts) if parts else None

    def _chunks(self, places: Places, logits: torch.Tensor) -> Iterator[Places]:
        """So few places at a time that what is computed of their logits stays in the cache."""
        step = max(1, self._policy.chunk_cells // logits.shape[1])
        return (places[first : first + step] for first in range(0, len(places), step))


def _raw_places(draws: Draws) -> Places:
    """The places whose raw log-probabilities are asked for, and whose logits edits change."""
    return np.flatnonzero(draws.edited_places() & ((draws.uses & (LOGPROBS | PROCESSED)) == LOGPROBS))


def _rows_of(logits: torch.Tensor, places: Places, policy: DevicePolicy) -> torch.Tensor:
    """The logits of ascending places: where they lie side by side themselves, else a copy."""
    if places[-1] - places[0] + 1 == len(places):
        return logits[places[0] : places[-1] + 1]
    return logits.index_select(0, policy.tensor(places))


def _drawn(highest: torch.Tensor, token_ids: torch.Tensor) -> Int32s:
    """The tokens of the largest logits, but -1 where the largest is -inf or not a number."""
    highest, token_ids = highest.cpu(), token_ids.cpu()
    return np.where(highest.numpy() > -np.inf, token_ids.numpy(), -1).astype(np.int32)
