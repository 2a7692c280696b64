"""Rows: a persistent batch and a sampler without a model; and the sampler's edits written plainly, in float64."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from kernels.reference import ReferenceOps
from model_runner.device import DevicePolicy
from model_runner.draws import Draws
from model_runner.input_batch import InputBatch
from model_runner.sampler import Drawn, Sampler
from protos.messages import Sampling
from protos.step import GrammarMask, NewRow, SchedulerOutput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from protos.step import Logprobs

VOCAB = 3000
EOS = (7, 8)
History = tuple[list[int], int]
"""Tokens, and how many of them are the prompt."""
PROMPT: History = ([0] * 5, 5)


EVERY_KIND = [
    Sampling(),
    Sampling(temperature=1.0, seed=1),
    Sampling(temperature=0.7, top_p=0.9, top_k=50, min_p=0.01, seed=2),
    Sampling(logit_bias={3: 2.0}, allowed_token_ids=(3, 4, 5)),
    Sampling(min_tokens=3, stop_token_ids=(100,)),
    Sampling(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.3),
    Sampling(bad_words=((0, 0, 9), (7,), (1, 2))),
    Sampling(logprobs=3, logprob_token_ids=(4, 4)),
    Sampling(temperature=1.0, top_p=0.5, logprobs=2, processed_logprobs=True, presence_penalty=0.1, seed=3),
    Sampling(logprobs=1, repetition_penalty=2.0),
]
"""Rows that together use all that a sampler does."""


def policy(chunk_cells: int = 1 << 14) -> DevicePolicy:
    """Small chunks, so that a test's rows do not all fit into one."""
    return DevicePolicy(torch.device("cpu"), torch.float32, ReferenceOps(), 1, None, chunk_cells)


class Rows:
    """A batch of rows with the given sampling, each behind a prompt of 5 tokens or a history of its own."""

    def __init__(
        self,
        samplings: Sequence[Sampling],
        chunk_cells: int = 1 << 14,
        histories: Sequence[History] | None = None,
        on: DevicePolicy | None = None,
    ) -> None:
        size = len(samplings)
        histories = histories or [PROMPT] * size
        self.policy = on or policy(chunk_cells)
        self.batch = InputBatch(size, 4096, 16, EOS, self.policy)
        self.rows = np.arange(size, dtype=np.int32)
        self.lengths = np.array([len(token_ids) for token_ids, _ in histories], np.int32)
        new_rows = [
            NewRow(row, np.array(token_ids, np.int32), num_prompt, [1], sampling)
            for row, (sampling, (token_ids, num_prompt)) in enumerate(zip(samplings, histories, strict=True))
        ]
        self.batch.apply(SchedulerOutput(0, self.rows, self.rows, self.rows, self.rows > 0, new_rows))
        self._sampler = Sampler(self.policy)

    def draws(self, positions: Sequence[int] | int | None = None, mask: GrammarMask | None = None) -> Draws:
        at = self.lengths if positions is None else np.asarray(positions, np.int32)
        return Draws(self.batch, self.rows, np.broadcast_to(at, len(self.rows)), mask)

    def sample(
        self,
        logits: torch.Tensor,
        positions: Sequence[int] | int | None = None,
        mask: GrammarMask | None = None,
    ) -> tuple[list[int], Logprobs | None]:
        token_ids, logprobs = self.start(logits, positions, mask).result()
        return token_ids.tolist(), logprobs

    def start(
        self,
        logits: torch.Tensor,
        positions: Sequence[int] | int | None = None,
        mask: GrammarMask | None = None,
    ) -> Drawn:
        return self._sampler(logits.clone(), self.draws(positions, mask))

    def draw(
        self,
        logits: torch.Tensor,
        positions: Sequence[int] | int | None = None,
        mask: GrammarMask | None = None,
    ) -> list[int]:
        return self.sample(logits, positions, mask)[0]


def logits_of(rows: int, seed: int = 0, scale: float = 3.0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def mask_of(allowed: dict[int, np.ndarray]) -> GrammarMask:
    """Of each place, [vocabulary] bools."""
    packed = []
    for bools in allowed.values():
        padded = np.zeros(-(-len(bools) // 32) * 32, np.bool_)
        padded[: len(bools)] = bools
        packed.append(np.packbits(padded, bitorder="little").view(np.int32))
    return GrammarMask(np.array(list(allowed), np.int32), np.stack(packed))


def edited_twin(
    logits: np.ndarray, sampling: Sampling, history: History = PROMPT, allowed: np.ndarray | None = None
) -> np.ndarray:
    """What all edits make of one row of logits, in float64 and in the documented order."""
    (token_ids, num_prompt), logits = history, logits.astype(np.float64)
    output = token_ids[num_prompt:]
    if allowed is not None:
        logits[~allowed] = -np.inf
    for token_id, bias in sampling.logit_bias.items():
        logits[token_id] += np.float32(bias)
    if sampling.allowed_token_ids:
        for token_id in range(len(logits)):
            if token_id not in sampling.allowed_token_ids:
                logits[token_id] = -np.inf
    if len(output) < sampling.min_tokens:
        shortened = logits.copy()
        for token_id in (*(() if sampling.ignore_eos else EOS), *sampling.stop_token_ids):
            shortened[token_id] = -np.inf
        if allowed is None or (shortened > -np.inf).any():
            logits = shortened
    for token_id in set(token_ids):
        penalty = np.float64(np.float32(sampling.repetition_penalty))
        logits[token_id] = logits[token_id] / penalty if logits[token_id] > 0 else logits[token_id] * penalty
    for token_id in set(output):
        logits[token_id] -= np.float64(np.float32(sampling.frequency_penalty)) * output.count(token_id)
        logits[token_id] -= np.float64(np.float32(sampling.presence_penalty))
    for *before, last in sampling.bad_words:
        if token_ids[len(token_ids) - len(before) :] == before and len(token_ids) >= len(before):
            logits[last] = -np.inf
    return logits


def kept_in_float64(logits: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """What min-p, top-k and top-p keep of one row of float32 logits, by their definitions."""
    wide = logits.astype(np.float64)
    probabilities = np.exp(wide - wide.max())
    kept = wide >= wide.max() + (math.log(min_p) if min_p else -math.inf)
    if 0 < top_k < len(wide):
        kept &= wide >= np.sort(wide)[-top_k]
    if top_p < 1:
        probabilities = np.where(kept, probabilities, 0.0)
        probabilities /= probabilities.sum()
        order = np.argsort(-wide, kind="stable")
        larger = np.zeros(len(wide))
        larger[order] = np.cumsum(probabilities[order]) - probabilities[order]
        first_of_value = {value: larger[index] for index, value in zip(order[::-1], wide[order[::-1]], strict=True)}
        kept &= np.array([first_of_value[value] for value in wide]) < top_p
    return kept


def check_frequencies(drawn: list[int], weights: np.ndarray) -> int:
    """A chi-squared test of draws against what they should be distributed like, up to a factor; its degrees of
    freedom."""
    expected = weights / weights.sum() * len(drawn)
    counts = np.bincount(drawn, minlength=len(weights))
    assert not counts[weights == 0].any()
    cells = expected >= 5
    statistic = ((counts[cells] - expected[cells]) ** 2 / expected[cells]).sum()
    freedom = int(cells.sum()) - 1
    # Wilson and Hilferty's normal approximation of the chi-squared distribution, at one in ten thousand.
    bound = freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < bound
    return freedom
