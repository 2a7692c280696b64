"""Log-probabilities in columns: of chosen tokens, their ranks, the likeliest tokens and ids asked for.

They come of a float32 log_softmax. Rows ask for different numbers of candidates: all are computed as
wide as the widest, and each row's own are cut out on the host.
"""

from __future__ import annotations

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


def token_logprobs(
    logits: torch.Tensor,
    index: Int32s,
    token_ids: npt.NDArray[np.integer],
    num_top: Int32s,
    extra_ids: Sequence[Int64s],
    policy: DevicePolicy,
    scratch: torch.Tensor,
) -> Logprobs:
    """Of tokens [n] by logits [n, vocabulary] float32: the `num_top` likeliest of each row, then its `extra_ids`.

    `scratch` [at least n, vocabulary] float32 is overwritten: chunk after chunk can use the same memory.
    """
    scratch = scratch[: len(logits)]
    num_top = np.minimum(num_top, logits.shape[1])
    num_extra = np.array([len(ids) for ids in extra_ids], np.int32)
    chosen = policy.tensor(token_ids.astype(np.int64))[:, None]
    # Compared into float32, which adds up four times as fast as bools do and counts any vocabulary exactly.
    ranks = torch.gt(logits, logits.gather(1, chosen), out=scratch).sum(-1).cpu().numpy().astype(np.int32) + 1
    top_ids = logits.topk(int(num_top.max()), -1).indices
    extra = np.zeros((len(extra_ids), int(num_extra.max())), np.int64)
    given = np.arange(extra.shape[1]) < num_extra[:, None]
    extra[given] = np.concatenate(extra_ids)
    ids = torch.cat([chosen, top_ids, policy.tensor(extra)], 1)
    logprobs = torch.log_softmax(logits, -1, out=scratch).gather(1, ids).cpu().numpy()
    kept = np.concatenate([np.arange(top_ids.shape[1]) < num_top[:, None], given], 1)
    return Logprobs(
        index=index.astype(np.int32),
        logprobs=logprobs[:, 0].copy(),
        ranks=ranks,
        widths=num_top + num_extra,
        top_ids=ids[:, 1:].cpu().numpy()[kept].astype(np.int32),
        top_logprobs=logprobs[:, 1:][kept],
    )


def chunk_scratch(logits: torch.Tensor, policy: DevicePolicy) -> torch.Tensor:
    """[rows, vocabulary] float32, for as many rows as are taken through `token_logprobs` at a time."""
    rows = max(1, policy.chunk_cells // logits.shape[1])
    return torch.empty(min(rows, len(logits)), logits.shape[1], device=logits.device)


def join(parts: Sequence[Logprobs]) -> Logprobs:
    """The rows of all parts, in order."""
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
