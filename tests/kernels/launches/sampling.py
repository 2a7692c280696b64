"""What lies between logits and tokens, for vocabularies of 49 to 262 thousand."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.thresholds import Filters
from tests.kernels.cross_compile import Launch, meta

if TYPE_CHECKING:
    from kernels.cuda import CudaOps


def integers(*size: int) -> torch.Tensor:
    return meta(*size, dtype=torch.int64)


def floats(*size: int) -> torch.Tensor:
    return meta(*size, dtype=torch.float64)


def logits(rows: int, vocab_size: int) -> torch.Tensor:
    return meta(rows, vocab_size, dtype=torch.float32)


def draw(ops: CudaOps, rows: int, vocab_size: int, filters: Filters | None = None) -> None:
    ops.draw(logits(rows, vocab_size), integers(rows), floats(rows), filters, integers(rows))


def penalise(ops: CudaOps) -> None:
    table = meta(256, 8193, dtype=torch.int32)
    columns = integers(8), integers(8), 5000, floats(8), floats(8), floats(8)
    ops.penalise(logits(8, 128256), integers(8), table, integers(8), *columns)


def apply_grammar(ops: CudaOps) -> None:
    ops.apply_grammar(logits(8, 128256), integers(8), meta(8, 4008, dtype=torch.int32))


LAUNCHES = {
    "argmax": Launch(lambda ops: ops.argmax(logits(256, 128256))),
    "argmax of some": Launch(lambda ops: ops.argmax(logits(8, 128256), integers(3))),
    "draw": Launch(lambda ops: draw(ops, 256, 49152)),
    "draw with filters": Launch(lambda ops: draw(ops, 1, 262145, Filters(integers(1), floats(1), floats(1)))),
    "penalties": Launch(penalise),
    "grammar": Launch(apply_grammar),
}
