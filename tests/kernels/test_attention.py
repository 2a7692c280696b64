"""Paged attention and the KV-cache write: each CPU variant against the PyTorch twin, and against itself."""

from __future__ import annotations

import pytest
import torch

from kernels.cpu import CpuOps, make_cpu_ops
from kernels.cpu_library import load_library
from kernels.reference import ReferenceOps
from tests.kernels.attention_cases import EXACT, SHORT, WIDE, make_batch

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
TYPES = [(EXACT, EXACT), (EXACT, SHORT), (WIDE, WIDE), (WIDE, SHORT), (WIDE, EXACT), (SHORT, SHORT), (SHORT, WIDE)]
"""Of queries, and of the cache."""


MIXED = [(1, 1), (7, 7), (1, 37), (33, 200), (0, 0), (1, 530), (19, 1100)]


@pytest.mark.parametrize(("dtype", "cache_dtype"), TYPES)
@pytest.mark.parametrize(("sliding_window", "softcap"), [(0, 0.0), (1, 0.0), (5, 0.0), (50, 0.0), (0, 1.5), (50, 0.5)])
def test_mixed_prefill_and_decode_rows_equal_the_twin(
    ops: CpuOps, dtype: torch.dtype, cache_dtype: torch.dtype, sliding_window: int, softcap: float
):
    batch = make_batch(MIXED, dtype=dtype, cache_dtype=cache_dtype, window=sliding_window, softcap=softcap)
    torch.testing.assert_close(batch.run(ops), batch.run(ReferenceOps()), atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (8, 2), (9, 3), (14, 2), (64, 1)])
@pytest.mark.parametrize("cache_dtype", [EXACT, SHORT])
def test_head_shapes_equal_the_twin(ops: CpuOps, head_dim: int, heads: int, kv_heads: int, cache_dtype: torch.dtype):
    shape = heads, kv_heads, head_dim
    batch = make_batch([(5, 5), (1, 90), (21, 70)], *shape, cache_dtype=cache_dtype, seed=head_dim + heads)
    torch.testing.assert_close(batch.run(ops), batch.run(ReferenceOps()), atol=2e-5, rtol=0)


@pytest.mark.parametrize("block_size", [8, 16, 24, 32, 48, 128, 256, 272, 1024])
@pytest.mark.parametrize("cache_dtype", [EXACT, SHORT])
def test_block_sizes_equal_the_twin(variant: str, ops: CpuOps, block_size: int, cache_dtype: torch.dtype):
    if block_size % load_library(variant).vector_width:
        pytest.skip("make_cpu_ops takes a narrower variant for these")
    batch = make_batch(MIXED, block_size=block_size, cache_dtype=cache_dtype, window=600, seed=block_size)
    torch.testing.assert_close(batch.run(ops), batch.run(ReferenceOps()), atol=2e-5, rtol=0)


@pytest.mark.parametrize("cache_dtype", [EXACT, SHORT])
def test_an_odd_head_size_is_left_to_the_twin(ops: CpuOps, cache_dtype: torch.dtype):
    batch = make_batch([(3, 9)], head_dim=20, cache_dtype=cache_dtype)
    assert torch.equal(batch.run(ops), batch.run(ReferenceOps()))


@pytest.mark.parametrize("sliding_window", [1, 5, 16, 17, 512, 513])
@pytest.mark.parametrize("cache_dtype", [EXACT, SHORT])
def test_a_window_hides_exactly_the_keys_before_it(ops: CpuOps, sliding_window: int, cache_dtype: torch.dtype):
    """Smaller than a block, at its border, at a partition's; in one piece, in chunks, token by token."""
    length = 1100
    batch = make_batch([(length, length)], heads=4, kv_heads=1, cache_dtype=cache_dtype, window=sliding_window)
    whole = batch.run(ops)
    torch.testing.assert_close(whole, batch.run(ReferenceOps()), atol=2e-5, rtol=0)
    for first, end in [(0, 1), (3, 21), (15, 40), (500, 530), (600, 1100), (1099, 1100)]:
        assert torch.equal(batch.part(0, first, end).run(ops), whole[first:end]), (first, end)
    # Keys that the last query must not see change nothing, and the first it sees does.
    last, hidden = batch.part(0, length - 1, length), length - sliding_window
    for position, changes in [(hidden - 1, False), (hidden, True)]:
        block, offset = batch.block_tables[0, position // 16], position % 16
        kept = batch.value_cache[block, :, offset].clone()
        batch.value_cache[block, :, offset] += 1e4
        assert torch.equal(last.run(ops)[0], whole[-1]) is not changes, position
        batch.value_cache[block, :, offset] = kept


def test_capped_scores_equal_their_definition(ops: CpuOps):
    """In float64, of one row whose scores reach far beyond the cap."""
    batch = make_batch([(9, 40)], heads=4, kv_heads=2, softcap=5.0)
    batch.query.mul_(30)
    blocks = batch.block_tables[0, :3].long()
    keys = batch.key_cache[blocks].permute(1, 0, 3, 2).flatten(1, 2)[:, :40].double()
    values = batch.value_cache[blocks].transpose(0, 1).flatten(1, 2)[:, :40].double()
    scores = torch.einsum("thd,hkd->htk", batch.query.double(), keys.repeat_interleave(2, 0)) / 8
    capped = (5 * (scores / 5).tanh()).masked_fill(torch.ones(9, 40).triu(32).bool(), -torch.inf)
    expected = torch.einsum("htk,hkd->thd", capped.softmax(-1), values.repeat_interleave(2, 0))
    for implementation in (ops, ReferenceOps()):
        torch.testing.assert_close(batch.run(implementation).double(), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize(("sliding_window", "softcap"), [(0, 0.0), (700, 0.0), (0, 1.5)])
@pytest.mark.parametrize("cache_dtype", [EXACT, SHORT])
def test_a_row_is_the_same_bits_alone_in_any_batch_and_chunking(
    ops: CpuOps, sliding_window: int, softcap: float, cache_dtype: torch.dtype
):
    """So that prefix hits, chunked prefill and preemption cannot change a token by way of attention."""
    rows = [(1100, 1100), (40, 900), (1, 300)]
    batch = make_batch(rows, 9, 3, cache_dtype=cache_dtype, window=sliding_window, softcap=softcap)
    whole = batch.run(ops)
    for row, first, end in [(0, 0, 1), (0, 63, 64), (0, 100, 417), (0, 1099, 1100), (1, 3, 40), (2, 0, 1)]:
        start = int(batch.query_starts[row])
        part = batch.part(row, first, end).run(ops)
        assert torch.equal(part, whole[start + first : start + end]), (row, first, end)


@pytest.mark.parametrize("cache_dtype", [EXACT, SHORT])
def test_the_number_of_threads_does_not_change_a_bit(cache_dtype: torch.dtype):
    batch = make_batch([(1, 3000)], heads=4, kv_heads=1, cache_dtype=cache_dtype)
    assert torch.equal(batch.run(make_cpu_ops(16, 1)), batch.run(make_cpu_ops(16, 3)))


@pytest.mark.parametrize("cache_dtype", [EXACT, SHORT])
def test_nan_is_not_hidden(ops: CpuOps, cache_dtype: torch.dtype):
    batch = make_batch([(1, 30), (1, 30)], cache_dtype=cache_dtype)
    batch.key_cache[batch.block_tables[1, 0], 0, 5, 3] = torch.nan
    out = batch.run(ops)
    assert out[1, :3].isnan().all()
    assert not out[0].isnan().any()
    assert not out[1, 3:].isnan().any()


@pytest.mark.parametrize("cache_dtype", [EXACT, SHORT])
def test_large_scores_do_not_overflow(ops: CpuOps, cache_dtype: torch.dtype):
    batch = make_batch([(4, 600)], cache_dtype=cache_dtype)
    batch.query.mul_(1e4)
    torch.testing.assert_close(batch.run(ops), batch.run(ReferenceOps()), atol=2e-5, rtol=0)


@pytest.mark.parametrize(("dtype", "cache_dtype"), TYPES)
@pytest.mark.parametrize("head_dim", [80, 20])
def test_kv_write_equals_the_twin_and_padded_rows_write_nothing(
    ops: CpuOps, head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype
):
    key_shape, value_shape = ops.kv_cache_shapes(9, 3, head_dim, 16)
    merged = torch.randn(37, 12, head_dim).to(dtype)
    slots = torch.randperm(9 * 16)[:37]
    slots[[0, 5, 36]] = -1
    caches = []
    for implementation in (ops, ReferenceOps()):
        keys, values = (torch.full(shape, 7.0, dtype=cache_dtype) for shape in (key_shape, value_shape))
        implementation.write_kv(merged[:, 6:9], merged[:, 9:], keys, values, slots)
        caches.append((keys, values))
    assert torch.equal(caches[0][0], caches[1][0])
    assert torch.equal(caches[0][1], caches[1][1])
    assert (caches[0][0] != 7.0).sum() == 34 * 3 * head_dim


@pytest.mark.parametrize("dtype", [EXACT, WIDE])
def test_what_half_precision_cannot_hold_becomes_its_largest_number(ops: CpuOps, dtype: torch.dtype):
    """Not infinite, which would make the row's whole result NaN; NaN stays."""
    given = torch.tensor([65472.0, 65520, 1e6, torch.inf, -65520, -1e38, 1e-6, torch.nan], dtype=dtype)
    given = torch.cat([given, torch.zeros(8, dtype=dtype)])
    expected = [min(max(number, -65504), 65504) for number in given.tolist()[:6]]
    for implementation in (ops, ReferenceOps()):
        keys, values = (torch.zeros(shape, dtype=SHORT) for shape in ops.kv_cache_shapes(2, 1, 16, 16))
        implementation.write_kv(given[None, None], given[None, None], keys, values, torch.tensor([20]))
        for kept in (keys[1, 0, :, 4], values[1, 0, 4]):
            assert kept[:6].tolist() == expected
            torch.testing.assert_close(kept[6:7].float(), given[6:7].float(), atol=6e-8, rtol=0)
            assert kept[7].isnan()
