"""MoE: a mixture of experts; a token passes through the few gated MLPs that its router scores highest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from model_runner.layers.experts import Experts
from model_runner.layers.linear import Linear
from model_runner.layers.mlp import gated_activation
from model_runner.shard import all_of, evenly

if TYPE_CHECKING:
    from model_runner.device import DevicePolicy
    from model_runner.target import Target
    from protos.model_spec import ModelSpec


class MoE:
    """The rows of a step are sorted by expert, so that every expert's weights are read once, and only if needed.

    Workers each have a slice of every expert, so that all have the same work whichever are picked.
    """

    def __init__(self, spec: ModelSpec, policy: DevicePolicy) -> None:
        assert spec.moe is not None
        self._moe, self._workers = spec.moe, policy.workers
        hidden, inner = all_of(spec.hidden_size), evenly(spec.moe.intermediate_size, self._workers.place)
        experts = spec.moe.num_experts
        # Which experts a token goes to is not worth rounding.
        self.router = Linear(hidden, [all_of(experts)], False, policy, least_bits=16)
        self.gate_up = Experts(experts, hidden, [inner, inner], policy)
        self.down = Experts(experts, inner, [hidden], policy)
        # On the host, for the reason that rotary.py has.
        self._expert_ids = torch.arange(experts).to(policy.device)
        self._gated = gated_activation(spec.hidden_act, policy.ops)

    def weights(self) -> dict[str, Target]:
        experts = self.gate_up.slices(["gate_proj", "up_proj"]) | self.down.slices(["down_proj"])
        return self.router.slices(["gate"]) | experts

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden]."""
        per_token = self._moe.num_experts_per_token
        weights, experts = self.router(x).float().softmax(-1).topk(per_token)
        if self._moe.norm_weights:
            weights /= weights.sum(-1, keepdim=True)
        experts, order = experts.flatten().sort(stable=True)
        ends = torch.searchsorted(experts, self._expert_ids, right=True)
        out = self.down.times(self._gated(self.gate_up.times(x[order // per_token], ends)), ends)
        return self._workers.all_reduce(combine(torch.empty_like(out).index_copy_(0, order, out), weights))


def combine(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The sums [T, size] of each token's rows [T * experts per token, size], by their weights, in float32.

    They are added in the order of the token's own scores: whatever tokens are beside it, the sum has the same bits.
    """
    rows = rows.view(*weights.shape, -1)
    return (rows.float() * weights[..., None]).sum(1).to(rows.dtype)
