"""Stage: which layers a worker of a pipeline holds, and what it hands on; and whether a model can be cut at all."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from model_runner.shard import spec_to_cut
from protos.errors import StartupError
from protos.model_spec import ModelSpec

if TYPE_CHECKING:
    from model_runner.device import DevicePolicy
    from protos.model_spec import BasicSpec
    from protos.place import Place
    from protos.step import SchedulerOutput

FAILED = [math.inf, -math.inf]
"""How the first token's hidden states begin where there are none. Sums that are out of bounds are so in one place, and
not numbers in all behind it."""


def stage_layers(num_layers: int, place: Place) -> range:
    """Those of a worker's stage. Where they cannot all be of one size, the last ones before the last stage have a
    layer more: it has the head and draws the tokens, and the first only looks up embeddings."""
    size, rest = divmod(num_layers, place.pipeline_size)
    num_larger = min(rest, max(0, place.stage - (place.pipeline_size - 1 - rest)))
    first = place.stage * size + num_larger
    is_larger = place.pipeline_size - 1 - rest <= place.stage < place.pipeline_size - 1
    return range(first, first + size + is_larger)


def check_stages(spec: BasicSpec, place: Place) -> None:
    """Raises StartupError, with the sizes that would do, where a model cannot be cut into so many stages."""
    size = place.pipeline_size
    if size == 1:
        return
    num_layers = spec_to_cut(spec, f"--pipeline-parallel-size {size}").num_layers
    if size > num_layers:
        raise StartupError(
            f"--pipeline-parallel-size {size} is more than the model has layers; it can be {num_layers} at most"
        )


class StageLink:
    """What a worker has from the stage before its own, and gives to the one behind: hidden states [T, hidden size].

    A stage that fails gives a mark, and so do those behind it: they fail as well, and all are ready for the next step.
    """

    def __init__(self, spec: BasicSpec, policy: DevicePolicy) -> None:
        self._spec, self._policy, self._workers = spec, policy, policy.workers
        self._receives, self._sends = not self._workers.place.is_first_stage, not self._workers.place.is_last_stage

    def receive(self, step: SchedulerOutput) -> torch.Tensor | None:
        """Of a step's tokens; None in the first stage. Called before anything of the step can fail."""
        if not self._receives:
            return None
        hidden = self._empty(step)
        self._workers.receive(hidden)
        return hidden

    def check(self, hidden: torch.Tensor | None) -> None:
        """Raises RuntimeError if they are those of a stage that failed."""
        if hidden is not None and hidden[0, : len(FAILED)].tolist() == FAILED:
            raise RuntimeError("the stage before it failed")

    def send(self, hidden: torch.Tensor | None, step: SchedulerOutput) -> None:
        """Of a step's tokens, None if it failed. Nothing in the last stage."""
        if not self._sends:
            return
        if hidden is None:
            hidden = self._empty(step).zero_()
            hidden[0, : len(FAILED)] = torch.tensor(FAILED)
        self._workers.send(hidden)

    def _empty(self, step: SchedulerOutput) -> torch.Tensor:
        assert isinstance(self._spec, ModelSpec)
        shape = (step.num_tokens, self._spec.hidden_size)
        return torch.empty(shape, dtype=self._policy.dtype, device=self._policy.device)
