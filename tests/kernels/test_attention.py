"""Paged attention and the KV-cache write: each CPU variant against the PyTorch twin, and against itself."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

from kernels.cpu import CpuOps, make_cpu_ops
from kernels.cpu_library import load_library
from kernels.reference import ReferenceOps

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


@dataclass
class Case:
    """Rows of (queries, sequence length) over a poisoned cache whose written keys alone are numbers."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    query_starts: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor

    def run(self, ops: ReferenceOps, sliding_window: int = 0, softcap: float = 0.0) -> torch.Tensor:
        return ops.attention(
            self.query,
            self.key_cache,
            self.value_cache,
            self.query_starts,
            self.seq_lens,
            self.block_tables,
            1 / math.sqrt(self.query.shape[-1]),
            sliding_window,
            softcap,
        )

    def slice(self, row: int, first: int, end: int) -> Case:
        """Queries first:end of one row, as a step that computes only them would see them."""
        start, stop = self.query_starts[row : row + 2].tolist()
        return Case(
            self.query[start + first : start + end],
            self.key_cache,
            self.value_cache,
            torch.tensor([0, end - first], dtype=torch.int32),
            self.seq_lens[row : row + 1] - (stop - start - end),
            self.block_tables[row : row + 1].clone(),
        )


def make_case(
    rows: list[tuple[int, int]],
    heads: int = 6,
    kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    counts = [queries for queries, _ in rows]
    blocks_of = [-(-length // block_size) for _, length in rows]
    num_blocks = sum(blocks_of) + 1
    key_shape, value_shape = ReferenceOps().kv_cache_shapes(num_blocks, kv_heads, head_dim, block_size)
    key_cache = torch.full(key_shape, torch.nan, dtype=dtype)
    value_cache = torch.full(value_shape, torch.nan, dtype=dtype)
    tables = torch.zeros(len(rows), max(blocks_of), dtype=torch.int32)
    free = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    for row, (_, length) in enumerate(rows):
        blocks = torch.tensor([free.pop() for _ in range(blocks_of[row])], dtype=torch.int64)
        tables[row, : len(blocks)] = blocks
        positions = torch.arange(length)
        slots = blocks[positions // block_size] * block_size + positions % block_size
        keys, values = (torch.randn(length, kv_heads, head_dim, generator=generator).to(dtype) for _ in range(2))
        ReferenceOps().write_kv(keys, values, key_cache, value_cache, slots)
    # A slice of a wider tensor, as the query of a merged projection is.
    merged = torch.randn(sum(counts), heads + 2 * kv_heads, head_dim, generator=generator).to(dtype)
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    lengths = torch.tensor([length for _, length in rows], dtype=torch.int32)
    return Case(merged[:, :heads], key_cache, value_cache, starts, lengths, tables)


MIXED = [(1, 1), (7, 7), (1, 37), (33, 200), (0, 0), (1, 530), (19, 1100)]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("sliding_window", "softcap"), [(0, 0.0), (1, 0.0), (5, 0.0), (50, 0.0), (0, 1.5), (50, 0.5)])
def test_mixed_prefill_and_decode_rows_equal_the_twin(
    ops: CpuOps, dtype: torch.dtype, sliding_window: int, softcap: float
):
    case = make_case(MIXED, dtype=dtype)
    ours, twin = case.run(ops, sliding_window, softcap), case.run(ReferenceOps(), sliding_window, softcap)
    torch.testing.assert_close(ours, twin, atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (8, 2), (9, 3), (14, 2), (64, 1)])
def test_head_shapes_equal_the_twin(ops: CpuOps, head_dim: int, heads: int, kv_heads: int):
    case = make_case([(5, 5), (1, 90), (21, 70)], heads, kv_heads, head_dim, seed=head_dim + heads)
    torch.testing.assert_close(case.run(ops), case.run(ReferenceOps()), atol=2e-5, rtol=0)


@pytest.mark.parametrize("block_size", [8, 16, 24, 32, 128, 256])
def test_block_sizes_equal_the_twin(variant: str, ops: CpuOps, block_size: int):
    if block_size % load_library(variant).vector_width:
        pytest.skip("make_cpu_ops takes a narrower variant for these")
    case = make_case(MIXED, block_size=block_size, seed=block_size)
    torch.testing.assert_close(case.run(ops, 600), case.run(ReferenceOps(), 600), atol=2e-5, rtol=0)


def test_an_odd_head_size_is_left_to_the_twin(ops: CpuOps):
    case = make_case([(3, 9)], head_dim=20)
    assert torch.equal(case.run(ops), case.run(ReferenceOps()))


@pytest.mark.parametrize("sliding_window", [1, 5, 16, 17, 512, 513])
def test_a_window_hides_exactly_the_keys_before_it(ops: CpuOps, sliding_window: int):
    """Smaller than a block, at its border, at a partition's; in one piece, in chunks, token by token."""
    length = 1100
    case = make_case([(length, length)], heads=4, kv_heads=1)
    whole = case.run(ops, sliding_window)
    torch.testing.assert_close(whole, case.run(ReferenceOps(), sliding_window), atol=2e-5, rtol=0)
    for first, end in [(0, 1), (3, 21), (15, 40), (500, 530), (600, 1100), (1099, 1100)]:
        assert torch.equal(case.slice(0, first, end).run(ops, sliding_window), whole[first:end]), (first, end)
    # Keys that the last query must not see change nothing, and the first it sees does.
    last, hidden = case.slice(0, length - 1, length), length - sliding_window
    for position, changes in [(hidden - 1, False), (hidden, True)]:
        block, offset = case.block_tables[0, position // 16], position % 16
        kept = case.value_cache[block, :, offset].clone()
        case.value_cache[block, :, offset] += 1e4
        assert torch.equal(last.run(ops, sliding_window)[0], whole[-1]) is not changes, position
        case.value_cache[block, :, offset] = kept


def test_capped_scores_equal_their_definition(ops: CpuOps):
    """In float64, of one row whose scores reach far beyond the cap."""
    case = make_case([(9, 40)], heads=4, kv_heads=2)
    case.query *= 30
    keys = case.key_cache[case.block_tables[0].long()].permute(1, 0, 3, 2).flatten(1, 2)[:, :40].double()
    values = case.value_cache[case.block_tables[0].long()].transpose(0, 1).flatten(1, 2)[:, :40].double()
    scores = torch.einsum("thd,hkd->htk", case.query.double(), keys.repeat_interleave(2, 0)) / 8
    capped = (5 * (scores / 5).tanh()).masked_fill(torch.ones(9, 40).triu(32).bool(), -torch.inf)
    expected = torch.einsum("htk,hkd->thd", capped.softmax(-1), values.repeat_interleave(2, 0))
    for implementation in (ops, ReferenceOps()):
        torch.testing.assert_close(case.run(implementation, 0, 5.0).double(), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize(("sliding_window", "softcap"), [(0, 0.0), (700, 0.0), (0, 1.5)])
def test_a_row_is_the_same_bits_alone_in_any_batch_and_chunking(ops: CpuOps, sliding_window: int, softcap: float):
    """So that prefix hits, chunked prefill and preemption cannot change a token by way of attention."""
    case = make_case([(1100, 1100), (40, 900), (1, 300)], heads=9, kv_heads=3)
    whole = case.run(ops, sliding_window, softcap)
    for row, first, end in [(0, 0, 1), (0, 63, 64), (0, 100, 417), (0, 1099, 1100), (1, 3, 40), (2, 0, 1)]:
        start = int(case.query_starts[row])
        part = case.slice(row, first, end).run(ops, sliding_window, softcap)
        assert torch.equal(part, whole[start + first : start + end]), (row, first, end)


def test_the_number_of_threads_does_not_change_a_bit():
    case = make_case([(1, 3000)], heads=4, kv_heads=1)
    assert torch.equal(case.run(make_cpu_ops(16, 1)), case.run(make_cpu_ops(16, 3)))


def test_nan_is_not_hidden(ops: CpuOps):
    case = make_case([(1, 30), (1, 30)])
    case.key_cache[case.block_tables[1, 0], 0, 5, 3] = torch.nan
    out = case.run(ops)
    assert out[1, :3].isnan().all()
    assert not out[0].isnan().any()
    assert not out[1, 3:].isnan().any()


def test_large_scores_do_not_overflow(ops: CpuOps):
    case = make_case([(4, 600)])
    case.query *= 1e4
    torch.testing.assert_close(case.run(ops), case.run(ReferenceOps()), atol=2e-5, rtol=0)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_kv_write_equals_the_twin_and_padded_rows_write_nothing(ops: CpuOps, dtype: torch.dtype):
    key_shape, value_shape = ops.kv_cache_shapes(9, 3, 80, 16)
    merged = torch.randn(37, 12, 80).to(dtype)
    slots = torch.randperm(9 * 16)[:37]
    slots[[0, 5, 36]] = -1
    caches = []
    for implementation in (ops, ReferenceOps()):
        keys, values = torch.full(key_shape, 7.0, dtype=dtype), torch.full(value_shape, 7.0, dtype=dtype)
        implementation.write_kv(merged[:, 6:9], merged[:, 9:], keys, values, slots)
        caches.append((keys, values))
    assert torch.equal(caches[0][0], caches[1][0])
    assert torch.equal(caches[0][1], caches[1][1])
    assert (caches[0][0] != 7.0).sum() == 34 * 3 * 80
