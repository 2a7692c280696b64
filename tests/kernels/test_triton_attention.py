"""Triton's paged attention for rows of any number of queries, against its twin and against itself."""

from __future__ import annotations

import pytest
import torch

from kernels import triton_attention
from kernels.reference import ReferenceOps
from tests.kernels.attention_cases import EXACT, HEAD_SHAPES, SHORT, WIDE, Batch, make_batch
from tests.kernels.interpreted import AMPERE, assert_equals_twin, cuda_ops, poisoned_outputs

OPS, TWIN = cuda_ops(), ReferenceOps()
MIXED = [(1, 1), (7, 7), (1, 37), (33, 170), (0, 0), (19, 140)]


def attended(batch: Batch, ops: ReferenceOps = OPS) -> torch.Tensor:
    with poisoned_outputs():
        return batch.run(ops)


@pytest.mark.parametrize(
    ("window", "softcap", "has_sinks", "dtype"),
    [
        (0, 0.0, False, EXACT),
        (0, 0.0, False, WIDE),
        (0, 1.5, False, SHORT),
        (0, 0.0, True, EXACT),
        (1, 0.0, False, SHORT),
        (5, 0.0, True, WIDE),
        (50, 0.5, False, EXACT),
        (129, 0.5, True, WIDE),
    ],
)
def test_rows_of_any_number_of_queries(window: int, softcap: float, has_sinks: bool, dtype: torch.dtype):
    batch = make_batch(MIXED, dtype=dtype, window=window, softcap=softcap, has_sinks=has_sinks)
    assert_equals_twin(attended(batch), batch.run(TWIN))


@pytest.mark.parametrize(("head_dim", "heads", "kv_heads", "block_size", "dtype"), HEAD_SHAPES)
def test_head_shapes(head_dim: int, heads: int, kv_heads: int, block_size: int, dtype: torch.dtype):
    batch = make_batch([(5, 5), (1, 90), (21, 70), (0, 0)], heads, kv_heads, head_dim, block_size, dtype, seed=head_dim)
    assert_equals_twin(attended(batch), batch.run(TWIN))


@pytest.mark.parametrize("head_dim", [64, 256])
def test_tiles_of_an_older_gpu(head_dim: int):
    batch = make_batch([(3, 80), (40, 129)], 4, 2, head_dim, dtype=WIDE, window=70)
    assert_equals_twin(attended(batch, cuda_ops(AMPERE)), batch.run(TWIN))


@pytest.mark.parametrize("window", [16, 127, 128, 129])
def test_a_window_that_ends_at_a_tile(window: int):
    batch = make_batch([(300, 300)], 1, 1, dtype=WIDE, window=window)
    assert_equals_twin(attended(batch), batch.run(TWIN))


@pytest.mark.parametrize("window", [0, 130])
def test_a_query_gets_the_same_bits_in_any_batch_however_its_prompt_was_cut(window: int):
    batch = make_batch([(200, 200), (40, 150)], 3, 1, dtype=WIDE, window=window)
    whole = attended(batch)
    for row, first, end in [(0, 0, 2), (0, 63, 190), (1, 7, 30)]:
        start = int(batch.query_starts[row])
        assert torch.equal(attended(batch.part(row, first, end)), whole[start + first : start + end]), (row, first, end)


@pytest.mark.parametrize(
    ("dtype", "size", "key_scale", "value_scale"),
    [(WIDE, 1.0, 1.0, 1.0), (WIDE, 1e6, 0.03, 2.5), (SHORT, 1.0, 2.0, 0.1), (EXACT, 1.0, 0.03, 2.5)],
)
def test_a_cache_of_eight_bits(dtype: torch.dtype, size: float, key_scale: float, value_scale: float):
    """Also with queries beyond what float16 holds, which products are of; and with one that is zero."""
    batch = make_batch([(9, 140), (1, 20)], dtype=dtype, window=100).in_eight_bits(key_scale, value_scale)
    batch.query.mul_(size)
    batch.query[1] = 0
    assert_equals_twin(attended(batch), batch.run(TWIN))


def test_nan_is_not_hidden():
    """In one key of the first row's first head, for which none of the second is responsible."""
    batch = make_batch([(5, 200), (5, 60)])
    batch.key_cache[batch.block_tables[0, 3], 0, 7, 2] = torch.nan
    out = attended(batch)
    assert out[:5, :3].isnan().all()
    assert not out[:5, 3:].isnan().any()
    assert not out[5:].isnan().any()


def test_a_key_that_comes_later_is_not_seen_even_if_it_is_nan():
    batch = make_batch([(60, 60)], dtype=WIDE)
    expected = attended(batch)
    batch.key_cache[batch.block_tables[0, 3]] = torch.nan
    assert torch.equal(attended(batch)[:48], expected[:48])


@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_large_scores_do_not_overflow(softcap: float):
    batch = make_batch([(4, 150)], softcap=softcap)
    batch.query.mul_(1e4)
    assert_equals_twin(attended(batch), batch.run(TWIN))


def test_padding_rows_get_no_nan():
    """They have queries and no keys."""
    batch = make_batch([(3, 20), (2, 0), (2, 0)])
    out = attended(batch)
    assert_equals_twin(out[:3], batch.run(TWIN)[:3])
    assert (out[3:] == 0).all()


def test_no_tokens_are_no_launch(monkeypatch: pytest.MonkeyPatch):
    """An empty grid is an error of CUDA."""
    monkeypatch.setattr(triton_attention, "attention_kernel", None)
    batch = make_batch([(0, 0), (0, 4)])
    assert batch.run(OPS).shape == (0, 6, 64)
