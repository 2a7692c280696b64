"""Scripted log-probabilities, for tests and for timing what carries them: well formed, and cheap to make.

The token itself is always the likeliest; the id after it follows, and so on; each is half as likely as the
one before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from protos.step import Logprobs

if TYPE_CHECKING:
    from collections.abc import Sequence

Int32s = npt.NDArray[np.int32]
LOG_HALF = np.float32(np.log(0.5))


def scripted_logprobs(
    index: npt.NDArray[np.integer],
    token_ids: Int32s,
    num_top: Int32s,
    extra_ids: Sequence[Sequence[int]],
    vocab_size: int,
) -> Logprobs:
    """Of tokens [n], each with its `num_top` likeliest and then its `extra_ids`."""
    num_top = np.minimum(num_top, vocab_size)
    if not any(extra_ids):
        owners = np.repeat(np.arange(len(token_ids)), num_top)
        behind = np.arange(len(owners)) - np.repeat(np.cumsum(num_top) - num_top, num_top)
        widths = num_top
        top_ids = (token_ids[owners] + behind) % vocab_size
    else:
        widths = num_top + np.array([len(ids) for ids in extra_ids], np.int32)
        owners = np.repeat(np.arange(len(token_ids)), widths)
        likeliest = [(token_id + np.arange(k)) % vocab_size for token_id, k in zip(token_ids, num_top, strict=True)]
        both = [part for pair in zip(likeliest, extra_ids, strict=True) for part in pair]
        top_ids = np.concatenate(both)
        behind = (top_ids - token_ids[owners]) % vocab_size
    return Logprobs(
        index=index.astype(np.int32),
        logprobs=np.full(len(token_ids), LOG_HALF, np.float32),
        ranks=np.ones(len(token_ids), np.int32),
        widths=widths.astype(np.int32),
        top_ids=top_ids.astype(np.int32),
        top_logprobs=(behind + 1).astype(np.float32) * LOG_HALF,
    )
