"""Options of one model on several devices, and of several copies of it."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

ExecutorKind = Literal["auto", "uniproc", "multiproc", "ray"]


class ParallelOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Over how many devices one copy of the model is spread, and how many copies there are."""

    tensor_parallel_size: Annotated[
        int, Meta(ge=1, le=64, description="devices that each hold a slice of every layer; they should share a node")
    ] = 1
    pipeline_parallel_size: Annotated[
        int, Meta(ge=1, le=64, description="stages that each hold some of the layers; as many steps are in flight")
    ] = 1
    data_parallel_size: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description="cores on this machine, each with a copy of the model, a KV cache and workers of its own; a "
            "request goes to the one that holds most of its prompt and has least to do",
        ),
    ] = 1
    executor: Annotated[
        ExecutorKind,
        Meta(
            description="what runs the workers: uniproc is one inside the core, multiproc a process each on this node, "
            "ray actors over nodes; auto is the first that can"
        ),
    ] = "auto"

    @property
    def num_workers(self) -> int:
        """Of one core."""
        return self.tensor_parallel_size * self.pipeline_parallel_size
