"""MoE: a mixture of experts; a token passes through the few gated MLPs that its router scores highest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from model_runner.layers.linear import Linear
from model_runner.layers.mlp import gated_activation
from model_runner.shard import all_of, evenly
from model_runner.target import Target

if TYPE_CHECKING:
    from model_runner.device import DevicePolicy
    from protos.model_spec import ModelSpec


class MoE:
    """The rows of a step are sorted by expert, so that every expert's weights are read once, and only if needed.

    Workers each have a slice of every expert, so that all have the same work whichever are picked.
    """

    def __init__(self, spec: ModelSpec, policy: DevicePolicy) -> None:
        assert spec.moe is not None
        self._moe, self._ops = spec.moe, policy.ops
        self._workers = policy.workers
        self._hidden, self._inner = all_of(spec.hidden_size), evenly(spec.moe.intermediate_size, self._workers.place)
        experts, hidden, inner = spec.moe.num_experts, self._hidden.size, self._inner.size
        self.router = Linear(self._hidden, [all_of(experts)], False, policy)
        self.gate_up = torch.empty(experts, 2 * inner, hidden, dtype=policy.dtype, device=policy.device)
        self.down = torch.empty(experts, hidden, inner, dtype=policy.dtype, device=policy.device)
        self._expert_ids = torch.arange(experts, device=policy.device)
        self._gated = gated_activation(spec.hidden_act, policy.ops)

    def weights(self) -> dict[str, Target]:
        table = self.router.slices(["gate"])
        rows, columns = ((self._inner,), (self._hidden,)), ((self._hidden,), (self._inner,))
        for expert, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            gate, up = gate_up.chunk(2)
            parts = {"gate_proj": Target(gate, rows), "up_proj": Target(up, rows), "down_proj": Target(down, columns)}
            table |= {f"experts.{expert}.{name}.weight": part for name, part in parts.items()}
        return table

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden]."""
        per_token = self._moe.num_experts_per_token
        weights, experts = self.router(x).float().softmax(-1).topk(per_token)
        if self._moe.norm_weights:
            weights /= weights.sum(-1, keepdim=True)
        experts, order = experts.flatten().sort(stable=True)
        ends = torch.searchsorted(experts, self._expert_ids, right=True)
        gated = self._gated(self._ops.grouped_matmul(x[order // per_token], self.gate_up, ends))
        out = self._ops.grouped_matmul(gated, self.down, ends)
        return self._workers.all_reduce(combine(torch.empty_like(out).index_copy_(0, order, out), weights))


def combine(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The sums [T, size] of each token's rows [T * experts per token, size], by their weights, in float32.

    They are added in the order of the token's own scores: whatever tokens are beside it, the sum has the same bits.
    """
    rows = rows.view(*weights.shape, -1)
    return (rows.float() * weights[..., None]).sum(1).to(rows.dtype)
