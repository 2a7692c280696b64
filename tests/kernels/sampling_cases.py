"""Filters and logits that draws and thresholds of every kind are tested with."""

from __future__ import annotations

import torch

from kernels.thresholds import Filters


def floats(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def random_keys(rows: int) -> torch.Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (rows,))


def filters_of(columns: list[tuple[int, float, float]]) -> Filters:
    top_k, top_p, min_p = zip(*columns, strict=True)
    return Filters(torch.tensor(top_k), floats(*top_p), floats(*min_p).log())


FILTERS = [
    *((top_k, 1.0, 0.0) for top_k in (1, 40, 1536, 1537, 9999)),
    *((0, top_p, 0.0) for top_p in (1e-6, 0.3, 0.999)),
    *((0, 1.0, min_p) for min_p in (0.0, 0.02, 1.0)),
    *((top_k, top_p, min_p) for top_k in (3, 700) for top_p in (0.5, 0.95) for min_p in (1e-4, 0.2)),
    (700, 0.999, 0.0),
]


def with_minus_infinity(logits: torch.Tensor) -> torch.Tensor:
    logits[:, ::3] = -torch.inf
    return logits


def with_one_far_above(logits: torch.Tensor) -> torch.Tensor:
    """So far that of what top-p keeps some lies out of its reach."""
    logits[:, 700] = 13.0
    return logits


LOGITS = {
    "random": lambda size: torch.randn(size) * 3,
    "flat": lambda size: torch.randn(size) * 0.01,
    "huge": lambda size: torch.randn(size) * 1e30,
    "ties around zero": lambda size: (
        (torch.randn(size) * 2).round() / 2 * torch.tensor([1.0, -1.0]).repeat(size[1])[: size[1]]
    ),
    "equal": torch.zeros,
    "one far above": lambda size: with_one_far_above(torch.randn(size) * 0.1),
    "ruled out": lambda size: with_minus_infinity(torch.randn(size) * 3),
}
