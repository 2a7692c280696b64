"""Programs: recorded calls of CPU kernels give the same bits again, from whatever is then in the buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from kernels.capture import NotCapturableError
from kernels.cpu import LARGE
from kernels.cpu_library import Call, Pace
from kernels.cpu_program import Programs
from kernels.pool import ARENA_BYTES, Pool
from tests.kernels.conftest import cpu_ops
from tests.kernels.test_quantised import random_matrix

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernels.cpu import CpuOps


class Layers:
    """Some layers over buffers that stay: products, norms, sums in place, rows of a table."""

    def __init__(self, ops: CpuOps, rows: int) -> None:
        torch.manual_seed(0)
        self.ops = ops
        self.ids = torch.randint(0, 50, (rows,))
        self.table, _ = random_matrix("Q8_0", 50, 64)
        self.up, self.down = (
            ops.quantised_product(random_matrix("Q4_1", *shape)[0]) for shape in ((192, 64), (64, 96))
        )
        self.weight = torch.rand(64)

    def __call__(self) -> torch.Tensor:
        ops = self.ops
        residual = ops.quantised_rows(self.table, self.ids)
        x = None
        for _ in range(5):
            normed = ops.rms_norm(residual if x is None else x, self.weight, 1e-5, None if x is None else residual)
            up = normed.new_empty((len(normed), 192))
            self.up(normed, up)
            gated = ops.silu_mul(up)
            x = torch.empty_like(residual)
            self.down(gated, x)
        return ops.add(ops.scale(x, 0.5), residual)


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_a_program_computes_the_same_bits_from_what_is_in_its_buffers(variant: str, rows: int, num_threads: int):
    ops = cpu_ops(variant, num_threads)
    layers, alone = Layers(ops, rows), Layers(cpu_ops(variant, 1), rows)
    expected = layers()
    result, replay = Programs(ops.calls).capture(layers)
    assert torch.equal(result, expected)
    for _ in range(20):
        layers.ids.random_(0, 50)
        alone.ids.copy_(layers.ids)
        result.fill_(torch.nan)
        replay()
        assert torch.equal(result, alone())


def test_programs_share_memory_and_each_runs_whenever_it_is_wanted(ops: CpuOps):
    programs = Programs(ops.calls)
    made = []
    for rows in (9, 2, 5):
        layers = Layers(ops, rows)
        expected = layers()
        result, replay = programs.capture(layers)
        made.append((expected, result, replay))
    again = programs.capture(layers)
    assert again[0].data_ptr() == made[-1][1].data_ptr()
    for expected, result, replay in [*made, *reversed(made)]:
        replay()
        assert torch.equal(result, expected)


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
    # What is told to be free again is not freed a second time by tensors of before.
    old = pool.empty(shape, torch.float32)
    pool.reset()
    new = pool.empty(shape, torch.float32)
    assert new.data_ptr() == old.data_ptr()
    del old
    assert pool.empty(shape, torch.float32).data_ptr() != new.data_ptr()


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
    x, programs = torch.randn(4, 4), Programs(ops.calls)
    with (
        pytest.raises(NotCapturableError, match=r"^aten\.\S+ computes outside of the kernels$"),
        torch.inference_mode(),
    ):
        programs.capture(lambda: REFUSED[name](x))
    layers = Layers(ops, 2)
    expected = layers()
    assert torch.equal(programs.capture(layers)[0], expected)


def test_other_ways_to_look_at_a_tensor_are_not_refused(ops: CpuOps):
    x, index, weight = torch.randn(6, 32), torch.tensor([4, 0]), torch.rand(16)

    def run() -> torch.Tensor:
        heads = ops.rows(x, index).view(2, 2, 16)
        ops.norm_heads(heads[:, 1:], weight, 1e-5)
        return heads.flatten(1)[:1].float()

    with torch.inference_mode():
        expected = run()
        result, replay = Programs(ops.calls).capture(run)
        assert torch.equal(result, expected)
        x.mul_(3.0)
        replay()
        assert torch.equal(result, run())


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
    ops.calls.recording = recording = []
    out = ops.rms_norm(x, weight, 1e-5)
    ops.calls.recording = None
    expected, calls = out.clone(), (Call * 1)(recording[0])
    for alone_until in (0.0, 1e18):
        pace = Pace(0.0, alone_until)
        out.zero_()
        ops.calls.library.run_list(calls, 2, pace)
        assert torch.equal(out, expected)
        assert (pace.alone > 0) == (alone_until > 0)
