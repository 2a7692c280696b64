"""make_executor: the executor a config asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protos.errors import StartupError

if TYPE_CHECKING:
    from gpu_executor.executor import Executor
    from protos.config import EngineConfig


def slow_module(config: EngineConfig) -> str:
    """What takes seconds to import of what the executor will need in this process; empty if nothing does."""
    parallel = config.parallel
    is_here = parallel.executor == "uniproc" or (parallel.executor == "auto" and parallel.num_workers == 1)
    return "gpu_executor.worker" if is_here and config.model.model != "null" else ""


def make_executor(config: EngineConfig, eos_token_ids: tuple[int, ...]) -> Executor:
    """The executor the config asks for: the only place that names the kinds. Raises StartupError if it cannot be."""
    kind, num_workers = config.parallel.executor, config.parallel.num_workers
    if kind == "auto" and config.model.model == "null" and config.parallel.pipeline_parallel_size > 1:
        from gpu_executor.null_pipeline import NullPipeline

        return NullPipeline(config)
    if kind == "auto":
        kind = "uniproc" if num_workers == 1 else "multiproc"
    match kind:
        case "uniproc":
            from gpu_executor.uniproc import UniprocExecutor

            return UniprocExecutor(config, eos_token_ids)
        case "multiproc":
            from gpu_executor.group import WorkerGroup
            from gpu_executor.multiproc import LocalWorkers

            return WorkerGroup(config, LocalWorkers(config, eos_token_ids))
        case "ray":
            from gpu_executor.group import WorkerGroup

            try:
                from gpu_executor.ray_executor import RayWorkers
            except ImportError:
                raise StartupError("--executor ray needs Ray: pip install 'tailrace[ray]'") from None
            return WorkerGroup(config, RayWorkers(config, eos_token_ids))
