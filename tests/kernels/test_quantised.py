"""Linear layers on quantised weights: packing, every layout, and what must hold whatever the batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from kernels.quantised import QuantisedFormat, QuantisedMatrix
from kernels.reference import ReferenceOps
from tests.kernels.conftest import cpu_ops

if TYPE_CHECKING:
    from kernels.cpu import CpuOps

HALF, FULL = torch.float16, torch.float32
FORMATS = {
    "Q4_0": (QuantisedFormat(4, 32, True, HALF), torch.int8, -8, 8),
    "Q4_1": (QuantisedFormat(4, 32, True, HALF), torch.uint8, 0, 16),
    "Q4_K": (QuantisedFormat(4, 32, True, FULL), torch.uint8, 0, 16),
    "Q5_1": (QuantisedFormat(8, 32, True, HALF), torch.uint8, 0, 32),
    "Q5_K": (QuantisedFormat(8, 32, True, FULL), torch.uint8, 0, 32),
    "Q6_K": (QuantisedFormat(8, 16, False, FULL), torch.int8, -32, 32),
    "Q8_0": (QuantisedFormat(8, 32, False, HALF), torch.int8, -127, 128),
    "Q8_0, wide": (QuantisedFormat(8, 32, False, FULL), torch.int8, -127, 128),
}
SHAPES = [(1, 32), (15, 64), (16, 96), (17, 32), (50, 160), (130, 576)]


@pytest.fixture(params=list(FORMATS))
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def random_matrix(kind: str, outputs: int, inputs: int) -> tuple[QuantisedMatrix, torch.Tensor]:
    """A matrix filled in two parts, and its weights [outputs, inputs], float32."""
    form, dtype, low, high = FORMATS[kind]
    torch.manual_seed(outputs * inputs)
    values = torch.randint(low, high, (outputs, inputs)).to(dtype)
    scales = (torch.rand(outputs, inputs // form.group) / 16).to(form.scale_type).float()
    minimums = torch.randn(scales.shape).to(form.scale_type).float() if dtype == torch.uint8 else None
    matrix = QuantisedMatrix(outputs, inputs, form)
    for rows in (slice(0, 16), slice(16, outputs)):
        if len(values[rows]):
            matrix.fill(rows.start, values[rows], scales[rows], None if minimums is None else minimums[rows])
    grouped = values.float().view(outputs, -1, form.group) * scales[:, :, None]
    if minimums is not None:
        grouped += minimums[:, :, None]
    return matrix, grouped.view(outputs, inputs)


def product(ops: ReferenceOps, x: torch.Tensor, matrix: QuantisedMatrix, bits: int = 16) -> torch.Tensor:
    """Into the middle of a wider tensor, whose rest must stay as it is."""
    outputs = matrix.shape[0]
    out = torch.full((len(x), outputs + 5), torch.nan)
    ops.quantised_product(matrix, bits)(x, out[:, 3 : 3 + outputs])
    assert out[:, :3].isnan().all()
    assert out[:, 3 + outputs :].isnan().all()
    return out[:, 3 : 3 + outputs]


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_the_weights_come_back_as_they_were(ops: CpuOps, kind: str, outputs: int, inputs: int):
    matrix, exact = random_matrix(kind, outputs, inputs)
    assert torch.equal(torch.cat(list(matrix.chunks(7))), exact)
    indices = torch.tensor([outputs - 1, 0, outputs - 1, outputs // 2])
    assert torch.equal(matrix.rows(indices), exact[indices])
    torch.testing.assert_close(ops.quantised_rows(matrix, indices), exact[indices], rtol=0, atol=2e-6)
    assert matrix.rows(torch.empty(0, dtype=torch.int64)).shape == (0, inputs)


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_products_are_those_of_the_weights(ops: CpuOps, kind: str, outputs: int, inputs: int):
    matrix, weights = random_matrix(kind, outputs, inputs)
    for rows in (1, 2, 3, 5, 7, 12, 31, 65):
        x = torch.randn(rows, inputs)
        exact = x.double() @ weights.double().T
        for each, bits, bound in ((ops, 16, 1e-4), (ops, 8, 4e-2), (ReferenceOps(), 16, 1e-4)):
            error = (product(each, x, matrix, bits).double() - exact).abs().max()
            assert error < bound * x.norm(dim=1).max() * weights.norm(dim=1).max() / inputs**0.5


@pytest.mark.parametrize("bits", [8, 16])
def test_a_row_is_the_same_bits_in_any_batch_and_on_any_number_of_threads(variant: str, kind: str, bits: int):
    matrix, _ = random_matrix(kind, 130, 576)
    x = torch.randn(300, 576)
    together = product(cpu_ops(variant, 2), x, matrix, bits)
    for threads in (1, 3, 5):
        assert torch.equal(together, product(cpu_ops(variant, threads), x, matrix, bits))
    for rows in (slice(0, 1), slice(7, 9), slice(11, 16), slice(13, 28), slice(293, 300)):
        assert torch.equal(product(cpu_ops(variant, 2), x[rows].contiguous(), matrix, bits), together[rows])


def hostile_rows(count: int, inputs: int) -> torch.Tensor:
    """Numbers of every size, zeros, the smallest and what is no number."""
    x = torch.randn(count, inputs) * 10 ** (60 * torch.rand(count, inputs // 16) - 30).repeat_interleave(16, dim=1)
    x[3, 40], x[20, 7], x[45, inputs - 1] = torch.nan, torch.inf, -torch.inf
    x[33], x[34], x[35, :64] = 0, 1e-44, 0
    x[36], x[37, 0], x[38] = 127 / 64, 2 - 2**-23, -(2 - 2**-23)
    return x


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize(("outputs", "inputs"), [(17, 64), (69, 160), (96, 576)])
def test_tiles_give_the_bits_that_vectors_give(kind: str, bits: int, outputs: int, inputs: int):
    tiles, vectors = cpu_ops("amx"), cpu_ops("avx512")
    matrix, _ = random_matrix(kind, outputs, inputs)
    x = hostile_rows(70, inputs)
    expected = product(vectors, x, matrix, bits)
    assert expected.isnan().any(dim=1).nonzero().flatten().tolist() == [3, 20, 45]
    for rows in range(1, 71):
        assert torch.equal(product(tiles, x[:rows], matrix, bits).view(torch.int32), expected[:rows].view(torch.int32))
        assert torch.equal(
            product(tiles, x[70 - rows :], matrix, bits).view(torch.int32), expected[70 - rows :].view(torch.int32)
        )


@pytest.mark.parametrize("bits", [8, 16])
def test_the_largest_integers_do_not_overflow(ops: CpuOps, kind: str, bits: int):
    form, dtype, low, high = FORMATS[kind]
    values = torch.full((32, 64), high - 1, dtype=dtype)
    values[16:] = low
    minimums = torch.zeros(32, 64 // form.group) if dtype == torch.uint8 else None
    matrix = QuantisedMatrix(32, 64, form)
    matrix.fill(0, values, torch.ones(32, 64 // form.group), minimums)
    for x in (torch.ones(5, 64), -torch.ones(5, 64), torch.ones(33, 64), -torch.ones(33, 64)):
        expected = x.double() @ values.double().T
        torch.testing.assert_close(product(ops, x, matrix, bits).double(), expected, rtol=1e-6, atol=1e-3)


def test_more_rows_than_the_cache_takes_at_a_time(ops: CpuOps):
    matrix, weights = random_matrix("Q4_1", 20, 16384)
    x = torch.randn(23, 16384)
    torch.testing.assert_close(product(ops, x, matrix).double(), x.double() @ weights.double().T, atol=2e-2, rtol=1e-4)


def test_a_large_activation_costs_precision_in_its_own_group_only(ops: CpuOps):
    x, values = torch.randn(1, 96), torch.zeros(16, 96, dtype=torch.int8)
    x[0, 0] = 1e6
    values[:, 32:] = 1
    matrix = QuantisedMatrix(16, 96, FORMATS["Q8_0"][0])
    matrix.fill(0, values, torch.ones(16, 3), None)
    torch.testing.assert_close(product(ops, x, matrix)[0, 0].double(), x[0, 32:].double().sum(), atol=1e-2, rtol=0)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_is_not_hidden_and_stays_in_its_row(ops: CpuOps, kind: str, bad: float):
    matrix, _ = random_matrix(kind, 17, 64)
    x = torch.randn(3, 64)
    clean = product(ops, x, matrix)
    x[1, 40] = bad
    out = product(ops, x, matrix)
    assert out[1].isnan().all()
    assert torch.equal(out[[0, 2]], clean[[0, 2]])


def test_zeros_and_the_smallest_numbers(ops: CpuOps, kind: str):
    matrix, _ = random_matrix(kind, 17, 64)
    assert (product(ops, torch.zeros(2, 64), matrix) == 0).all()
    tiny = torch.full((1, 64), 1e-44)
    assert product(ops, tiny, matrix).isfinite().all()
    assert product(ops, torch.empty(0, 64), matrix).shape == (0, 17)


def test_inputs_must_be_whole_groups():
    with pytest.raises(ValueError, match="48 inputs are not whole groups of 32"):
        QuantisedMatrix(16, 48, FORMATS["Q4_0"][0])
