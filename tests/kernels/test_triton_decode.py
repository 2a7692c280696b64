"""Triton's paged attention for steps in which each row has one query, against its twin and against itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels import triton_attention
from kernels.cuda import CudaOps
from kernels.gpu import Gpu
from kernels.reference import ReferenceOps
from kernels.triton_decode import MAX_SPLITS, MIN_SPLITS, num_splits
from tests.kernels.attention_cases import EXACT, HEAD_SHAPES, SHORT, WIDE, Batch, make_batch
from tests.kernels.interpreted import HOPPER, assert_equals_twin, cuda_ops, poisoned_outputs

OPS, TWIN = cuda_ops(Gpu(capability=90, num_sms=8)), ReferenceOps()
"""With few splits, for the interpreter takes milliseconds for each."""
INVARIANT = CudaOps(HOPPER, batch_invariant=True)
LENGTHS = [1, 37, 0, 600, 128, 0]
"""Of keys; rows without are padding."""


def make_step(lengths: list[int], *shape: int, **options: object) -> Batch:
    return make_batch([(1, length) for length in lengths], *shape, **options)


def attended(batch: Batch, ops: ReferenceOps = OPS) -> torch.Tensor:
    with poisoned_outputs():
        return batch.run(ops)


def assert_twin(batch: Batch) -> None:
    """Padding gets zeros: what is made of it must not be NaN."""
    ours, twin, is_real = attended(batch), batch.run(TWIN), batch.seq_lens > 0
    assert_equals_twin(ours[is_real], twin[is_real])
    assert (ours[~is_real] == 0).all()


@pytest.fixture(autouse=True)
def no_other_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_attention, "attention_kernel", None)


@pytest.mark.parametrize(
    ("window", "softcap", "has_sinks", "dtype"),
    [
        (0, 0.0, False, EXACT),
        (0, 0.0, False, WIDE),
        (0, 1.5, False, SHORT),
        (0, 0.0, True, EXACT),
        (1, 0.0, False, SHORT),
        (5, 0.0, True, WIDE),
        (150, 0.5, False, EXACT),
        (300, 0.5, True, WIDE),
    ],
)
def test_rows_of_any_length(window: int, softcap: float, has_sinks: bool, dtype: torch.dtype):
    assert_twin(make_step(LENGTHS, dtype=dtype, window=window, softcap=softcap, has_sinks=has_sinks))


@pytest.mark.parametrize(("head_dim", "heads", "kv_heads", "block_size", "dtype"), HEAD_SHAPES)
def test_head_shapes(head_dim: int, heads: int, kv_heads: int, block_size: int, dtype: torch.dtype):
    assert_twin(make_step([90, 333, 0], heads, kv_heads, head_dim, block_size, dtype, seed=head_dim))


@pytest.mark.parametrize("length", [255, 256, 257, 2000])
def test_a_row_that_is_split(length: int):
    """Alone on a large GPU: it has many splits, each of two tiles of 128 keys at least."""
    batch = make_step([length], 3, 1, dtype=WIDE)
    assert_equals_twin(attended(batch, cuda_ops()), batch.run(TWIN))


def test_splits_of_several_tiles():
    """Tiles are of 32 keys: eight splits of the first row would have five and a bit."""
    batch = make_step([1300, 700], 2, 1, 128, dtype=EXACT)
    assert_equals_twin(attended(batch, INVARIANT), batch.run(TWIN))


@pytest.mark.parametrize(
    ("dtype", "size", "key_scale", "value_scale"),
    [(WIDE, 1.0, 1.0, 1.0), (WIDE, 1e6, 0.03, 2.5), (SHORT, 1.0, 2.0, 0.1), (EXACT, 1.0, 0.03, 2.5)],
)
def test_a_cache_of_eight_bits(dtype: torch.dtype, size: float, key_scale: float, value_scale: float):
    """Also with queries beyond what float16 holds, which products are of; and with one that is zero."""
    batch = make_step([300, 20, 0], dtype=dtype, window=270).in_eight_bits(key_scale, value_scale)
    batch.query.mul_(size)
    batch.query[1] = 0
    assert_twin(batch)


def test_nan_is_not_hidden():
    """In the second of three splits of the first row, in its first head."""
    batch = make_step([600, 60])
    batch.key_cache[batch.block_tables[0, 20], 0, 7, 2] = torch.nan
    out = attended(batch)
    assert out[0, :3].isnan().all()
    assert not out[0, 3:].isnan().any()
    assert not out[1].isnan().any()


@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_large_scores_do_not_overflow(softcap: float):
    batch = make_step([600, 3], softcap=softcap)
    batch.query.mul_(1e4)
    assert_equals_twin(attended(batch), batch.run(TWIN))


def test_in_the_invariant_mode_a_row_gets_the_same_bits_in_any_batch():
    batch = make_step([2000, 40, 0, 700], 3, 1, dtype=WIDE)
    whole = attended(batch, INVARIANT)
    for row in (0, 1, 3):
        assert torch.equal(attended(batch.part(row, 0, 1), INVARIANT)[0], whole[row])


def test_what_lies_beside_a_row_changes_nothing_of_it():
    """As long as the batch is padded to the same size."""
    batch = make_step([200, 300, 0])
    alone = replace(batch, seq_lens=batch.seq_lens * torch.tensor([1, 0, 1], dtype=torch.int32))
    assert torch.equal(attended(alone)[0], attended(batch)[0])


def test_the_number_of_splits_fills_the_device_and_falls_with_the_batch():
    for sms in (108, 132):
        for kv_heads in (1, 8):
            splits = [num_splits(rows, kv_heads, sms) for rows in (1, 2, 4, 8, 64, 256, 4096)]
            assert splits == sorted(splits, reverse=True)
            assert splits[-1] == MIN_SPLITS
            assert all(count & (count - 1) == 0 for count in splits)
    assert num_splits(1, 1, 132) == MAX_SPLITS
    assert 64 * 8 * num_splits(64, 8, 132) >= 8 * 132
