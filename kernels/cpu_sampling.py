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
        _check(logits, *(() if rows is None else (rows,)))
        count, size = logits.shape
        if rows is not None:
            count = len(rows)
        out = torch.empty(count, dtype=torch.int32)
        self._argmax(logits.data_ptr(), None if rows is None else rows.data_ptr(), out.data_ptr(), count, size)
        return out

    def draw(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        temperature: torch.Tensor,
        filters: Filters | None,
        keys: torch.Tensor,
    ) -> torch.Tensor:
        _check(logits, rows, keys)
        limits = None if filters is None else self._limits(logits, rows, temperature, filters)
        temperature = temperature.double()
        out = torch.empty(len(rows), dtype=torch.int32)
        self._draw(
            logits.data_ptr(),
            rows.data_ptr(),
            temperature.data_ptr(),
            None if limits is None else limits.data_ptr(),
            keys.data_ptr(),
            out.data_ptr(),
            len(rows),
            logits.shape[1],
        )
        return out

    def scale_and_filter(
        self, logits: torch.Tensor, rows: torch.Tensor, temperature: torch.Tensor, filters: Filters | None
    ) -> torch.Tensor:
        scaled = super().scale_and_filter(logits, rows, temperature, None)
        if filters is not None:
            limits = self._limits(logits, rows, temperature, filters)
            scaled.masked_fill_(scaled < limits[:, None], -torch.inf)
        return scaled

    def _limits(
        self, logits: torch.Tensor, rows: torch.Tensor, temperature: torch.Tensor, filters: Filters
    ) -> torch.Tensor:
        """[n] float32: of the rows' logits over the temperature, those are kept that are at least the limit."""
        _check(logits, rows, filters.top_k)
        temperature = temperature.double()
        out = torch.empty(len(rows), dtype=torch.float32)
        self._thresholds(
            logits.data_ptr(),
            rows.data_ptr(),
            temperature.data_ptr(),
            filters.top_k.data_ptr(),
            filters.top_p.data_ptr(),
            filters.log_min_p.data_ptr(),
            out.data_ptr(),
            len(rows),
            logits.shape[1],
        )
        return out


def _check(logits: torch.Tensor, *columns: torch.Tensor) -> None:
    assert logits.is_contiguous()
    assert logits.dtype == torch.float32
    for column in columns:
        assert column.is_contiguous()
        assert column.dtype == torch.int64
