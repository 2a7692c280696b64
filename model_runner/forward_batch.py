"""ForwardBatch: what one step computes, as tensors; every layer gets it as an argument."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    KVCaches = dict[int, tuple[torch.Tensor, torch.Tensor]]
    """Keys and values of each layer of the stage."""


@dataclass(slots=True)
class ForwardBatch:
    """T tokens of R rows, row after row; S of the rows draw a token, P tokens of prompts get log-probabilities."""

    input_ids: torch.Tensor
    """[T] int64."""
    positions: torch.Tensor
    """[T] int64, from 0 in each sequence."""
    slots: torch.Tensor
    """[T] int64: where in the KV cache each token goes, -1 for nowhere."""
    query_starts: torch.Tensor
    """[R + 1] int32: the first token of each row, and T."""
    seq_lens: torch.Tensor
    """[R] int32: keys of each row, this step's tokens included."""
    block_tables: torch.Tensor
    """[R, blocks] int32; entries beyond a row's keys are undefined."""
    output_tokens: torch.Tensor
    """[S + P] int64: the tokens whose hidden states are wanted. First those whose next one is drawn, then those
    that predict a prompt token whose log-probability is asked for."""
    kv_caches: KVCaches
    hidden: torch.Tensor | None = None
    """[T, hidden size] What the stage before has computed; None in the first, which begins with input_ids."""
