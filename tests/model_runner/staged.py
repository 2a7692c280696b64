"""StagedExecutor: an engine over the stages of a pipeline, a process each, with steps in flight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from core_proc.engine_core import EngineCore
from core_proc.request import make_request
from gpu_executor.uniproc import UniprocExecutor
from protos.messages import EngineCoreRequest, FinishReason, GrammarSpec, Sampling
from tests.model_runner.tiny import make_runner

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import torch

    from model_runner.forward_batch import ForwardBatch
    from model_runner.parallel import Workers
    from model_runner.runner import ModelRunner
    from protos.config import EngineConfig
    from protos.step import GrammarMask, ModelRunnerOutput, SchedulerOutput, WorkerInfo
    from tests.model_runner.ranks import Ranks

_runner: ModelRunner
"""That of this process, in a stage."""


def _load(workers: Workers, path: Path, config: EngineConfig) -> WorkerInfo:
    global _runner
    _runner = make_runner(path, config, workers)
    return _runner.load(path, lambda done, total: None)


def _step(workers: Workers, step: SchedulerOutput, mask: GrammarMask | None, guilty: bool) -> ModelRunnerOutput | None:
    """None if the step failed; that of a guilty worker does."""
    if guilty:
        _runner.model.forward = _broken
    try:
        _runner.execute(step)
        return _runner.sample(mask).result()
    except RuntimeError:
        return None
    finally:
        if guilty:
            del _runner.model.forward


def _broken(batch: ForwardBatch) -> torch.Tensor:
    raise RuntimeError("broken")


class StagedExecutor:
    """An executor as the core wants it. `guilty` are ranks by the step they fail in."""

    def __init__(self, ranks: Ranks, path: Path, config: EngineConfig) -> None:
        self._ranks, self._path, self._config = ranks, path, config
        self.guilty: dict[int, int] = {}
        self.failed: dict[int, list[bool]] = {}
        """By step, whether each rank failed."""
        self.most_in_flight = 0
        self._num_in_flight = 0

    def start(self, report: Callable[[int, int], None], died: Callable[[Any], None]) -> WorkerInfo:
        self.infos = self._ranks.run(_load, self._path, self._config)
        return self.infos[-1]

    def execute(self, step: SchedulerOutput) -> None:
        self._step = step

    def sample(self, mask: GrammarMask | None = None) -> StagedExecutor:
        guilty = self.guilty.get(self._step.step_id)
        for rank, pipe in enumerate(self._ranks.pipes):
            pipe.send((_step, (self._step, mask, rank == guilty)))
        self._num_in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self._num_in_flight)
        return self

    def result(self) -> ModelRunnerOutput:
        """Steps are waited for in the order they were given."""
        outputs = self._ranks.answers()
        self._num_in_flight -= 1
        self.failed[len(self.failed)] = [output is None for output in outputs]
        if outputs[-1] is None:
            raise RuntimeError("the step failed")
        return outputs[-1]

    def shutdown(self) -> None:
        pass


class _One:
    """The worker of an engine of one stage, in this process."""

    def __init__(self, path: Path, config: EngineConfig) -> None:
        self._path = path
        self._runner = make_runner(path, config, None)
        self.execute, self.sample = self._runner.execute, self._runner.sample

    def load(self, report: Callable[[int, int], None]) -> WorkerInfo:
        return self._runner.load(self._path, report)


class Engine:
    """An EngineCore and what comes out of it. Without ranks it has one stage, in this process or as an `executor`."""

    def __init__(self, path: Path, config: EngineConfig, ranks: Ranks | None = None, executor: Any = None) -> None:
        self.executor: Any = executor or (
            UniprocExecutor(config, (), _One(path, config)) if ranks is None else StagedExecutor(ranks, path, config)
        )
        self.core = EngineCore(config, (), executor=self.executor)
        self.scheduler = self.core.scheduler
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: list[bytes] = []
        self.ends: dict[int, FinishReason] = {}

    def add(self, prompt: Sequence[int], max_tokens: int, matcher: Any = None, **sampling: Any) -> int:
        """The request's handle."""
        handle = len(self.tokens)
        self.tokens[handle] = []
        message = EngineCoreRequest(
            handle,
            np.array(prompt, "<i4").tobytes(),
            Sampling(ignore_eos=True, **sampling),
            max_tokens,
            grammar=None if matcher is None else GrammarSpec("regex", "scripted"),
        )
        block_size = self.core.ready.block_size
        request = make_request(message, 0, block_size, self.core.ready.max_model_len, 0.0)
        self.scheduler.add(request)
        if matcher is not None:
            self.scheduler.attach_matcher(request, matcher)
        return handle

    def step(self) -> None:
        self.core.step()
        for outputs in self.scheduler.events.take().values():
            handles, token_ids = np.frombuffer(outputs.handles, "<i8"), np.frombuffer(outputs.token_ids, "<i4")
            for handle, token_id in zip(handles.tolist(), token_ids.tolist(), strict=True):
                self.tokens[handle].append(token_id)
            if outputs.logprobs is not None:
                self.logprobs.append(outputs.logprobs.logprobs)
            self.logprobs += [part.columns.logprobs for part in outputs.prompt_logprobs]
            self.ends |= {finished.handle: finished.reason for finished in outputs.finished}

    def run(self) -> None:
        while self.core.has_work:
            self.step()
        self.scheduler.table.audit()
