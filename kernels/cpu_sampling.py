"""CpuSampling: what CPUs do in C++ between a step's logits and its tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.reference import ReferenceOps

if TYPE_CHECKING:
    from kernels.cpu_library import Calls
    from kernels.thresholds import Filters


class CpuSampling(ReferenceOps):
    """Part of CpuOps."""

    def __init__(self, calls: Calls) -> None:
        self._argmax = calls.kernel("argmax")
        self._draw = calls.kernel("draw")
        self._thresholds = calls.kernel("thresholds")

    def argmax(self, logits: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        count = len(logits if rows is None else rows)
        out = torch.empty(count, dtype=torch.int32)
        self._argmax(_logits(logits), None if rows is None else _column(rows), out.data_ptr(), count, logits.shape[1])
        return out

    def limits(
        self, logits: torch.Tensor, rows: torch.Tensor, temperature: torch.Tensor, filters: Filters
    ) -> torch.Tensor:
        columns = map(_column, (rows, temperature, filters.top_k, filters.top_p, filters.log_min_p))
        out = torch.empty(len(rows), dtype=torch.float32)
        self._thresholds(_logits(logits), *columns, out.data_ptr(), len(rows), logits.shape[1])
        return out

    def draw(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        temperature: torch.Tensor,
        filters: Filters | None,
        keys: torch.Tensor,
    ) -> torch.Tensor:
        limits = None if filters is None else self.limits(logits, rows, temperature, filters)
        at = None if limits is None else limits.data_ptr()
        columns = map(_column, (rows, temperature, keys))
        out = torch.empty(len(rows), dtype=torch.int32)
        self._draw(_logits(logits), *columns, at, out.data_ptr(), len(rows), logits.shape[1])
        return out


def _logits(logits: torch.Tensor) -> int:
    """Where they are."""
    assert logits.is_contiguous()
    assert logits.dtype == torch.float32
    return logits.data_ptr()


def _column(column: torch.Tensor) -> int:
    """Where it is."""
    assert column.is_contiguous()
    assert column.dtype in (torch.int64, torch.float64)
    return column.data_ptr()
