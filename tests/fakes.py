"""Fakes that run everything above the model without one.

`PagedFakeWorker` keeps a fake paged KV cache. A cell depends on its token and on the cell before it as
the block table finds it; a token drawn depends on all cells of its sequence as the table finds them.
So a block that is reused too early, shared wrongly or never computed changes tokens, and `Reference`,
which knows no cache, tells.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from protos.adapter import Adapter
from protos.messages import Sampling
from protos.step import (
    NULL_BLOCK,
    GrammarMask,
    Logprobs,
    ModelRunnerOutput,
    PromptLogprobs,
    SchedulerOutput,
    WorkerInfo,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Mapping, Sequence

EOS = 0
VOCAB_SIZE = 256
FIRST_DRAWN = 2
"""Ids from here on are drawn; the smaller ones, EOS among them, only when they are forced."""
MAX_LEN = 4096
POISON = np.uint64(0xDEAD_BEEF_DEAD_BEEF)
"""In cells that nobody wrote, or whose block was given back."""

_MASK = (1 << 64) - 1
_WEIGHTS: npt.NDArray[np.uint64] = (
    np.arange(1, MAX_LEN + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
) | np.uint64(1)

Forced = dict[int, dict[int, int]]
"""By seed: tokens that are drawn whatever the cache says, by their index in the output."""


class InjectedError(Exception):
    """A step failed because the test said so."""


def _mix(left: int, right: int) -> int:
    value = ((left ^ right) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 30)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def fill_cells(token_ids: Iterable[int], before: int) -> list[int]:
    """What the cache holds for tokens that follow the cell `before`."""
    cells = []
    for token_id in token_ids:
        before = _mix(before, token_id + 1)
        cells.append(before)
    return cells


class ScriptedMatcher:
    """Stands for a grammar: allows about a quarter of the tokens, and which ones depends on all it accepted; is done
    after `length` of them. `error` is what a real one tells when it cannot go on."""

    error: str | None = None

    def __init__(self, key: int, length: int, output: Iterable[int] = ()) -> None:
        self._state = key
        self._left = length
        for token_id in output:
            assert self.accept(token_id)

    @property
    def is_done(self) -> bool:
        return self._left <= 0

    def allowed(self) -> set[int]:
        values = (np.arange(VOCAB_SIZE, dtype=np.uint64) ^ np.uint64(self._state)) * np.uint64(0x9E3779B97F4A7C15)
        chosen = np.flatnonzero(values >> np.uint64(62) == 0)
        return set(chosen[chosen >= FIRST_DRAWN].tolist())

    def accept(self, token_id: int) -> bool:
        is_allowed = token_id in self.allowed()
        self._state = _mix(self._state, token_id + 1)
        self._left -= 1
        return is_allowed

    def fill(self, row: npt.NDArray[np.int32]) -> None:
        bits = np.zeros(VOCAB_SIZE, np.uint8)
        bits[list(self.allowed())] = 1
        row[:] = np.packbits(bits, bitorder="little").view("<i4")

    def copy(self) -> ScriptedMatcher:
        return copy.copy(self)


def logprob(position: int, token_id: int) -> tuple[float, int]:
    """(log-probability, rank) that the fake worker reports."""
    return -float(position), 1 + token_id % 7


def _columns(index: list[int], positions: list[int], token_ids: list[int], widths: list[int]) -> Logprobs:
    """Log-probabilities of tokens in columns; candidate i of a token is the i-th behind it, with -i."""
    values = [logprob(position, token_id) for position, token_id in zip(positions, token_ids, strict=True)]
    candidates = [
        (token_id + i, -float(i)) for token_id, width in zip(token_ids, widths, strict=True) for i in range(width)
    ]
    return Logprobs(
        index=np.array(index, np.int32),
        logprobs=np.array([value for value, _ in values], np.float32),
        ranks=np.array([rank for _, rank in values], np.int32),
        widths=np.array(widths, np.int32),
        top_ids=np.array([token_id for token_id, _ in candidates], np.int32),
        top_logprobs=np.array([value for _, value in candidates], np.float32),
    )


def draw(
    cells: npt.NDArray[np.uint64],
    num_prompt_tokens: int,
    sampling: Sampling,
    forced: Mapping[int, int],
    allowed: Container[int] = range(VOCAB_SIZE),
) -> int:
    """The token that follows a sequence. As a sampler must, draws no end below `min_tokens`."""
    index = len(cells) - num_prompt_tokens
    banned = {EOS, *sampling.stop_token_ids} if index < sampling.min_tokens else set()
    if index in forced and forced[index] not in banned and forced[index] in allowed:
        return forced[index]
    value = int(np.bitwise_xor.reduce(cells * _WEIGHTS[: len(cells)]))
    while True:
        value = _mix(value ^ len(cells), sampling.seed)
        token_id = FIRST_DRAWN + value % (VOCAB_SIZE - FIRST_DRAWN)
        if token_id not in banned and token_id in allowed:
            return token_id


class Reference:
    """The output of a request that is alone in an engine without a cache, as far as it was asked for."""

    def __init__(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        forced: Mapping[int, int] | None = None,
        weights: int = 1,
        matcher: ScriptedMatcher | None = None,
        adapter: int = 0,
    ) -> None:
        self.weights = weights
        """Stands for the model: other weights, other tokens from here on."""
        self._adapter = adapter
        """What an adapter makes of the weights."""
        self._prompt = list(prompt)
        self._output: list[int] = []
        self._sampling = sampling
        self._forced = forced or {}
        self._matcher = matcher

    def __getitem__(self, index: int) -> int:
        while len(self._output) <= index:
            cells = np.array(fill_cells(self._prompt + self._output, self.weights ^ self._adapter), np.uint64)
            allowed = range(VOCAB_SIZE) if self._matcher is None else self._matcher.allowed()
            token_id = draw(cells, len(self._prompt), self._sampling, self._forced, allowed)
            if self._matcher is not None:
                self._matcher.accept(token_id)
            self._output.append(token_id)
        return self._output[index]


def make_adapter(name: str, weights: int) -> Adapter:
    """One that is nowhere, with the content of which `weights` is a number."""
    return Adapter(name, f"/adapters/{name}", f"{weights:032x}", 8, 1000)


def adapter_weights(adapter: Adapter) -> int:
    return int(adapter.digest, 16)


def expected_tokens(prompt: Sequence[int], n: int, seed: int = 0, **sampling: Any) -> list[int]:
    """The first `n` tokens of `Reference`."""
    reference = Reference(prompt, Sampling(seed=seed, **sampling))
    return [reference[index] for index in range(n)]


@dataclass(eq=False)
class _Row:
    """One request's time in a row, as a worker knows it."""

    token_ids: list[int]
    table: list[int]
    num_prompt_tokens: int
    sampling: Sampling
    prompt_logprobs_from: int
    adapter: int
    """Its slot, 0 for none."""
    computed: int | None = None
    """Tokens from the start that steps have computed; None before the first."""


def _apply_diff(rows: dict[int, _Row], step: SchedulerOutput, num_stages: int = 1) -> None:
    for new in step.new_rows:
        rows[new.row] = _Row(
            new.token_ids.tolist(),
            list(new.block_ids),
            new.num_prompt_tokens,
            new.sampling,
            new.prompt_logprobs_from,
            new.adapter,
        )
    for row, block in zip(step.block_rows.tolist(), step.block_ids.tolist(), strict=True):
        rows[row].table.append(block)
    if num_stages > 1:
        ends = (step.starts + step.counts).tolist()
        for row, end, token_id in zip(step.rows.tolist(), ends, step.last_ids.tolist(), strict=True):
            rows[row].token_ids[end - 1 : end] = [token_id]


def _allowed(mask: GrammarMask | None, place: int) -> Container[int]:
    """The tokens that may be drawn at a place of the step."""
    rows = [] if mask is None else np.flatnonzero(mask.index == place)
    if mask is None or not len(rows):
        return range(VOCAB_SIZE)
    return set(np.flatnonzero(np.unpackbits(mask.bits[rows[0]].view(np.uint8), bitorder="little")).tolist())


class StepChecker:
    """What the scheduler promises its workers, checked as steps are issued and return."""

    def __init__(
        self, block_size: int, max_model_len: int, max_num_seqs: int, budget: int, num_stages: int = 1
    ) -> None:
        self.violations: list[str] = []
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._max_num_seqs = max_num_seqs
        self._budget = budget
        self._num_stages = num_stages
        self._rows: dict[int, _Row] = {}
        self._next_step = 0
        self._in_flight: dict[int, set[tuple[int, _Row]]] = {}
        """The blocks a step reads or writes and for whom, until it is back."""
        self._drawing: dict[int, set[_Row]] = {}
        """For whom a step draws, until it is back."""

    def issued(self, step: SchedulerOutput) -> None:
        self._step = step
        self._check_form(step)
        _apply_diff(self._rows, step)
        touched: set[tuple[int, _Row]] = set()
        writers: dict[int, int] = {}
        for row, start, count, samples in zip(
            step.rows.tolist(), step.starts.tolist(), step.counts.tolist(), step.samples.tolist(), strict=True
        ):
            state = self._rows.get(row)
            if state is None:
                self._expect(False, f"row {row} is unknown")
                continue
            end = start + count
            self._check_row(row, state, start, end, samples)
            state.computed = end
            if samples:
                state.token_ids.append(-1)
            written = state.table[start // self._block_size : -(-end // self._block_size)]
            for block in written:
                self._expect(block not in writers, f"rows {row} and {writers.get(block)} write block {block}")
                writers[block] = row
                for other, blocks in self._in_flight.items():
                    reused = any(b == block and owner is not state for b, owner in blocks)
                    self._expect(not reused, f"block {block} is reused while step {other} is in flight")
            touched |= {(block, state) for block in state.table}
        self._in_flight[step.step_id] = touched
        self._drawing[step.step_id] = {self._rows[row] for row in step.rows[step.samples].tolist()}

    def returned(self, step_id: int) -> None:
        self._expect(min(self._in_flight) == step_id, f"step {step_id} returns out of order")
        del self._in_flight[step_id], self._drawing[step_id]

    def slot_emptied(self, slot: int) -> None:
        rows = {state for touched in self._in_flight.values() for _, state in touched if state.adapter == slot}
        self._expect(not rows, f"adapter slot {slot} is emptied under {len(rows)} rows in flight")

    def _check_form(self, step: SchedulerOutput) -> None:
        self._expect(step.step_id == self._next_step, f"step {self._next_step} was expected")
        self._next_step = step.step_id + 1
        for name in ("rows", "starts", "counts", "block_rows", "block_ids", "last_ids"):
            if getattr(step, name).dtype != np.int32:
                self._expect(False, f"{name} is {getattr(step, name).dtype}")
        self._expect(step.samples.dtype == np.bool_, "samples is no bool")
        num_told = len(step.rows) if self._num_stages > 1 else 0
        self._expect(len(step.last_ids) == num_told, f"{len(step.last_ids)} last tokens of {len(step.rows)} rows")
        rows = step.rows.tolist()
        self._expect(0 < len(rows) == len(set(rows)) <= self._max_num_seqs, f"rows {rows}")
        self._expect(set(rows) >= {new.row for new in step.new_rows}, "a new row computes nothing")
        self._expect(set(rows) >= set(step.block_rows.tolist()), "a row grows and computes nothing")
        self._expect(step.num_tokens <= self._budget, f"{step.num_tokens} tokens are over the budget")

    def _check_row(self, row: int, state: _Row, start: int, end: int, samples: bool) -> None:
        known = len(state.token_ids)
        self._expect(start < end <= known, f"row {row} computes {start}:{end} of {known} tokens")
        self._expect(state.computed in (None, start), f"row {row} starts at {start}, not at {state.computed}")
        self._expect(state.computed is not None or start % self._block_size == 0, f"row {row} starts inside a block")
        self._expect(samples == (end == known), f"row {row} draws at {end} of {known} tokens")
        if self._num_stages > 1:
            waits = any(state in drawing for drawing in self._drawing.values())
            self._expect(not waits, f"row {row} computes a token that is not back")
        self._expect(known < self._max_model_len, f"row {row} has {known} tokens")
        self._expect(len(state.table) == -(-end // self._block_size), f"row {row}: {len(state.table)} blocks for {end}")
        self._expect(len(set(state.table)) == len(state.table), f"row {row} holds a block twice: {state.table}")
        self._expect(NULL_BLOCK not in state.table, f"row {row} holds the null block")

    def _expect(self, condition: bool, message: str) -> None:
        if not condition:
            self.violations.append(f"step {self._step.step_id}: {message}")


@dataclass
class PagedFakeWorker:
    """A worker in the sense of `gpu_executor.uniproc`, with scripted mishaps.

    `issue` may be called when a step is issued, before it is carried out by `execute` and `sample`.
    """

    num_blocks: int = 33
    block_size: int = 4
    max_model_len: int = 128
    max_num_seqs: int = 8
    budget: int = 64
    depth: int = 1
    num_stages: int = 1
    """With several, it learns from steps alone what was drawn, as a first stage does."""
    forced: Forced = field(default_factory=dict)
    fail_steps: set[int] = field(default_factory=set)
    """Steps that raise and leave poison where they were to write."""
    poison_seeds: dict[int, int] = field(default_factory=dict)
    """Rows that make every step raise which computes this position of theirs or one behind it, by their seed."""
    weights: int = 1
    adapters: dict[int, int] = field(default_factory=dict)
    """By slot, what it makes of the weights; a row that names another slot fails its step."""
    steps: list[SchedulerOutput] = field(default_factory=list)
    num_failed: int = 0
    """Steps that raised."""
    false_reads: list[str] = field(default_factory=list)
    """Cells that were not what their sequence should have there."""

    def __post_init__(self) -> None:
        self.kv = np.full((self.num_blocks, self.block_size), POISON, np.uint64)
        self.checker = StepChecker(self.block_size, self.max_model_len, self.max_num_seqs, self.budget, self.num_stages)
        self._rows: dict[int, _Row] = {}
        self._drawing: list[tuple[_Row, npt.NDArray[np.uint64]]] = []
        self._prompt_logprobs: list[PromptLogprobs] = []

    def load(self, report: Callable[[int, int], None]) -> WorkerInfo:
        report(1, 1)
        shape = (self.num_blocks, self.max_model_len, VOCAB_SIZE, "none", "fake", 0, 0)
        return WorkerInfo(*shape, max_steps_in_flight=self.depth, num_stages=self.num_stages)

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        assert slot not in self.adapters, f"slot {slot} is full"
        self.adapters[slot] = adapter_weights(adapter)

    def unload_adapter(self, slot: int) -> None:
        self.checker.slot_emptied(slot)
        del self.adapters[slot]

    def _weights_of(self, state: _Row) -> int:
        return self.weights ^ (self.adapters[state.adapter] if state.adapter else 0)

    def issue(self, step: SchedulerOutput) -> None:
        self.steps.append(step)
        self.checker.issued(step)

    def execute(self, step: SchedulerOutput) -> None:
        if not self.steps or self.steps[-1].step_id < step.step_id:
            self.issue(step)
        self._step = step
        self._drawing = []
        self._prompt_logprobs = []
        _apply_diff(self._rows, step, self.num_stages)
        schedule = list(
            zip(step.rows.tolist(), step.starts.tolist(), step.counts.tolist(), step.samples.tolist(), strict=True)
        )
        failing = step.step_id in self.fail_steps or any(
            start + count > self.poison_seeds.get(self._rows[row].sampling.seed, MAX_LEN)
            for row, start, count, _ in schedule
        )
        for row, start, count, _ in schedule:
            self._write(self._rows[row], start, start + count, failing)
        for row, start, count, samples in schedule:
            state = self._rows[row]
            cells = self._read(row, state, start + count)
            if samples:
                self._drawing.append((state, cells))
            self._tell_prompt(row, state, start, start + count)
        if failing:
            for state, _ in self._drawing if self.num_stages == 1 else ():
                state.token_ids.append(EOS)  # of some token, the step after it computes
            self.checker.returned(step.step_id)
            self.num_failed += 1
            raise InjectedError(f"step {step.step_id}")

    def sample(self, mask: GrammarMask | None = None) -> ModelRunnerOutput:
        self.checker.returned(self._step.step_id)
        drawn, asking = [], []
        for place, (state, cells) in enumerate(self._drawing):
            forced = self.forced.get(state.sampling.seed, {})
            allowed = _allowed(mask, place)
            token_id = draw(cells, state.num_prompt_tokens, state.sampling, forced, allowed) if allowed else -1
            if self.num_stages == 1:
                state.token_ids.append(token_id)  # the next step may come before the core knows it
            drawn.append(token_id)
            if state.sampling.logprobs is not None:
                asking.append((place, len(cells), token_id, state.sampling.logprobs))
        logprobs = _columns(*map(list, zip(*asking, strict=True))) if asking else None
        return ModelRunnerOutput(self._step.step_id, np.array(drawn, np.int32), logprobs, self._prompt_logprobs)

    def _tell_prompt(self, row: int, state: _Row, start: int, end: int) -> None:
        """Each token of the prompt is told by the step that computes the one before it."""
        width = state.sampling.prompt_logprobs
        positions = list(range(max(start + 1, state.prompt_logprobs_from), min(end + 1, state.num_prompt_tokens)))
        if width is not None and positions:
            token_ids = [state.token_ids[position] for position in positions]
            columns = _columns(list(range(len(positions))), positions, token_ids, [width] * len(positions))
            self._prompt_logprobs.append(PromptLogprobs(row, positions[0], columns))

    def poison(self, blocks: list[int]) -> None:
        self.kv[blocks] = POISON

    def _cells(self, state: _Row, end: int) -> npt.NDArray[np.uint64]:
        blocks = state.table[: -(-end // self.block_size)]
        cells: npt.NDArray[np.uint64] = self.kv[blocks].reshape(-1)[:end]
        return cells

    def _write(self, state: _Row, start: int, end: int, failing: bool) -> None:
        before = int(self._cells(state, start)[-1]) if start else self._weights_of(state)
        cells = fill_cells(state.token_ids[start:end], before)
        for position, cell in zip(range(start, end), cells, strict=True):
            block = state.table[position // self.block_size]
            self.kv[block, position % self.block_size] = POISON if failing else cell

    def _read(self, row: int, state: _Row, end: int) -> npt.NDArray[np.uint64]:
        cells = self._cells(state, end)
        truth = np.array(fill_cells(state.token_ids[:end], self._weights_of(state)), np.uint64)
        if (wrong := np.flatnonzero(cells != truth)).size:
            poisoned = " (poison)" if cells[wrong[0]] == POISON else ""
            self.false_reads.append(f"step {self._step.step_id}: row {row} at {wrong[0]} of {end}{poisoned}")
        return cells
