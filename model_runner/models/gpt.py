"""GPT: what GPT-2 and OPT share, learned positions, norms with a mean and MLPs without a gate."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from model_runner.layers.attention import Attention
from model_runner.layers.linear import Linear
from model_runner.layers.mlp import MLP
from model_runner.layers.norm import LayerNorm, NoNorm

if TYPE_CHECKING:
    from model_runner.device import DevicePolicy
    from model_runner.forward_batch import ForwardBatch
    from protos.model_spec import ModelSpec


class GPTLayer:
    """x + attention(norm(x)), then y + mlp(norm(y)); or norm(x + attention(x)), then norm(y + mlp(y))."""

    def __init__(self, spec: ModelSpec, layer: int, policy: DevicePolicy) -> None:
        self._prefix = f"model.layers.{layer}."
        self._norms_sums = spec.norm_place == "sum"
        self.attention_norm = LayerNorm(spec.hidden_size, spec.norm_eps, policy)
        self.attention = Attention(spec, layer, policy)
        self.mlp_norm = LayerNorm(spec.hidden_size, spec.norm_eps, policy)
        self.mlp = MLP(spec, policy)

    def weights(self) -> dict[str, torch.Tensor]:
        parts = {
            "input_layernorm": self.attention_norm,
            "self_attn": self.attention,
            "post_attention_layernorm": self.mlp_norm,
            "mlp": self.mlp,
        }
        return {
            f"{self._prefix}{part}.{name}": target
            for part, module in parts.items()
            for name, target in module.weights().items()
        }

    def __call__(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """x [T, hidden] is changed in place."""
        if self._norms_sums:
            x = self.attention_norm(self.attention(x, batch, None), x)
            return self.mlp_norm(self.mlp(x), x)
        attended = self.attention(self.attention_norm(x), batch, None)
        return x.add_(self.mlp(self.mlp_norm(attended, x)))


class GPT:
    def __init__(self, spec: ModelSpec, policy: DevicePolicy) -> None:
        size, dtype, device = spec.embedding_size or spec.hidden_size, policy.dtype, policy.device
        self.embedding = torch.empty(spec.vocab_size, size, dtype=dtype, device=device)
        rows = spec.position_offset + spec.max_position_embeddings
        self.positions = torch.empty(rows, spec.hidden_size, dtype=dtype, device=device)
        self._position_offset = spec.position_offset
        self.layers = [GPTLayer(spec, layer, policy) for layer in range(spec.num_layers)]
        # The sums of the last layer are normed already, where sums are what is normed.
        self.norm = NoNorm() if spec.norm_place == "sum" else LayerNorm(spec.hidden_size, spec.norm_eps, policy)
        projected = size != spec.hidden_size
        self.project_in = Linear(size, [spec.hidden_size], False, policy) if projected else None
        self.project_out = Linear(spec.hidden_size, [size], False, policy) if projected else None
        self.head = None if spec.tie_word_embeddings else Linear(size, [spec.vocab_size], False, policy)

    def weights(self) -> dict[str, torch.Tensor]:
        table = {"model.embed_tokens.weight": self.embedding, "model.embed_positions.weight": self.positions}
        table |= {f"model.norm.{name}": target for name, target in self.norm.weights().items()}
        for layer in self.layers:
            table |= layer.weights()
        linears = {"model.project_in": self.project_in, "model.project_out": self.project_out, "lm_head": self.head}
        for name, linear in linears.items():
            table |= {} if linear is None else linear.slices([name])
        return table

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        x = F.embedding(batch.input_ids, self.embedding)
        if self.project_in is not None:
            x = self.project_in(x)
        x += F.embedding(batch.positions + self._position_offset, self.positions)
        for layer in self.layers:
            x = layer(x, batch)
        x = self.norm(x[batch.output_tokens])
        return x if self.project_out is None else self.project_out(x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return (F.linear(hidden, self.embedding) if self.head is None else self.head(hidden)).float()
