"""Linear layers on weights of 16 bits: packing, their products, and what must hold whatever the batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from kernels.halves import HalvesMatrix
from kernels.reference import ReferenceOps
from tests.kernels.conftest import cpu_ops

if TYPE_CHECKING:
    from kernels.cpu import CpuOps

SHAPES = [(1, 1), (15, 33), (16, 96), (17, 5), (33, 300), (50, 160), (130, 576)]
ROWS = [1, 2, 3, 5, 7, 11, 12, 13, 24, 31, 65, 250]


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def random_matrix(outputs: int, inputs: int, dtype: torch.dtype) -> tuple[HalvesMatrix, torch.Tensor]:
    """A matrix filled in two parts, and its weights [outputs, inputs]."""
    torch.manual_seed(outputs * inputs)
    weights = torch.randn(outputs, inputs).to(dtype)
    matrix = HalvesMatrix(outputs, inputs, dtype)
    for rows in (slice(0, 16), slice(16, outputs)):
        if len(weights[rows]):
            matrix.fill(rows.start, weights[rows])
    return matrix, weights.float()


def product(ops: ReferenceOps, x: torch.Tensor, matrix: HalvesMatrix) -> torch.Tensor:
    """Into the middle of a wider tensor, whose rest must stay as it is."""
    outputs = matrix.shape[0]
    out = torch.full((len(x), outputs + 5), torch.nan)
    ops.halves_product(matrix)(x, out[:, 3 : 3 + outputs])
    assert out[:, :3].isnan().all()
    assert out[:, 3 + outputs :].isnan().all()
    return out[:, 3 : 3 + outputs]


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_16_bit_weights_come_back_as_they_were(ops: CpuOps, dtype: torch.dtype, outputs: int, inputs: int):
    matrix, exact = random_matrix(outputs, inputs, dtype)
    assert torch.equal(torch.cat(list(matrix.chunks(7))), exact)
    indices = torch.tensor([outputs - 1, 0, outputs - 1, outputs // 2])
    assert torch.equal(matrix.rows(indices), exact[indices])
    assert torch.equal(ops.halves_rows(matrix, indices), exact[indices])
    assert matrix.rows(torch.empty(0, dtype=torch.int64)).shape == (0, inputs)


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_products_with_16_bit_weights_are_those_of_floats(ops: CpuOps, dtype: torch.dtype, outputs: int, inputs: int):
    matrix, weights = random_matrix(outputs, inputs, dtype)
    for rows in ROWS:
        x = torch.randn(rows, inputs)
        exact = x.double() @ weights.double().T
        for each in (ops, ReferenceOps()):
            error = (product(each, x, matrix).double() - exact).abs().max()
            assert error < 1e-6 * x.norm(dim=1).max() * weights.norm(dim=1).max(), (rows, each)


@pytest.mark.parametrize(("outputs", "inputs"), [(130, 576), (40, 1000)])
def test_a_row_of_16_bit_weights_is_the_same_bits_in_any_batch_and_on_any_number_of_threads(
    variant: str, dtype: torch.dtype, outputs: int, inputs: int
):
    matrix, _ = random_matrix(outputs, inputs, dtype)
    x = torch.randn(300, inputs)
    together = product(cpu_ops(variant, 2), x, matrix)
    assert torch.equal(together, product(cpu_ops(variant, 1), x, matrix))
    for first, count in ((0, 1), (299, 1), (7, 2), (11, 5), (13, 15), (240, 24), (60, 25), (1, 250)):
        rows = slice(first, first + count)
        assert torch.equal(product(cpu_ops(variant, 2), x[rows].contiguous(), matrix), together[rows])


@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_stays_in_its_row_of_16_bit_products(ops: CpuOps, dtype: torch.dtype, bad: float, rows: int):
    matrix, _ = random_matrix(17, 64, dtype)
    x = torch.randn(rows, 64)
    clean = product(ops, x, matrix)
    x[1, 40] = bad
    out = product(ops, x, matrix)
    assert not out[1].isfinite().any()
    others = torch.arange(rows) != 1
    assert torch.equal(out[others], clean[others])


def test_the_smallest_and_largest_16_bit_weights(ops: CpuOps, dtype: torch.dtype):
    limits = torch.finfo(dtype)
    weights = torch.tensor([[limits.max, limits.min, limits.smallest_normal, limits.smallest_normal / 4]]).to(dtype)
    matrix = HalvesMatrix(1, 4, dtype)
    matrix.fill(0, weights)
    for row in torch.eye(4):
        expected = (row.double() @ weights.double().T).float()
        assert torch.equal(product(ops, row[None].repeat(3, 1), matrix), expected.expand(3, 1))
    assert product(ops, torch.empty(0, 4), matrix).shape == (0, 1)


def test_matrices_of_whole_tiles_are_joined(ops: CpuOps, dtype: torch.dtype):
    parts, weights = zip(*(random_matrix(outputs, 48, dtype) for outputs in (32, 16, 5)), strict=True)
    joined = HalvesMatrix.joined(parts)
    assert joined.shape == (53, 48)
    assert joined.nbytes == 64 * 48 * 2
    assert torch.equal(joined.rows(torch.arange(53)), torch.cat(weights))
    x = torch.randn(4, 48)
    assert torch.equal(product(ops, x, joined)[:, 32:48], product(ops, x, parts[1]))


def test_products_with_16_bit_weights_are_part_of_a_program(ops: CpuOps, dtype: torch.dtype):
    matrix, weights = random_matrix(48, 64, dtype)
    x, indices, multiply = torch.randn(3, 64), torch.tensor([1, 4, 40]), ops.halves_product(matrix)

    def record(sizes: tuple[int, ...]) -> torch.Tensor:
        rows = slice(sizes[0])
        out = ops.empty((sizes[0], 48), torch.float32)
        multiply(ops.add(ops.halves_rows(matrix, indices[rows]), x[rows]), out)
        return out

    program = ops.program(record, (3,))
    for size in (3, 1):
        x.normal_()
        indices.random_(0, 48)
        expected = (weights[indices] + x) @ weights.T
        torch.testing.assert_close(program.run((size,))[0], expected[:size], rtol=1e-5, atol=1e-4)
