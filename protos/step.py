"""Messages between the core and its workers: what one step computes, and what came of it.

A worker keeps a persistent batch of rows; only what changes travels. A row belongs to one request
from its NewRow until another NewRow takes it. Steps are carried out in the order they are sent.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from protos.messages import Sampling

Ints = Annotated[npt.NDArray[np.int32], "one entry per scheduled row unless said otherwise"]
Floats = npt.NDArray[np.float32]
EMPTY = np.zeros(0, np.int32)
NULL_BLOCK = 0
"""Block that holds nothing: padding and out-of-window entries of a block table name it."""


class NewRow(msgspec.Struct, frozen=True, array_like=True):
    """A request enters a row, for the first time or after a preemption."""

    row: int
    token_ids: npt.NDArray[np.int32]
    """All tokens known: the prompt, and the output there is."""
    num_prompt_tokens: int
    block_ids: list[int]
    sampling: Sampling
    prompt_logprobs_from: int = 1
    """First position of the prompt whose log-probability is still to be told, where `sampling` asks for them."""
    adapter: int = 0
    """Slot of the adapter that computes the row, 0 for the model alone."""


class SchedulerOutput(msgspec.Struct, frozen=True, array_like=True):
    """One step. Parallel arrays name the scheduled rows in batch order."""

    step_id: int
    rows: Ints
    starts: Ints
    """Position of the first token to compute: everything before it is in the KV cache or in flight."""
    counts: Ints
    """Tokens to compute from there, at least 1."""
    samples: npt.NDArray[np.bool_]
    """Whether the row's last token here is its last known one, so that the next is drawn."""
    new_rows: list[NewRow] = []
    block_rows: Ints = EMPTY
    """Rows that get more blocks, in order; a row may occur more than once. Not parallel to `rows`."""
    block_ids: Ints = EMPTY
    """The blocks, parallel to `block_rows`; each is appended to its row's table."""
    last_ids: Ints = EMPTY
    """The last token that each row computes here; empty where workers see for themselves what was drawn."""

    @property
    def num_tokens(self) -> int:
        return int(self.counts.sum())


class GrammarMask(msgspec.Struct, frozen=True, array_like=True):
    """The tokens that grammars allow in a step."""

    index: Ints
    """Of each row of `bits`, the place among the tokens the step draws. Rows without a grammar are not here."""
    bits: npt.NDArray[np.int32]
    """[rows, ceil(vocabulary / 32)]: bit i % 32 of word i // 32 says whether token i may be drawn."""


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of n tokens, in columns."""

    index: Ints
    """Of each row, the place of its token among those that the output or prompt part carries."""
    logprobs: Floats
    ranks: Ints
    """1 for the most likely token; a tie counts for neither."""
    widths: Ints
    """Candidates of each row; the two columns below hold them row after row."""
    top_ids: Ints
    """Most likely first, then the row's `logprob_token_ids`."""
    top_logprobs: Floats


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Of consecutive prompt tokens of a row, the first at position `start`."""

    row: int
    start: int
    logprobs: Logprobs


class ModelRunnerOutput(msgspec.Struct, frozen=True, array_like=True):
    """What a step drew: one token id per row whose `samples` was true, in batch order.

    -1 is a row that had nothing to draw from: its masks left no token.
    """

    step_id: int
    token_ids: Ints
    logprobs: Logprobs | None = None
    """Of the drawn tokens whose requests ask for them."""
    prompt_logprobs: list[PromptLogprobs] = []

    def result(self) -> ModelRunnerOutput:
        """Itself: an output that is here is one that need not be waited for."""
        return self


class WorkerInfo(msgspec.Struct, frozen=True, array_like=True):
    """What the workers turned out to hold, after loading."""

    num_blocks: int
    """KV blocks, the null block included."""
    max_model_len: int
    vocab_size: int
    dtype: str
    device: str
    weight_bytes: int
    kv_cache_bytes: int
    max_steps_in_flight: int
    """Steps that may be scheduled ahead of their results."""
    num_stages: int = 1
    """Stages of the pipeline that a step passes. If there are several, only the last sees what was drawn, so a row is
    not in a step before its last token is back, and steps say which it is."""
    weights: str = ""
    """What matrices are held as, in words."""
