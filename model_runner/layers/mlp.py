"""MLPs: down(activation(gate(x)) * up(x)), or without a gate down(activation(up(x)))."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F

from model_runner.layers.linear import Linear
from model_runner.shard import all_of, evenly

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from kernels.ops import Ops
    from model_runner.device import DevicePolicy
    from model_runner.target import Target
    from protos.model_spec import ModelSpec


def gated_activation(name: str, ops: Ops) -> Callable[[torch.Tensor], torch.Tensor]:
    """activation(gate) * up, of rows that hold the gates and then the ups."""
    return {"silu": ops.silu_mul, "gelu_pytorch_tanh": ops.gelu_mul}[name]


class GatedMLP:
    def __init__(self, spec: ModelSpec, policy: DevicePolicy) -> None:
        hidden, inner = all_of(spec.hidden_size), evenly(spec.intermediate_size, policy.workers.place)
        self._names = ["gate_up_proj"] if spec.merged_projections else ["gate_proj", "up_proj"]
        self.gate_up = Linear(hidden, [inner, inner], spec.mlp_bias, policy)
        self.down = Linear(inner, [hidden], spec.mlp_bias, policy)
        self._gated = gated_activation(spec.hidden_act, policy.ops)

    def weights(self) -> dict[str, Target]:
        return self.gate_up.slices(self._names) | self.down.slices(["down_proj"])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self._gated(self.gate_up(x)))


class MLP:
    def __init__(self, spec: ModelSpec, policy: DevicePolicy) -> None:
        hidden, inner = all_of(spec.hidden_size), evenly(spec.intermediate_size, policy.workers.place)
        self.up = Linear(hidden, [inner], spec.mlp_bias, policy)
        self.down = Linear(inner, [hidden], spec.mlp_bias, policy)
        self._activation = {"relu": F.relu, "gelu_pytorch_tanh": policy.ops.gelu}[spec.hidden_act]

    def weights(self) -> dict[str, Target]:
        return self.up.slices(["up_proj"]) | self.down.slices(["down_proj"])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self._activation(self.up(x)))
