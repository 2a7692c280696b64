"""Program: recorded calls of CPU kernels give the bits of calls one by one, for work of any size."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import pytest
import torch

from kernels.capture import NotCapturableError
from kernels.cpu import LARGE
from kernels.cpu_library import Call, Pace
from kernels.pool import ARENA_BYTES, Pool
from tests.kernels.conftest import cpu_ops
from tests.kernels.test_quantised import random_matrix

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernels.cpu import CpuOps
    from kernels.cpu_program import Sizes


MOST = (40, 30)


class Layers:
    """Some layers over buffers that stay: products, norms, sums in place; then rows of what they made."""

    def __init__(self, ops: CpuOps) -> None:
        torch.manual_seed(0)
        self.ops = ops
        self.ids, self.wanted = torch.randint(0, 50, (MOST[0],)), torch.zeros(MOST[1], dtype=torch.int64)
        self.table, _ = random_matrix("Q8_0", 50, 64)
        self.up, self.down = (
            ops.quantised_product(random_matrix("Q4_1", *shape)[0]) for shape in ((192, 64), (64, 96))
        )
        self.weight = torch.rand(64)

    def __call__(self, sizes: Sizes) -> torch.Tensor:
        rows, wanted = sizes
        ops = self.ops
        residual = ops.quantised_rows(self.table, self.ids[:rows])
        x = None
        for _ in range(5):
            normed = ops.rms_norm(residual if x is None else x, self.weight, 1e-5, None if x is None else residual)
            up = normed.new_empty((len(normed), 192))
            self.up(normed, up)
            gated = ops.silu_mul(up)
            x = torch.empty_like(residual)
            self.down(gated, x)
        return ops.rows(ops.add(ops.scale(x, 0.5), residual), self.wanted[:wanted])


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_a_program_computes_the_same_bits_for_any_sizes_from_what_is_in_its_buffers(variant: str, num_threads: int):
    ops = cpu_ops(variant, num_threads)
    layers, alone = Layers(ops), Layers(cpu_ops(variant, 1))
    program = ops.program(layers, MOST, then=ops.argmax)
    for sizes in [(1, 1), (3, 0), (40, 30), (40, 1), (2, 2), (17, 5), (17, 5), (33, 30), (1, 1)]:
        layers.ids.random_(0, 50)
        layers.wanted.random_(0, sizes[0])
        alone.ids.copy_(layers.ids)
        alone.wanted.copy_(layers.wanted)
        for wants_other in (False, True):
            program._result.fill_(torch.nan)
            result, other = program.run(sizes, wants_other)
            assert len(result) == sizes[1]
            assert torch.equal(result, alone(sizes)), sizes
            if wants_other:
                assert torch.equal(other, result.argmax(1).int()), sizes
            else:
                assert other is None


def test_nothing_is_computed_while_it_is_recorded(ops: CpuOps):
    x, weight = torch.randn(8, 64), torch.ones(64)
    before = x.clone()
    program = ops.program(lambda sizes: ops.scale(x[: sizes[0]], 3.0), (8,))
    assert torch.equal(x, before)
    program.run((5,))
    assert torch.equal(x, torch.cat([before[:5] * 3.0, before[5:]]))
    assert not torch.equal(ops.rms_norm(x, weight, 1e-5), x)


def test_work_that_does_not_grow_evenly_is_refused(ops: CpuOps):
    x, others, weight = torch.randn(8, 64), torch.randn(8, 64), torch.ones(64)

    def refused(record: Callable[[int], torch.Tensor], message: str) -> None:
        with pytest.raises(NotCapturableError, match=message):
            ops.program(lambda sizes: record(sizes[0]), (8,))

    refused(lambda n: ops.rms_norm((x if n < 4 else others)[:n], weight, 1e-5), "with other tensors")
    refused(lambda n: ops.rms_norm((x if n == 2 else others)[:n], weight, 1e-5), "with other tensors")
    refused(lambda n: ops.rms_norm(x[: min(n, 4)], weight, 1e-5), "do not grow evenly")
    refused(lambda n: ops.scale(x[:n], float(n)), "with other tensors")
    refused(
        lambda n: ops.rms_norm(ops.rms_norm(x[:n], weight, 1e-5), weight, 1e-5) if n > 4 else x[:n], "other kernels"
    )
    refused(lambda n: ops.rms_norm(x[: 11 - n], weight, 1e-5), "more memory")


def test_memory_comes_back_when_the_last_view_is_gone():
    pool = Pool()
    shape = torch.Size((100, 30))
    first, second = pool.empty(shape, torch.float32), pool.empty(shape, torch.bfloat16)
    assert first.shape == second.shape == shape
    assert not first.data_ptr() % 64
    assert not second.data_ptr() % 64
    first.fill_(1.0)
    second.fill_(2.0)
    assert (first == 1.0).all()
    place, view = first.data_ptr(), first[3:, :2]
    del first
    others = [pool.empty(shape, torch.float32) for _ in range(3)]
    assert place not in [other.data_ptr() for other in others]
    assert (view == 1.0).all()
    del view
    assert pool.empty(shape, torch.float32).data_ptr() == place
    assert pool.empty(torch.Size((ARENA_BYTES, 2)), torch.uint8).shape == (ARENA_BYTES, 2)
    assert pool.empty(torch.Size((0, 4)), torch.float32).shape == (0, 4)


REFUSED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "aten.add.Tensor": lambda x: x + 1,
    "aten.mul_.Tensor": lambda x: x.mul_(2),
    "aten.mm": lambda x: torch.mm(x, x),
    "aten.zeros": lambda x: torch.zeros(3),
    "aten.reshape": lambda x: x.T.reshape(-1),
    "aten.contiguous": lambda x: x.T.contiguous(),
    "aten._to_copy": lambda x: x.double(),
    "aten.index": lambda x: x[torch.tensor([1])],
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_is_computed_outside_of_the_kernels_is_refused_in_one_line(ops: CpuOps, name: str):
    x = torch.randn(4, 4)
    with (
        pytest.raises(NotCapturableError, match=r"^aten\.\S+ computes outside of the kernels$"),
        torch.inference_mode(),
    ):
        ops.program(lambda sizes: REFUSED[name](x), (4,))
    layers = Layers(ops)
    assert torch.equal(ops.program(layers, MOST).run((2, 1))[0], layers((2, 1)))


def test_other_ways_to_look_at_a_tensor_are_not_refused(ops: CpuOps):
    x, index, weight = torch.randn(6, 32), torch.tensor([4, 0, 5]), torch.rand(16)

    def record(sizes: Sizes) -> torch.Tensor:
        heads = ops.rows(x, index[: sizes[0]]).view(-1, 2, 16)
        ops.norm_heads(heads[:, 1:], weight, 1e-5)
        return heads.flatten(1)[: sizes[0]].float()

    with torch.inference_mode():
        program = ops.program(record, (3,))
        assert torch.equal(program.run((2,))[0], record((2,)))
        x.mul_(3.0)
        assert torch.equal(program.run((3,))[0], record((3,)))


def test_sizes_that_grow_little_by_little_find_room_in_few_arenas():
    pool = Pool()
    for size in range(ARENA_BYTES // 2, 4 * ARENA_BYTES, ARENA_BYTES // 64):
        pool.empty((size,), torch.uint8)
    assert len(pool._arenas) <= 4


def test_large_results_find_the_memory_of_those_before(ops: CpuOps):
    x, weight = torch.randn(LARGE // 256, 64), torch.ones(64)
    first = ops.rms_norm(x, weight, 1e-5)
    place, second = first.data_ptr(), ops.rms_norm(x, weight, 1e-5)
    assert second.data_ptr() != place
    assert torch.equal(first, second)
    del first
    assert ops.rms_norm(x, weight, 1e-5).data_ptr() == place


def test_a_list_whose_pace_says_so_runs_on_one_thread_and_learns_how_long_that_takes(variant: str):
    ops = cpu_ops(variant, 2)
    x, weight = torch.randn(4, 64), torch.ones(64)
    expected = ops.rms_norm(x, weight, 1e-5)
    ops.calls.recording = recording = []
    out = ops.rms_norm(x, weight, 1e-5)
    ops.calls.recording = None
    kernel, arguments = recording[0]
    calls = (Call * 1)(Call(kernel, ctypes.addressof(arguments)))
    for alone_until in (0.0, 1e18):
        pace = Pace(0.0, alone_until)
        out.zero_()
        ops.calls.library.run_list(calls, 1, 2, pace)
        assert torch.equal(out, expected)
        # On two, it is known to take no more than twice that, unless one of them was kept from its core.
        assert pace.alone > 0 or pace.alone_until != alone_until
        known = pace.alone
        ops.calls.library.run_list(calls, 1, 2, pace)
        assert alone_until or not known or pace.alone == known
