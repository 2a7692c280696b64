"""ModelRunner: a step in, tokens out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from model_runner.adapters import Adapters
from model_runner.draws import Draws
from model_runner.features import ADAPTER, MORE_THAN_LARGEST, PROMPT_LOGPROBS, used_by_any
from model_runner.forward_batch import ForwardBuffers
from model_runner.graphs import Graphs
from model_runner.input_batch import InputBatch
from model_runner.kv_cache import allocate_cache, fit_cache
from model_runner.largest_step import largest_step
from model_runner.logprobs import PendingLogprobs, chunk_scratch, token_logprobs
from model_runner.memory import MemoryPlan
from model_runner.models import make_model
from model_runner.pending_step import PendingStep
from model_runner.sampler import Sampler
from model_runner.stage import StageLink
from model_runner.step_program import StepProgram
from model_runner.weights import held_as, load_weights, whole_table
from protos.step import WorkerInfo

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from model_runner.device import DevicePolicy
    from model_runner.forward_batch import KVCaches
    from model_runner.graphs import Scores
    from model_runner.logprobs import LogprobRows
    from model_runner.memory import MemoryMeter
    from model_runner.prompt_spans import PromptSpans
    from model_runner.sampler import Drawn, Int32s
    from protos.adapter import Adapter
    from protos.config import EngineConfig
    from protos.model_spec import ModelSpec
    from protos.step import GrammarMask, SchedulerOutput

PROMPT_CHUNK = 64
"""Prompt tokens whose logits exist at a time: enough that the head's weights are read seldom."""


class ModelRunner:
    """One model on one device. Steps are carried out in the order they come, `execute` and `sample` in pairs."""

    def __init__(
        self, config: EngineConfig, spec: ModelSpec, eos_token_ids: tuple[int, ...], policy: DevicePolicy
    ) -> None:
        """Decides what fits and allocates the model, unfilled. Raises StartupError where it does not fit."""
        self._config, self._spec, self._policy = config, spec, policy
        self._place = policy.workers.place
        self._size = fit_cache(config, spec, self._policy, self._plan())
        self.model = make_model(spec, self._size.max_model_len, self._policy)
        self._batch = InputBatch(
            config.scheduler.max_num_seqs,
            self._size.max_model_len,
            config.cache.block_size,
            tuple(token_id for token_id in eos_token_ids if token_id < spec.vocab_size),
            self._policy,
        )
        self._buffers = ForwardBuffers(
            config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs, self._batch, self._policy
        )
        self._link = StageLink(spec, self._policy)
        self._sampler = Sampler(self._policy)
        self._adapters = Adapters(spec, self.model.weights(), config.adapters.max_adapter_rank, policy)
        self._kv_caches: KVCaches = {}
        self._step: SchedulerOutput | None = None
        self._spans: PromptSpans | None = None
        self._hidden = torch.empty(0)
        self._scores: Scores | None = None
        """Of the step last executed, where a recording has made them already."""
        self._graphs: Graphs | StepProgram | None = None

    def load(self, path: Path, report: Callable[[int, int], None]) -> WorkerInfo:
        """Fills the model's weights. Raises StartupError naming the file and the tensor at fault."""
        table = self.model.weights()
        elsewhere: set[str] = set()
        if self._place.pipeline_size > 1:
            elsewhere = whole_table(self._spec, self._policy).keys() - table.keys()
        load_weights(path, self._spec, self._config.model.load_format, table, report, elsewhere)
        self._allocate()
        return WorkerInfo(
            num_blocks=self._size.num_blocks,
            max_model_len=self._size.max_model_len,
            vocab_size=self._spec.vocab_size,
            dtype=self._policy.dtype_name,
            device=self._policy.device.type,
            weight_bytes=sum(target.nbytes for target in table.values()),
            kv_cache_bytes=self._size.num_bytes,
            max_steps_in_flight=self._config.scheduler.max_steps_in_flight
            or max(self._policy.max_steps_in_flight, self._place.pipeline_size),
            num_stages=self._place.pipeline_size,
            weights=held_as(table, self._policy),
        )

    @torch.inference_mode()
    def _allocate(self) -> None:
        """Takes the memory that is left: for the KV cache and graphs."""
        if self._policy.memory is not None:
            # Also where its size is given: kernels that are compiled here do not keep the first request waiting.
            self._size = fit_cache(self._config, self._spec, self._policy, self._measure(self._policy.memory))
        self._kv_caches = allocate_cache(self._size.num_blocks, self._spec, self._policy, self._batch.block_size)
        self._graphs = self._make_graphs()
        if isinstance(self._graphs, Graphs):
            self._graphs.capture()

    def _make_graphs(self) -> Graphs | StepProgram | None:
        policy, parts = self._policy, (self.model, self._buffers, self._kv_caches)
        if policy.has_program:
            return StepProgram(*parts, policy.ops)
        return None if policy.graphs is None else Graphs(*parts, policy.graphs())

    def _measure(self, memory: MemoryMeter) -> MemoryPlan | None:
        """What is left for the cache, by running the largest step and recording a few, over a cache of one block."""
        options = self._config.scheduler
        block_size, max_model_len = self._batch.block_size, self._size.max_model_len
        self._kv_caches = allocate_cache(1, self._spec, self._policy, block_size)
        step = largest_step(options.max_num_seqs, options.max_num_batched_tokens, max_model_len, block_size)

        def run() -> None:
            self.execute(step)
            self.sample().result()

        peak = memory.peak(run)
        self._hidden = torch.empty(0)
        graphs = self._make_graphs()
        graph_bytes = graphs.estimate(lambda: memory.used()[0]) if isinstance(graphs, Graphs) else 0
        del graphs
        self._kv_caches = {}
        return self._plan(peak, graph_bytes)

    def _plan(self, step_bytes: int = 0, graph_bytes: int = 0) -> MemoryPlan | None:
        if self._policy.memory is None:
            return None
        used, total = self._policy.memory.used()
        return MemoryPlan(total, self._config.cache.gpu_memory_utilization, used, step_bytes, graph_bytes)

    def execute(self, step: SchedulerOutput) -> None:
        """Applies the step's changes and runs the forward pass of the stage; `sample` then draws its tokens."""
        self._step = step
        before, behind = self._link.receive(step), None
        try:
            self._batch.apply(step)
            self._link.check(before)
            used = used_by_any(self._batch.uses[step.rows])
            self._spans = self._batch.prompt_spans(step) if used & PROMPT_LOGPROBS else None
            is_special = self._spans is not None or used & ADAPTER != 0
            wants_largest = not used & MORE_THAN_LARGEST
            self._scores = None if self._graphs is None else self._graphs.run(step, is_special, wants_largest)
            if self._scores is None:
                behind = self._hidden = self._forward(step, before)
        finally:
            self._link.send(behind, step)

    @torch.inference_mode()
    def _forward(self, step: SchedulerOutput, before: torch.Tensor | None) -> torch.Tensor:
        """Operation by operation: hidden states behind the stage, of the tokens that are told or draw."""
        batch = self._buffers.fill(step, self._kv_caches, self._spans)
        batch.hidden = before
        with self._adapters.of_rows(self._batch.adapter[step.rows], step.counts):
            return self.model.forward(batch)

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        """For rows that name the slot from the next step on. Raises AdapterError; then the slot is empty."""
        self._adapters.load(slot, adapter)

    def unload_adapter(self, slot: int) -> None:
        self._adapters.unload(slot)

    def sample(self, mask: GrammarMask | None = None) -> PendingStep:
        """Draws a token for each row of the step last executed that is due one, among those the mask allows; in a stage
        before the last, nothing. The next step may be executed before what is drawn is here."""
        step = self._step
        assert step is not None, "sample without execute"
        if not self._place.is_last_stage:
            return PendingStep(step.step_id, None, None)
        rows, positions = step.rows[step.samples], (step.starts + step.counts)[step.samples]
        of_prompts, drawn = None, None
        if self._spans is not None:
            of_prompts = self._spans, self._prompt_logprobs(self._hidden[len(rows) :], self._spans)
        if len(rows):
            drawn = self._draw(rows, positions, mask)
            self._batch.record(rows, positions, drawn.token_ids)
        return PendingStep(step.step_id, drawn, of_prompts)

    def _draw(self, rows: Int32s, positions: Int32s, mask: GrammarMask | None) -> Drawn:
        logits, largest = self._scores or (None, None)
        if largest is not None and mask is None:
            # numpy's copy, of what the host has: torch takes longer for it than for all else here.
            return self._sampler.drawn(torch.from_numpy(largest.numpy().copy()))
        with torch.inference_mode():
            if logits is None:
                logits = self.model.logits(self._hidden[: len(rows)])
            return self._sampler(logits, Draws(self._batch, rows, positions, mask))

    @torch.inference_mode()
    def _prompt_logprobs(self, hidden: torch.Tensor, spans: PromptSpans) -> PendingLogprobs:
        """Of the spans' tokens, by the hidden states [P, hidden size] that predict them."""
        batch, tensor = self._batch, self._policy.tensor
        rows, positions = spans.flat()
        token_ids, num_top = tensor(batch.token_ids[rows, positions]), batch.num_prompt_logprobs[rows]
        parts: list[LogprobRows] = []
        done = 0
        for first in range(0, len(rows), PROMPT_CHUNK):
            logits = self.model.logits(hidden[first : first + PROMPT_CHUNK])
            scratch = chunk_scratch(logits, self._policy)
            for part in logits.split(len(scratch)):
                few = slice(done, done + len(part))
                extra_ids = [batch.lists[row].logprob_ids for row in rows[few]]
                given = positions[few], token_ids[few], num_top[few], extra_ids
                parts.append(token_logprobs(part, *given, self._policy, scratch))
                done += len(part)
        return PendingLogprobs(parts, self._policy)
