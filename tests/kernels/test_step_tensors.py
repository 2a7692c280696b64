"""What a step computes, looked up in tables, against loops; padding; tokens stored for the next step."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.cpu import CpuOps
from kernels.cpu_library import load_library, variants
from kernels.reference import ReferenceOps
from kernels.reference_step import StepTensors

LIBRARIES = [library for variant in variants() if (library := load_library(variant))]
OPS: list[ReferenceOps] = [ReferenceOps(), *(CpuOps(library, 2) for library in LIBRARIES)]
NAMES = ["reference", *variants()]
BLOCK_SIZE = 16
NUM_ROWS, NUM_BLOCKS = 9, 12
POISON = -77


def poisoned(num_tokens: int, num_rows: int, width: int) -> StepTensors:
    """Views into memory that is wider than they are."""
    tokens = [torch.full((num_tokens,), POISON) for _ in range(3)]
    columns = [torch.full((size,), POISON, dtype=torch.int32) for size in (num_rows + 1, num_rows)]
    tables = torch.full((num_rows, NUM_BLOCKS), POISON, dtype=torch.int32)
    return StepTensors(*tokens, *columns, tables[:, :width])


@pytest.mark.parametrize("ops", OPS, ids=NAMES)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("decodes", [False, True], ids=["mixed", "decode"])
@pytest.mark.parametrize("pad", [(0, 0), (3, 3), (7, 2), (1, 4)], ids=str)
def test_tensors_are_those_of_a_loop_and_the_rest_is_padding(
    seed: int, decodes: bool, pad: tuple[int, int], ops: ReferenceOps
):
    generator = np.random.default_rng(seed)
    token_table = torch.from_numpy(generator.integers(0, 500, (NUM_ROWS, 1 + NUM_BLOCKS * BLOCK_SIZE), dtype=np.int32))
    block_table = torch.from_numpy(generator.integers(0, 99, (NUM_ROWS, NUM_BLOCKS), dtype=np.int32))
    num_rows = int(generator.integers(1, NUM_ROWS + 1))
    rows = generator.permutation(NUM_ROWS)[:num_rows].astype(np.int32)
    counts = np.ones(num_rows, np.int32) if decodes else generator.integers(1, 40, num_rows, dtype=np.int32)
    starts = generator.integers(0, NUM_BLOCKS * BLOCK_SIZE - 40, num_rows, dtype=np.int32)
    query_starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    num_tokens, width = int(query_starts[-1]), -(-int((starts + counts).max()) // BLOCK_SIZE)
    out = poisoned(num_tokens + pad[0], num_rows + pad[1], width)
    given = [torch.from_numpy(column) for column in (rows, starts, query_starts)]
    ops.step_tensors(token_table, block_table, *given, num_tokens, BLOCK_SIZE, out)

    ids, positions, slots = [], [], []
    for row, start, count in zip(rows.tolist(), starts.tolist(), counts.tolist(), strict=True):
        for position in range(start, start + count):
            ids.append(int(token_table[row, position]))
            positions.append(position)
            slots.append(int(block_table[row, position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE)
    assert out.input_ids.tolist() == ids + [0] * pad[0]
    assert out.positions.tolist() == positions + [0] * pad[0]
    assert out.slots.tolist() == slots + [-1] * pad[0]
    assert out.seq_lens.tolist() == [*(starts + counts).tolist(), *[0] * pad[1]]
    following = [min(num_tokens + 1 + n, num_tokens + pad[0]) for n in range(pad[1])]
    assert out.query_starts.tolist() == [*query_starts.tolist(), *following]
    for place, end in enumerate((starts + counts).tolist()):  # what is behind the row's own blocks is nobody's
        used = -(-end // BLOCK_SIZE)
        assert torch.equal(out.block_tables[place, :used], block_table[rows[place], :used])


@pytest.mark.parametrize("ops", OPS, ids=NAMES)
def test_tokens_are_stored_where_the_next_step_finds_them(ops: ReferenceOps):
    table = torch.full((4, 10), POISON, dtype=torch.int32)
    columns = [torch.tensor(column, dtype=torch.int32) for column in ([3, 0], [9, 2], [55, -1])]
    ops.store_tokens(table, *columns)
    assert table[3, 9] == 55
    assert table[0, 2] == 0
    assert (table == POISON).sum() == 38


def test_rows_of_padding_attend_to_nothing_and_change_nobody():
    generator = torch.Generator().manual_seed(0)
    ops = ReferenceOps()
    shapes = ops.kv_cache_shapes(4, 2, 16, BLOCK_SIZE)
    caches = [torch.randn(shape, generator=generator) for shape in shapes]
    query = torch.randn(4, 4, 16, generator=generator)
    tables = torch.tensor([[1, 2], [3, 0], [POISON] * 2, [POISON] * 2], dtype=torch.int32)
    starts, lengths = torch.arange(5, dtype=torch.int32), torch.tensor([20, 7, 0, 0], dtype=torch.int32)
    padded = ops.attention(query, *caches, starts, lengths, tables, 0.25, 0, 0.0)
    alone = ops.attention(query[:2], *caches, starts[:3], lengths[:2], tables[:2], 0.25, 0, 0.0)
    assert torch.equal(padded[:2], alone)
