"""Sampler: from logits to one token per row, all rows at once; what no row asks for costs nothing.

In this order:

1. edits: grammar mask, logit_bias, allowed_token_ids, min_tokens, penalties, bad_words (logits.py).
2. temperature: below TEMPERATURE_GREEDY the row is greedy, and takes the largest logit; else divide by it.
3. min_p, top_k, top_p: one threshold per row (kernels/thresholds.py); logits below it become -inf.
4. draw: add Gumbel noise of (seed, position, token id) (kernels/gumbel.py), and take the largest.

Raw log-probabilities are of the logits before 1; processed ones of what 4 adds noise to, or for a greedy
row of what 1 left. A row with no token above -inf, or whose logits are not numbers, draws -1.

Nothing here waits for the device. What the rows use is known on the host, and so are their positions; the
tokens before them are read from the device's own table, where a step still in flight may be writing them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from kernels.thresholds import Filters
from model_runner.columns import to_columns
from model_runner.features import LOGPROBS, PROCESSED, RANDOM
from model_runner.logits import edit_logits
from model_runner.logprobs import PendingLogprobs, chunk_scratch, token_logprobs
from model_runner.row_keys import row_keys

if TYPE_CHECKING:
    from collections.abc import Iterator

    from model_runner.device import DevicePolicy
    from model_runner.draws import Draws
    from model_runner.host_copy import HostCopy
    from protos.step import Logprobs

Int32s = npt.NDArray[np.int32]
Places = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Drawn:
    """The tokens of a step, on the device and on their way to the host."""

    token_ids: torch.Tensor
    """[S] int32; -1 where there was nothing to draw from."""
    _copy: HostCopy
    _logprobs: PendingLogprobs | None

    def result(self) -> tuple[Int32s, Logprobs | None]:
        """Waits for the token ids, and the log-probabilities of the places that ask and drew one."""
        (token_ids,) = self._copy.wait()
        if self._logprobs is None:
            return token_ids, None
        logprobs = self._logprobs.result(token_ids >= 0)
        return token_ids, logprobs if len(logprobs.index) else None


class Sampler:
    def __init__(self, policy: DevicePolicy) -> None:
        self._policy, self._ops = policy, policy.ops

    def __call__(self, logits: torch.Tensor, draws: Draws) -> Drawn:
        """Of logits [S, vocabulary] float32, contiguous, which are overwritten."""
        reports = bool(draws.used & LOGPROBS)
        if not draws.edited:
            token_ids = self._draw(logits, draws)
            return self.drawn(token_ids, self._logprobs(logits, draws, token_ids) if reports else None)
        # Ranks need the drawn token, so the raw logits that edits change are kept until then.
        raw_places = self._policy.tensor(_raw_places(draws)) if reports else None
        raw = None if raw_places is None else logits.index_select(0, raw_places)
        edit_logits(logits, draws, self._policy)
        token_ids = self._draw(logits, draws)
        if raw is None:
            return self.drawn(token_ids)
        logits.index_copy_(0, raw_places, raw)
        return self.drawn(token_ids, self._logprobs(logits, draws, token_ids))

    def drawn(self, token_ids: torch.Tensor, logprobs: PendingLogprobs | None = None) -> Drawn:
        """Tokens that are drawn already, on their way to the host."""
        return Drawn(token_ids, self._policy.to_host(token_ids), logprobs)

    def _draw(self, logits: torch.Tensor, draws: Draws) -> torch.Tensor:
        random = draws.places(RANDOM)
        if not len(random):
            return self._ops.argmax(logits)
        token_ids = torch.empty(len(draws), dtype=torch.int32, device=logits.device)
        if len(random) < len(draws):
            greedy = self._policy.tensor(np.flatnonzero((draws.uses & RANDOM) == 0))
            token_ids[greedy] = self._ops.argmax(logits, greedy)
        for places in self._chunks(random, logits):
            keys = row_keys(draws.batch.seed[draws.rows[places]], draws.positions[places])
            chosen, temperature, filters, noise_keys = self._columns(draws, places, keys)
            token_ids[chosen] = self._ops.draw(logits, chosen, temperature, filters, noise_keys)
        return token_ids

    def _columns(
        self, draws: Draws, places: Places, *further: npt.NDArray[np.int64]
    ) -> tuple[torch.Tensor, torch.Tensor, Filters | None, *tuple[torch.Tensor, ...]]:
        """On the device: the places, their temperatures, their filters where any uses one, and further columns."""
        batch, rows = draws.batch, draws.rows[places]
        top_k, top_p, min_p = batch.top_k[rows], batch.top_p[rows], batch.min_p[rows]
        columns = places, batch.temperature[rows], *further
        if not ((top_k > 0).any() or (top_p < 1).any() or (min_p > 0).any()):
            chosen, temperature, *others = to_columns(self._policy, *columns)
            return chosen, temperature, None, *others
        with np.errstate(divide="ignore"):
            log_min_p = np.log(min_p)
        chosen, temperature, *others = to_columns(self._policy, *columns, top_k, top_p, log_min_p)
        return chosen, temperature, Filters(*others[-3:]), *others[:-3]

    def _logprobs(self, logits: torch.Tensor, draws: Draws, token_ids: torch.Tensor) -> PendingLogprobs:
        """Of the places that ask, by their logits: raw, or edited where processed ones are wanted."""
        batch, rows = draws.batch, draws.rows
        scratch = chunk_scratch(logits, self._policy)
        parts = []
        for places in self._chunks(draws.places(LOGPROBS), logits):
            index = self._policy.tensor(places)
            source = _rows_of(logits, places, index)
            processed = (draws.uses[places] & (PROCESSED | RANDOM)) == PROCESSED | RANDOM
            if processed.any():
                within = self._policy.tensor(np.flatnonzero(processed))
                source[within] = self._ops.scale_and_filter(logits, *self._columns(draws, places[processed]))
            extra_ids = [batch.lists[row].logprob_ids for row in rows[places]]
            num_top = batch.num_logprobs[rows[places]]
            parts.append(token_logprobs(source, places, token_ids[index], num_top, extra_ids, self._policy, scratch))
        return PendingLogprobs(parts, self._policy)

    def _chunks(self, places: Places, logits: torch.Tensor) -> Iterator[Places]:
        """So few places at a time that what is computed of their logits stays in the cache."""
        step = max(1, self._policy.chunk_cells // logits.shape[1])
        return (places[first : first + step] for first in range(0, len(places), step))


def _raw_places(draws: Draws) -> Places:
    """The places whose raw log-probabilities are asked for, and whose logits edits change."""
    return np.flatnonzero(draws.edited_places() & ((draws.uses & (LOGPROBS | PROCESSED)) == LOGPROBS))


def _rows_of(logits: torch.Tensor, places: Places, index: torch.Tensor) -> torch.Tensor:
    """The logits of ascending places: where they lie side by side themselves, else a copy."""
    if places[-1] - places[0] + 1 == len(places):
        return logits[places[0] : places[-1] + 1]
    return logits.index_select(0, index)
