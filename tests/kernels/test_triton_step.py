"""Triton's step tensors and stored tokens against their twins, which test_step_tensors.py holds against loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels import triton_step
from kernels.reference import ReferenceOps
from kernels.reference_step import StepTensors
from tests.kernels.interpreted import cuda_ops

OPS, TWIN = cuda_ops(), ReferenceOps()
TABLE_ROWS, NUM_BLOCKS, POISON = 9, 14, -77


def poisoned(num_tokens: int, num_rows: int, width: int) -> StepTensors:
    """Views into memory that is wider than they are, and longer."""
    tokens = [torch.full((num_tokens + 5,), POISON)[:num_tokens] for _ in range(3)]
    columns = [torch.full((size + 5,), POISON, dtype=torch.int32)[:size] for size in (num_rows + 1, num_rows)]
    tables = torch.full((num_rows + 1, NUM_BLOCKS + 3), POISON, dtype=torch.int32)
    return StepTensors(*tokens, *columns, tables[:num_rows, :width])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("decodes", [False, True], ids=["mixed", "decode"])
@pytest.mark.parametrize("pad", [(0, 0), (7, 2), (30, 4), (1, 3)], ids=str)
def test_a_step_is_that_of_the_twin(seed: int, decodes: bool, pad: tuple[int, int], monkeypatch: pytest.MonkeyPatch):
    # So small that rows and padding take several turns.
    monkeypatch.setattr(triton_step, "BLOCK", 8)
    generator = np.random.default_rng(seed)
    block_size = (16, 32)[seed % 2]
    token_table = torch.from_numpy(
        generator.integers(0, 500, (TABLE_ROWS, 1 + NUM_BLOCKS * block_size), dtype=np.int32)
    )
    block_table = torch.from_numpy(generator.integers(0, 99, (TABLE_ROWS, NUM_BLOCKS), dtype=np.int32))
    num_rows = int(generator.integers(1, TABLE_ROWS + 1))
    rows = generator.permutation(TABLE_ROWS)[:num_rows].astype(np.int32)
    counts = np.ones(num_rows, np.int32) if decodes else generator.integers(1, 40, num_rows, dtype=np.int32)
    starts = generator.integers(0, NUM_BLOCKS * block_size - 40, num_rows, dtype=np.int32)
    query_starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    num_tokens, width = int(query_starts[-1]), -(-int((starts + counts).max()) // block_size)
    columns = [torch.from_numpy(column) for column in (rows, starts, query_starts)]
    ours, twin = (poisoned(num_tokens + pad[0], num_rows + pad[1], width) for _ in range(2))
    OPS.step_tensors(token_table, block_table, *columns, num_tokens, block_size, ours)
    TWIN.step_tensors(token_table, block_table, *columns, num_tokens, block_size, twin)
    for name, tensor, expected in zip(StepTensors._fields, ours, twin, strict=True):
        assert tensor._base is not None
        assert expected._base is not None
        assert tensor._base.equal(expected._base), name


def test_tokens_are_stored_as_by_the_twin():
    ours, twin = (torch.full((40, 10), POISON, dtype=torch.int32) for _ in range(2))
    rows = torch.randperm(40, dtype=torch.int32)[:33]
    positions, drawn = torch.randint(0, 10, (2, 33), dtype=torch.int32)
    drawn[[0, 7]] = -1
    OPS.store_tokens(ours, rows, positions, drawn)
    TWIN.store_tokens(twin, rows, positions, drawn)
    assert ours.equal(twin)
    assert (ours == 0).any()
    assert (ours == POISON).sum() == 400 - 33
