"""GatedMLP: down(activation(gate(x)) * up(x))."""

from __future__ import annotations

from typing import TYPE_CHECKING

from model_runner.layers.linear import Linear

if TYPE_CHECKING:
    import torch

    from model_runner.device import DevicePolicy
    from protos.model_spec import ModelSpec


class GatedMLP:
    def __init__(self, spec: ModelSpec, policy: DevicePolicy) -> None:
        size = spec.intermediate_size
        self.gate_up = Linear(spec.hidden_size, [size, size], spec.mlp_bias, policy)
        self.down = Linear(size, [spec.hidden_size], spec.mlp_bias, policy)
        gated = {"silu": policy.ops.silu_mul, "gelu_pytorch_tanh": policy.ops.gelu_mul}
        self._gated = gated[spec.hidden_act]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self._gated(self.gate_up(x)))
