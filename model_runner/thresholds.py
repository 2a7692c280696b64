"""Thresholds: min-p, top-k and top-p, each reduced to the smallest logit that is kept.

Their order is min-p, top-k, top-p, each over what those before it left. Logits equal to a threshold
stay, so that which of two equal tokens is kept never depends on their place in the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

NUM_CANDIDATES = 1024
"""Largest logits looked at before a full sort; nearly always they settle all three filters."""


@dataclass(frozen=True, slots=True)
class Filters:
    """Parameters of each row, as numpy columns. top_k 0, top_p 1 and min_p 0 keep everything."""

    top_k: npt.NDArray[np.int32]
    top_p: npt.NDArray[np.float64]
    min_p: npt.NDArray[np.float64]

    def __getitem__(self, rows: slice | npt.NDArray[np.integer]) -> Filters:
        return Filters(self.top_k[rows], self.top_p[rows], self.min_p[rows])

    def any(self) -> bool:
        return bool((self.top_k > 0).any() or (self.top_p < 1).any() or (self.min_p > 0).any())


def thresholds(logits: torch.Tensor, filters: Filters, num_candidates: int = NUM_CANDIDATES) -> torch.Tensor:
    """[rows] float32: of each row of logits [rows, vocabulary], already divided by the temperature, what is kept is
    logit >= threshold."""
    vocab_size = logits.shape[1]
    limit = torch.full((len(logits),), -torch.inf, device=logits.device)
    if (filters.min_p > 0).any():
        with np.errstate(divide="ignore"):
            distance = torch.from_numpy(np.log(filters.min_p)).to(logits.device)
        limit = _round_up(logits.amax(-1).double() + distance)
    top_k = np.where(filters.top_k > 0, filters.top_k, vocab_size)
    has_top_k, has_top_p = (top_k < vocab_size).any(), (filters.top_p < 1).any()
    if not has_top_k and not has_top_p:
        return limit
    largest_k = int(top_k[top_k < vocab_size].max()) if has_top_k else 0
    if largest_k > num_candidates or num_candidates >= vocab_size:
        candidates = logits.sort(-1, descending=True).values
    else:
        candidates = logits.topk(num_candidates, -1).values
    if has_top_k:
        counts = torch.from_numpy(top_k).to(logits.device)
        last = candidates.gather(1, (counts - 1).clamp(max=candidates.shape[1] - 1)[:, None])[:, 0]
        limit = torch.where(counts < vocab_size, torch.maximum(limit, last), limit)
    if has_top_p:
        limit, settled = _top_p(logits, candidates, limit, torch.from_numpy(filters.top_p).to(logits.device))
        if candidates.shape[1] < vocab_size and not settled.all():
            open_rows = (~settled).nonzero()[:, 0]
            limit[open_rows] = thresholds(logits[open_rows], filters[open_rows.cpu().numpy()], vocab_size)
    return limit


def _top_p(
    logits: torch.Tensor, candidates: torch.Tensor, limit: torch.Tensor, top_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The limits raised to where the probability of everything larger is still below top_p, and whether the
    candidates [rows, n], the largest logits in descending order, were enough to tell."""
    highest = candidates[:, :1]
    weights = (candidates - highest).double().exp().masked_fill_(candidates < limit[:, None], 0.0)
    larger = torch.zeros_like(weights)
    larger[:, 1:] = weights[:, :-1].cumsum(-1)
    within = larger[:, -1] + weights[:, -1]
    total = within
    if candidates.shape[1] < logits.shape[1] and (candidates[:, -1] >= limit).any():
        # What the other filters left reaches beyond the candidates, so its whole weight is not theirs.
        kept = (logits - highest).exp_().masked_fill_(logits < limit[:, None], 0.0)
        total = torch.where(candidates[:, -1] >= limit, kept.sum(-1, dtype=torch.float64), within)
    goal = top_p * total
    num_kept = (larger < goal[:, None]).sum(-1).clamp_(min=1)
    border = candidates.gather(1, (num_kept - 1)[:, None])[:, 0]
    filtered = top_p < 1
    return torch.where(filtered, torch.maximum(limit, border), limit), ~filtered | (within >= goal)


def _round_up(numbers: torch.Tensor) -> torch.Tensor:
    """The smallest float32 not below each float64: a float32 is at least the one just when it is at least the other."""
    rounded = numbers.float()
    return torch.where(rounded.double() < numbers, rounded.nextafter(torch.tensor(torch.inf)), rounded)
