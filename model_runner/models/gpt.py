"""GPT: what GPT-2 and OPT share, learned positions, norms with a mean and MLPs without a gate."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from model_runner.layers.attention import Attention
from model_runner.layers.linear import Linear
from model_runner.layers.mlp import MLP
from model_runner.layers.norm import LayerNorm, NoNorm
from model_runner.layers.vocabulary import Vocabulary
from model_runner.shard import all_of
from model_runner.stage import stage_layers
from model_runner.target import Target

if TYPE_CHECKING:
    from model_runner.device import DevicePolicy
    from model_runner.forward_batch import ForwardBatch
    from protos.model_spec import ModelSpec


class GPTLayer:
    """x + attention(norm(x)), then y + mlp(norm(y)); or norm(x + attention(x)), then norm(y + mlp(y))."""

    def __init__(self, spec: ModelSpec, layer: int, policy: DevicePolicy) -> None:
        self._prefix = f"model.layers.{layer}."
        self._norms_sums, self._ops = spec.norm_place == "sum", policy.ops
        self.attention_norm = LayerNorm(spec.hidden_size, spec.norm_eps, policy)
        self.attention = Attention(spec, layer, policy)
        self.mlp_norm = LayerNorm(spec.hidden_size, spec.norm_eps, policy)
        self.mlp = MLP(spec, policy)

    def weights(self) -> dict[str, Target]:
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
        return self._ops.add(x, self.mlp(self.mlp_norm(attended, x)))


class GPT:
    def __init__(self, spec: ModelSpec, policy: DevicePolicy) -> None:
        place, self._tied = policy.workers.place, spec.tie_word_embeddings
        size = spec.embedding_size or spec.hidden_size
        outer, inner = all_of(size), all_of(spec.hidden_size)
        self.embedding = self.positions = self.project_in = None
        self.norm = self.project_out = self.head = None
        if place.is_first_stage or (place.is_last_stage and self._tied):
            self.embedding = Vocabulary(spec.vocab_size, size, policy)
        if place.is_first_stage:
            rows = spec.position_offset + spec.max_position_embeddings
            self.positions = torch.empty(rows, spec.hidden_size, dtype=policy.dtype, device=policy.device)
            self.project_in = Linear(outer, [inner], False, policy) if outer != inner else None
        self._position_offset, self._ops = spec.position_offset, policy.ops
        self.layers = [GPTLayer(spec, layer, policy) for layer in stage_layers(spec.num_layers, place)]
        if place.is_last_stage:
            # The sums of the last layer are normed already, where sums are what is normed.
            self.norm = (
                NoNorm(policy) if spec.norm_place == "sum" else LayerNorm(spec.hidden_size, spec.norm_eps, policy)
            )
            self.project_out = Linear(inner, [outer], False, policy) if outer != inner else None
            self.head = self.embedding if self._tied else Vocabulary(spec.vocab_size, size, policy)

    def weights(self) -> dict[str, Target]:
        table = {} if self.embedding is None else self.embedding.slices("model.embed_tokens")
        if self.positions is not None:
            table |= {"model.embed_positions.weight": Target.whole(self.positions)}
        if self.norm is not None:
            table |= {f"model.norm.{name}": target for name, target in self.norm.weights().items()}
        for layer in self.layers:
            table |= layer.weights()
        for name, linear in (("model.project_in", self.project_in), ("model.project_out", self.project_out)):
            table |= {} if linear is None else linear.slices([name])
        return table if self._tied or self.head is None else table | self.head.slices("lm_head")

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        x = self._embed(batch) if batch.hidden is None else batch.hidden
        for layer in self.layers:
            x = layer(x, batch)
        if self.norm is None:
            return x
        x = self.norm(self._ops.rows(x, batch.output_tokens))
        return x if self.project_out is None else self.project_out(x)

    def _embed(self, batch: ForwardBatch) -> torch.Tensor:
        assert self.embedding is not None
        assert self.positions is not None
        embedded = self.embedding.embed(batch.input_ids)
        if self.project_in is not None:
            embedded = self.project_in(embedded)
        return self._ops.add(embedded, self._ops.rows(self.positions[self._position_offset :], batch.positions))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        assert self.head is not None
        return self.head.logits(hidden)
