"""The persistent batch: diffs applied, on the host and on a device with memory of its own; each step's tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kernels.reference import ReferenceOps
from model_runner.device import DevicePolicy
from model_runner.forward_batch import ForwardBatch, ForwardBuffers
from model_runner.input_batch import InputBatch
from protos.messages import Sampling
from protos.step import NewRow, SchedulerOutput
from tests.model_runner.apart import PolicyApart

POLICY = DevicePolicy(torch.device("cpu"), torch.float32, ReferenceOps(), 1, None, 1)
APART = PolicyApart(torch.device("cpu"), torch.float32, ReferenceOps(), 1, None, 1, shares_memory=False)
pytestmark = pytest.mark.parametrize("policy", [POLICY, APART], ids=["shared", "apart"])


def ints(*numbers: int) -> Any:
    return np.array(numbers, np.int32)


def forward_batch(batch: InputBatch, step: SchedulerOutput) -> ForwardBatch:
    return ForwardBuffers(64, 6, batch, batch._policy).fill(step, {})


def make_batch(policy: DevicePolicy) -> InputBatch:
    """Row 1: 40 tokens 100.. in blocks 7, 3, 9. Row 4: 5 tokens 200.. in block 2."""
    batch = InputBatch(6, 100, 16, (1,), policy)
    new_rows = [
        NewRow(1, np.arange(100, 140, dtype=np.int32), 40, [7, 3, 9], Sampling(stop_token_ids=(5,))),
        NewRow(4, np.arange(200, 205, dtype=np.int32), 3, [2], Sampling(ignore_eos=True, seed=(1 << 64) - 1)),
    ]
    batch.apply(SchedulerOutput(1, ints(1, 4), ints(0, 0), ints(40, 5), np.array([True, True]), new_rows))
    return batch


def step(rows: Any, starts: Any, counts: Any, samples: list[bool], **changes: Any) -> SchedulerOutput:
    return SchedulerOutput(2, rows, starts, counts, np.array(samples), **changes)


def test_a_mixed_step(policy: DevicePolicy):
    forward = forward_batch(make_batch(policy), step(ints(4, 1), ints(4, 14), ints(1, 20), [True, False]))
    assert forward.input_ids.tolist() == [204, *range(114, 134)]
    assert forward.positions.tolist() == [4, *range(14, 34)]
    assert forward.slots.tolist() == [2 * 16 + 4, 126, 127, *range(48, 64), 144, 145]
    assert forward.query_starts.tolist() == [0, 1, 21]
    assert forward.seq_lens.tolist() == [5, 34]
    assert forward.block_tables[:, 0].tolist() == [2, 7]
    assert forward.block_tables[1].tolist() == [7, 3, 9]
    assert forward.output_tokens.tolist() == [0]


def test_a_step_of_single_tokens(policy: DevicePolicy):
    forward = forward_batch(make_batch(policy), step(ints(1, 4), ints(39, 0), ints(1, 1), [True, True]))
    assert forward.input_ids.tolist() == [139, 200]
    assert forward.slots.tolist() == [9 * 16 + 7, 32]
    assert forward.query_starts.tolist() == [0, 1, 2]
    assert forward.output_tokens.tolist() == [0, 1]
    for tensor in (forward.input_ids, forward.positions, forward.slots, forward.output_tokens):
        assert tensor.dtype == torch.int64
    for tensor in (forward.query_starts, forward.seq_lens, forward.block_tables):
        assert tensor.dtype == torch.int32


def test_blocks_are_appended_in_order_for_rows_that_get_several(policy: DevicePolicy):
    batch = make_batch(policy)
    batch.apply(step(ints(), ints(), ints(), [], block_rows=ints(4, 1, 4, 1, 4), block_ids=ints(11, 12, 13, 14, 15)))
    batch.apply(step(ints(), ints(), ints(), [], block_rows=ints(4), block_ids=ints(16)))
    for table in (batch.block_tables, batch.block_table):
        assert table[4, :5].tolist() == [2, 11, 13, 15, 16]
        assert table[1, :5].tolist() == [7, 3, 9, 12, 14]
    assert batch.num_blocks.tolist() == [0, 5, 0, 0, 5, 0]


def test_another_request_in_the_row_replaces_all_of_it(policy: DevicePolicy):
    batch = make_batch(policy)
    batch.apply(step(ints(), ints(), ints(), [], new_rows=[NewRow(1, ints(9, 8), 2, [5], Sampling(temperature=1.0))]))
    forward = forward_batch(batch, step(ints(1), ints(0), ints(2), [True]))
    assert forward.input_ids.tolist() == [9, 8]
    assert forward.slots.tolist() == [80, 81]
    assert batch.end_token_ids[1] == [1]
    assert batch.temperature[1] == 1.0
    batch.apply(step(ints(), ints(), ints(), [], block_rows=ints(1), block_ids=ints(6)))
    assert batch.block_tables[1, :2].tolist() == [5, 6]


def test_drawn_tokens_are_what_the_next_step_computes(policy: DevicePolicy):
    batch = make_batch(policy)
    batch.record(ints(4, 1), ints(5, 40), torch.tensor([77, -1], dtype=torch.int32))
    forward = forward_batch(batch, step(ints(1, 4), ints(40, 5), ints(1, 1), [True, True]))
    assert forward.input_ids.tolist() == [0, 77]


def test_tokens_that_another_stage_drew_come_with_the_step(policy: DevicePolicy):
    batch = make_batch(policy)
    later = step(ints(1, 4), ints(20, 5), ints(20, 1), [True, True], last_ids=ints(139, 88))
    batch.apply(later)
    assert forward_batch(batch, later).input_ids.tolist() == [*range(120, 140), 88]


def test_a_step_keeps_its_tensors_when_the_batch_changes(policy: DevicePolicy):
    batch = make_batch(policy)
    forward = forward_batch(batch, step(ints(1, 4), ints(39, 4), ints(1, 1), [True, True]))
    before = forward.block_tables.tolist(), forward.input_ids.tolist()
    batch.apply(step(ints(), ints(), ints(), [], new_rows=[NewRow(1, ints(9), 1, [5], Sampling())]))
    assert (forward.block_tables.tolist(), forward.input_ids.tolist()) == before


def test_a_padded_step_has_the_blocks_of_its_longest_row_when_rows_grow(policy: DevicePolicy):
    batch = make_batch(policy)
    buffers = ForwardBuffers(64, 6, batch, policy)
    recorded = buffers.padding(2, {})
    for start, width in ((4, 1), (39, 3), (14, 1), (39, 3)):
        rows = ints(4, 1) if start == 4 else ints(1)
        starts, counts = (ints(4, 4), ints(1, 1)) if start == 4 else (ints(start), ints(1))
        buffers.fill_padded(step(rows, starts, counts, [True] * len(rows)), 2)
        assert recorded.block_tables[len(rows) - 1, :width].tolist() == [7, 3, 9][:width]


def test_every_step_lies_in_the_same_memory(policy: DevicePolicy):
    batch = make_batch(policy)
    buffers = ForwardBuffers(64, 6, batch, policy)
    first = buffers.fill(step(ints(4, 1), ints(4, 14), ints(1, 20), [True, False]), {})
    second = buffers.fill(step(ints(1), ints(39), ints(1), [True]), {})
    for name in ("input_ids", "positions", "slots", "query_starts", "seq_lens", "block_tables"):
        assert getattr(first, name).data_ptr() == getattr(second, name).data_ptr(), name


def test_sampling_columns(policy: DevicePolicy):
    batch = make_batch(policy)
    assert batch.end_token_ids[1] == [1, 5]
    assert batch.end_token_ids[4] == []
    assert batch.end_token_ids[0] == []
    assert int(batch.seed[4]) == (1 << 64) - 1
    assert batch.num_prompt_tokens[[1, 4]].tolist() == [40, 3]


def test_the_last_drawn_token_of_a_full_sequence_has_a_place(policy: DevicePolicy):
    batch = make_batch(policy)
    batch.record(ints(1), ints(100), torch.tensor([3], dtype=torch.int32))
    assert batch.token_table[1, 100] == 3
    assert batch.token_ids[1, 100] == (3 if policy is POLICY else 0)
