"""Triton's rotation and KV-cache write against their twins."""

from __future__ import annotations

import pytest
import torch

from kernels import triton_cache
from kernels.reference import FP8, ReferenceOps
from tests.kernels.interpreted import TOLERANCE, assert_equals_twin, cuda_ops

OPS, TWIN = cuda_ops(), ReferenceOps()
BLOCKS, CANARY = 5, 7.0
DTYPES = list(TOLERANCE)


def make_merged(tokens: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Queries, keys and values side by side, as one projection makes them, in a wider tensor."""
    wide = torch.full((tokens, heads + 2 * kv_heads + 1, head_dim), torch.nan, dtype=dtype)
    wide[:, :-1] = torch.randn(tokens, heads + 2 * kv_heads, head_dim).to(dtype)
    return wide[:, :-1]


def make_slots(tokens: int, block_size: int) -> torch.Tensor:
    """No two alike; some are padding."""
    slots = torch.randperm(BLOCKS * block_size)[:tokens]
    slots[torch.rand(tokens) < 0.3] = -1
    return slots


def caches(ops: ReferenceOps, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    shapes = ops.kv_cache_shapes(BLOCKS, kv_heads, head_dim, block_size)
    return [torch.full(shape, CANARY).to(dtype) for shape in shapes]


def assert_caches_equal(ours: list[torch.Tensor], twin: list[torch.Tensor], tolerance: float = 0.0) -> None:
    """Keys of the twin lie dimension by dimension."""
    for cache, expected in ((ours[0], twin[0].transpose(2, 3)), (ours[1], twin[1])):
        assert cache.dtype is expected.dtype
        assert_equals_twin(cache.float(), expected.float(), tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size"), [(6, 2, 64, 16), (5, 5, 80, 32), (3, 1, 96, 16)]
)
def test_values_go_to_their_slots_and_padding_nowhere(
    heads: int, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
):
    torch.manual_seed(head_dim)
    _, key, value = make_merged(37, heads, kv_heads, head_dim, dtype).split([heads, kv_heads, kv_heads], 1)
    slots = make_slots(37, block_size)
    ours, twin = (caches(ops, kv_heads, head_dim, block_size, dtype) for ops in (OPS, TWIN))
    OPS.write_kv(key, value, *ours, slots)
    TWIN.write_kv(key, value, *twin, slots)
    assert_caches_equal(ours, twin)
    assert (ours[1] != CANARY).sum() == (slots >= 0).sum() * kv_heads * head_dim


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "head_dim", "pairs"),
    [(1, 64, 32), (9, 80, 40), (16, 96, 48), (3, 128, 64), (20, 256, 128), (5, 64, 5), (7, 48, 12)],
)
def test_pairs_are_turned_in_place(heads: int, head_dim: int, pairs: int, dtype: torch.dtype):
    torch.manual_seed(heads)
    merged = make_merged(7, heads, 2, head_dim, dtype)
    angles = torch.randn(7, pairs) * 10
    expected = merged.clone()
    OPS.rotary(merged[:, :heads], angles.cos(), angles.sin())
    TWIN.rotary(expected[:, :heads], angles.cos(), angles.sin())
    assert_equals_twin(merged, expected)
    assert torch.equal(merged[:, heads:], expected[:, heads:])
    assert torch.equal(merged[..., 2 * pairs :], expected[..., 2 * pairs :])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "pairs", "block_size"),
    [
        (6, 2, 64, 32, 16),
        (9, 3, 80, 16, 32),
        (4, 4, 96, 48, 16),
        (17, 17, 128, 64, 16),
        (8, 1, 256, 100, 32),
        (2, 1, 16, 8, 16),
    ],
)
def test_the_two_in_one_pass(heads: int, kv_heads: int, head_dim: int, pairs: int, block_size: int, dtype: torch.dtype):
    torch.manual_seed(pairs)
    merged = make_merged(9, heads, kv_heads, head_dim, dtype)
    angles, slots = torch.randn(9, pairs) * 10, make_slots(9, block_size)
    expected = merged.clone()
    ours, twin = (caches(ops, kv_heads, head_dim, block_size, dtype) for ops in (OPS, TWIN))
    for ops, tensor, cache in ((OPS, merged, ours), (TWIN, expected, twin)):
        ops.rotate_and_write(tensor, kv_heads, angles.cos(), angles.sin(), *cache, slots)
    assert_equals_twin(merged[:, :heads], expected[:, :heads])
    assert torch.equal(merged[:, heads + kv_heads :], expected[:, heads + kv_heads :])
    assert_caches_equal(ours, twin, TOLERANCE[dtype])


@pytest.mark.parametrize(("key_scale", "value_scale"), [(1.0, 1.0), (0.037, 2.5), (1e-4, 1e3)])
def test_eight_bits_keep_what_is_divided_by_a_scale(key_scale: float, value_scale: float):
    """With the last scales keys become the largest number there is, and values the smallest."""
    torch.manual_seed(0)
    key, value = (torch.randn(40, 3, 64).bfloat16() for _ in range(2))
    value[3, 1, 5] = torch.inf
    slots = make_slots(40, 16)
    ours, twin = (caches(ops, 3, 64, 16, FP8) for ops in (OPS, TWIN))
    OPS.write_kv(key, value, *ours, slots, key_scale, value_scale)
    TWIN.write_kv(key, value, *twin, slots, key_scale, value_scale)
    assert_caches_equal(ours, twin)


def test_eight_bits_of_turned_keys():
    """They are rounded to the type of keys first, as if they had been turned in place."""
    torch.manual_seed(0)
    merged, angles = make_merged(30, 4, 2, 64, torch.bfloat16), torch.randn(30, 32)
    slots, expected = make_slots(30, 16), merged.clone()
    ours, twin = (caches(ops, 2, 64, 16, FP8) for ops in (OPS, TWIN))
    OPS.rotate_and_write(merged, 2, angles.cos(), angles.sin(), *ours, slots, 0.5, 0.5)
    TWIN.rotate_and_write(expected, 2, angles.cos(), angles.sin(), *twin, slots, 0.5, 0.5)
    assert_caches_equal(ours, twin, 0.125)


def test_nan_is_not_hidden_in_eight_bits():
    key = torch.full((1, 1, 16), torch.nan)
    cache = caches(OPS, 1, 16, 16, FP8)
    OPS.write_kv(key, key, *cache, torch.tensor([3]))
    assert cache[0].float().isnan().sum() == cache[1].float().isnan().sum() == 16


def test_no_tokens_are_no_launch(monkeypatch: pytest.MonkeyPatch):
    """An empty grid is an error of CUDA."""
    monkeypatch.setattr(triton_cache, "rotate_and_write_kernel", None)
    key = torch.empty(0, 1, 16)
    OPS.write_kv(key, key, *caches(OPS, 1, 16, 16, torch.float32), torch.empty(0, dtype=torch.int64))
