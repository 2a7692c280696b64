"""Columns of log-probabilities: choosing rows of them, joining them, and their bytes for the front end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from protos.messages import LogprobColumns

if TYPE_CHECKING:
    from protos.step import Logprobs


def select_tokens(logprobs: Logprobs | None, chosen: npt.NDArray[np.bool_]) -> Logprobs | None:
    """The rows of those tokens of a step that were `chosen`, a mask over them, which then are numbered anew."""
    if logprobs is None:
        return None
    kept = chosen[logprobs.index]
    if kept.all() and chosen.all():
        return logprobs
    candidates = np.repeat(kept, logprobs.widths)
    renumbered = (np.cumsum(chosen) - 1).astype(np.int32)
    return msgspec.structs.replace(
        logprobs,
        index=renumbered[logprobs.index[kept]],
        logprobs=logprobs.logprobs[kept],
        ranks=logprobs.ranks[kept],
        widths=logprobs.widths[kept],
        top_ids=logprobs.top_ids[candidates],
        top_logprobs=logprobs.top_logprobs[candidates],
    )


def to_columns(parts: list[tuple[int, Logprobs]]) -> LogprobColumns | None:
    """One message's columns. Of each part, the number of tokens that the message holds before those of the part."""
    if not parts:
        return None
    index = [part.index + np.int32(before) for before, part in parts]
    return LogprobColumns(
        index=_join(index),
        logprobs=_join([part.logprobs for _, part in parts]),
        ranks=_join([part.ranks for _, part in parts]),
        widths=_join([part.widths for _, part in parts]),
        top_ids=_join([part.top_ids for _, part in parts]),
        top_logprobs=_join([part.top_logprobs for _, part in parts]),
    )


def _join(arrays: list[npt.NDArray[np.int32]] | list[npt.NDArray[np.float32]]) -> bytes:
    return b"".join(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes() for array in arrays)
