"""Log-probabilities in columns: of chosen tokens, their ranks, the likeliest tokens and ids asked for.

They come of a float32 log_softmax. Rows ask for different numbers of candidates: all are computed as
wide as the widest, and each row's own are cut out on the host, once they are there.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from protos.step import Logprobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from model_runner.device import DevicePolicy

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Log-probabilities of n tokens on the device, as wide as the widest row."""

    index: npt.NDArray[np.integer]
    widths: Int32s
    """Candidates of each row."""
    kept: npt.NDArray[np.bool_]
    """[n, width] Which candidates are the row's own."""
    ids: torch.Tensor
    """[n, 1 + width] int64: the token, then candidates."""
    logprobs: torch.Tensor
    """[n, 1 + width] float32, parallel to ids."""
    ranks: torch.Tensor
    """[n] float32: how many tokens are likelier than the row's."""

    def columns(
        self,
        is_token: npt.NDArray[np.bool_] | None,
        ids: npt.NDArray[np.int64],
        logprobs: npt.NDArray[np.float32],
        ranks: npt.NDArray[np.float32],
    ) -> Logprobs:
        """Those of the tensors as arrays, of rows with a token."""
        index, widths, kept = self.index, self.widths, self.kept
        if is_token is not None and not is_token[index].all():
            rows = is_token[index]
            index, widths, kept = index[rows], widths[rows], kept[rows]
            ids, logprobs, ranks = ids[rows], logprobs[rows], ranks[rows]
        return Logprobs(
            index=index.astype(np.int32),
            logprobs=logprobs[:, 0].copy(),
            ranks=ranks.astype(np.int32) + 1,
            widths=widths,
            top_ids=ids[:, 1:][kept].astype(np.int32),
            top_logprobs=logprobs[:, 1:][kept],
        )


class PendingLogprobs:
    """Of one step's tokens, on their way to the host."""

    def __init__(self, parts: Sequence[LogprobRows], policy: DevicePolicy) -> None:
        self._parts = parts
        self._copy = policy.to_host(*(tensor for part in parts for tensor in (part.ids, part.logprobs, part.ranks)))

    def result(self, is_token: npt.NDArray[np.bool_] | None = None) -> Logprobs:
        """Waits for them. Rows at whose index `is_token` is false are left out."""
        arrays = iter(self._copy.wait())
        return join([part.columns(is_token, *islice(arrays, 3)) for part in self._parts])


def token_logprobs(
    logits: torch.Tensor,
    index: npt.NDArray[np.integer],
    token_ids: torch.Tensor,
    num_top: Int32s,
    extra_ids: Sequence[Int64s],
    policy: DevicePolicy,
    scratch: torch.Tensor,
) -> LogprobRows:
    """Of tokens [n] by logits [n, vocabulary] float32: the `num_top` likeliest of each row, then its `extra_ids`.

    A token of -1 is none, and its row undefined. `scratch` [at least n, vocabulary] float32 is overwritten: chunk after
    chunk can use the same memory.
    """
    scratch = scratch[: len(logits)]
    num_top = np.minimum(num_top, logits.shape[1])
    num_extra = np.array([len(ids) for ids in extra_ids], np.int32)
    chosen = token_ids.long().clamp_(min=0)[:, None]
    # Compared into float32, which adds up four times as fast as bools do and counts any vocabulary exactly.
    ranks = torch.gt(logits, logits.gather(1, chosen), out=scratch).sum(-1)
    top_ids = logits.topk(int(num_top.max()), -1).indices
    extra = np.zeros((len(extra_ids), int(num_extra.max())), np.int64)
    given = np.arange(extra.shape[1]) < num_extra[:, None]
    extra[given] = np.concatenate(extra_ids)
    ids = torch.cat([chosen, top_ids, policy.tensor(extra)], 1)
    logprobs = torch.log_softmax(logits, -1, out=scratch).gather(1, ids)
    kept = np.concatenate([np.arange(top_ids.shape[1]) < num_top[:, None], given], 1)
    return LogprobRows(index, num_top + num_extra, kept, ids, logprobs, ranks)


def chunk_scratch(logits: torch.Tensor, policy: DevicePolicy) -> torch.Tensor:
    """[rows, vocabulary] float32, for as many rows as are taken through `token_logprobs` at a time."""
    rows = max(1, policy.chunk_cells // logits.shape[1])
    return torch.empty(min(rows, len(logits)), logits.shape[1], device=logits.device)


def join(parts: Sequence[Logprobs]) -> Logprobs:
    """The rows of all parts, in order; at least one part."""
    if len(parts) == 1:
        return parts[0]
    return Logprobs(
        *(
            np.concatenate([getattr(part, name) for part in parts])
            for name in ("index", "logprobs", "ranks", "widths", "top_ids", "top_logprobs")
        )
    )


def split(logprobs: Logprobs, counts: npt.NDArray[np.integer]) -> list[Logprobs]:
    """Consecutive groups of rows, each with an index from 0."""
    ends = np.cumsum(counts)
    cells = np.concatenate([[0], np.cumsum(logprobs.widths)])
    return [
        Logprobs(
            index=np.arange(end - first, dtype=np.int32),
            logprobs=logprobs.logprobs[first:end],
            ranks=logprobs.ranks[first:end],
            widths=logprobs.widths[first:end],
            top_ids=logprobs.top_ids[cells[first] : cells[end]],
            top_logprobs=logprobs.top_logprobs[cells[first] : cells[end]],
        )
        for first, end in zip((ends - counts).tolist(), ends.tolist(), strict=True)
    ]
