"""Triton's edits of logits against their twins."""

from __future__ import annotations

import pytest
import torch

from kernels.reference import ReferenceOps
from tests.kernels.interpreted import assert_equals_twin, cuda_ops, poisoned_outputs

OPS, TWIN = cuda_ops(), ReferenceOps()


@pytest.mark.parametrize("vocab_size", [31, 32, 33, 1000, 2051])
def test_masks_rule_out_what_they_do_not_allow_and_nothing_else(vocab_size: int):
    torch.manual_seed(vocab_size)
    logits, rows = torch.randn(5, vocab_size), torch.tensor([4, 0, 2])
    bits = torch.randint(-(2**31), 2**31, (3, -(-vocab_size // 32)), dtype=torch.int32)
    bits[1] = -1
    expected = logits.clone()
    OPS.apply_grammar(logits, rows, bits)
    TWIN.apply_grammar(expected, rows, bits)
    assert_equals_twin(logits, expected)
    assert (logits[[1, 3, 0]] > -torch.inf).all()


def test_a_mask_hides_no_nan():
    logits = torch.randn(1, 64)
    logits[0, 3] = torch.nan
    OPS.apply_grammar(logits, torch.tensor([0]), torch.zeros(1, 2, dtype=torch.int32))
    assert logits.isnan().nonzero().tolist() == [[0, 3]]
    assert (logits == -torch.inf).sum() == 63


PENALTIES = [(1.3, 0.0, 0.0), (1.0, 0.5, 0.0), (1.0, 0.0, -0.7), (0.4, -1.5, 2.0), (1.0, 0.0, 0.0)]
"""Repetition, frequency, presence."""


@pytest.mark.parametrize("longest", [1, 60, 1500])
def test_55_penalties_are_those_of_the_twin(longest: int):
    torch.manual_seed(longest)
    vocab_size, num_rows = 1003, len(PENALTIES)
    logits = (torch.randn(8, vocab_size) * 4).round() / 4
    logits[:, 3] = -torch.inf
    logits[7] = torch.nan
    rows, table_rows = torch.tensor([5, 0, 3, 1, 6]), torch.tensor([2, 8, 0, 5, 3])
    # Tokens that often repeat; beyond a row's own there is what is no token.
    table = torch.full((9, longest + 20), -(2**31), dtype=torch.int32)
    table[:, :longest] = torch.randint(0, vocab_size, (9, longest)) % torch.randint(1, vocab_size, (9, longest))
    num_tokens = torch.randint(1, longest + 1, (num_rows,))
    num_tokens[0] = longest
    num_prompt_tokens = torch.minimum(torch.randint(0, longest + 1, (num_rows,)), num_tokens)
    for row, count in zip(table_rows.tolist(), num_tokens.tolist(), strict=True):
        table[row, count:] = -(2**31)
    penalties = torch.tensor(PENALTIES, dtype=torch.float64).T.contiguous().unbind()
    columns = table_rows, num_prompt_tokens, num_tokens, longest, *penalties
    expected = logits.clone()
    with poisoned_outputs():
        OPS.penalise(logits, rows, table, *columns)
    TWIN.penalise(expected, rows, table, *columns)
    assert_equals_twin(logits[:7], expected[:7], 1e-6)
    assert logits[[2, 4]].equal(expected[[2, 4]])
    assert logits[7].isnan().all()
    assert longest == 1 or (logits[0] != expected[5]).any()
