"""What stands between logits and tokens on a device, against its twin in PyTorch, on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.ops import make_ops
from kernels.reference import ReferenceOps
from kernels.reference_step import StepTensors
from kernels.thresholds import Filters

if TYPE_CHECKING:
    from kernels.ops import Ops
    from tests.gpu.device_report import DeviceReport
    from tests.gpu.device_sizes import DeviceSizes

BLOCK_SIZE = 16
ROWS = 33
NUM_POSITIONS = 640
"""Of the table of tokens."""
MOST_DIFFERENT = 0.01
"""Share of draws: two of which a filter or the noise leaves equal but for rounding."""


def check_sampling(report: DeviceReport, sizes: DeviceSizes) -> None:
    ops, twin, device = make_ops(sizes.device, BLOCK_SIZE, 2), ReferenceOps(), sizes.device
    vocab_size = sizes.model["vocab_size"] + 3  # no multiple of anything
    logits = _logits(vocab_size, device)
    ours, truth = (each.argmax(logits) for each in (ops, twin))
    report.check("largest logits", torch.equal(ours, truth) and int(ours[3]) == int(ours[5]) == -1)
    for name, filters in _filters(device).items():
        drawn = [_draw(each, logits, filters) for each in (ops, twin)]
        report.near(f"draws that differ, {name}", float((drawn[0] != drawn[1]).float().mean()), MOST_DIFFERENT)
    edited = [_edit(each, logits.clone()) for each in (ops, twin)]
    report.check("grammar masks and penalties", torch.allclose(edited[0], edited[1], equal_nan=True))
    steps = [_step(each, device) for each in (ops, twin)]
    report.check("tensors of a step", all(torch.equal(*pair) for pair in zip(*steps, strict=True)))


def _logits(vocab_size: int, device: torch.device) -> torch.Tensor:
    """Row 3 has nothing to draw from, and row 5 something that is not a number."""
    logits = 3 * torch.randn(ROWS, vocab_size, device=device, generator=torch.Generator(device).manual_seed(1))
    logits[3], logits[5, 7] = -torch.inf, torch.nan
    return logits


def _filters(device: torch.device) -> dict[str, Filters | None]:
    """By name; row by row others."""
    rows = torch.arange(ROWS, device=device)
    nothing = torch.full((ROWS,), -torch.inf, dtype=torch.float64, device=device)
    top_p = 1 - rows.double() / (2 * ROWS)
    return {
        "no filter": None,
        "top-k": Filters(rows % 50, torch.ones_like(top_p), nothing),
        "top-p": Filters(torch.zeros_like(rows), top_p, nothing),
        "all filters": Filters(rows * 3, top_p, (0.02 + rows.double() / 500).log()),
    }


def _draw(ops: Ops, logits: torch.Tensor, filters: Filters | None) -> torch.Tensor:
    rows = torch.arange(ROWS, device=logits.device)
    temperature = 0.5 + rows.double() / ROWS
    return ops.draw(logits, rows, temperature, filters, rows * 0x9E3779B97F4A7C15 % (1 << 62))


def _table(device: torch.device, most: int) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(2)
    return torch.randint(most, (ROWS + 4, NUM_POSITIONS), device=device, generator=generator).int()


def _edit(ops: Ops, logits: torch.Tensor) -> torch.Tensor:
    device = logits.device
    rows = torch.arange(0, ROWS, 2, device=device)
    generator = torch.Generator(device).manual_seed(3)
    words = -(-logits.shape[1] // 32)
    bits = torch.randint(-(1 << 31), 1 << 31, (len(rows), words), device=device, generator=generator).int()
    ops.apply_grammar(logits, rows, bits)
    num_tokens = 40 + rows * 17
    numbers = rows.double() / ROWS
    ops.penalise(
        logits,
        rows,
        _table(device, min(300, logits.shape[1])),
        rows + 2,
        num_tokens // 2,
        num_tokens,
        int(num_tokens.max()),
        1 + numbers,
        numbers - 0.3,
        numbers / 2,
    )
    return logits


def _step(ops: Ops, device: torch.device) -> list[torch.Tensor]:
    """A mixed step of fewer rows and tokens than there is room for, after tokens were drawn; and the table then."""
    token_table = _table(device, 1000)
    blocks = torch.arange(token_table.shape[0] * NUM_POSITIONS // BLOCK_SIZE, device=device).int()
    block_table = blocks.view(token_table.shape[0], -1).contiguous()
    rows = torch.tensor([7, 2, 30, 11], dtype=torch.int32, device=device)
    positions = torch.tensor([100, 3, 50, 17], dtype=torch.int32, device=device)
    ops.store_tokens(token_table, rows, positions, torch.tensor([5, -1, 6, 9], dtype=torch.int32, device=device))
    counts = torch.tensor([1, 37, 1, 20], device=device)
    starts = torch.zeros(5, dtype=torch.int32, device=device)
    starts[1:] = counts.cumsum(0)
    room = StepTensors(
        *(torch.full((64,), -7, device=device) for _ in range(3)),
        torch.full((7,), -7, dtype=torch.int32, device=device),
        torch.full((6,), -7, dtype=torch.int32, device=device),
        torch.zeros(6, 10, dtype=torch.int32, device=device),
    )
    ops.step_tensors(token_table, block_table, rows, positions, starts, int(counts.sum()), BLOCK_SIZE, room)
    # What is behind a row's last key is nobody's.
    used = (-(-(positions + counts) // BLOCK_SIZE)).tolist()
    return [token_table, *room[:5], *(table[:size] for table, size in zip(room.block_tables[:4], used, strict=True))]
