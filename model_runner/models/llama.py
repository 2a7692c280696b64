"""LlamaForCausalLM: the decoder that Llama, Mistral and Qwen2 share; the ModelSpec says how they differ."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from model_runner.layers.attention import Attention
from model_runner.layers.linear import Linear
from model_runner.layers.mlp import GatedMLP
from model_runner.layers.norm import RMSNorm
from model_runner.layers.rotary import Rotary

if TYPE_CHECKING:
    from model_runner.device import DevicePolicy
    from model_runner.forward_batch import ForwardBatch
    from protos.model_spec import ModelSpec


class DecoderLayer:
    """x + attention(norm(x)), then y + mlp(norm(y)); the sums live in `residual`, in place."""

    def __init__(self, spec: ModelSpec, layer: int, policy: DevicePolicy) -> None:
        self._prefix = f"model.layers.{layer}."
        self.attention_norm = RMSNorm(spec.hidden_size, spec.norm_eps, policy)
        self.attention = Attention(spec, layer, policy)
        self.mlp_norm = RMSNorm(spec.hidden_size, spec.norm_eps, policy)
        self.mlp = GatedMLP(spec, policy)

    def weights(self) -> dict[str, torch.Tensor]:
        table = {
            "input_layernorm.weight": self.attention_norm.weight,
            "post_attention_layernorm.weight": self.mlp_norm.weight,
            **self.attention.qkv.slices(["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
            **self.attention.out.slices(["self_attn.o_proj"]),
            **self.mlp.gate_up.slices(["mlp.gate_proj", "mlp.up_proj"]),
            **self.mlp.down.slices(["mlp.down_proj"]),
        }
        return {self._prefix + name: target for name, target in table.items()}

    def __call__(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor,
        batch: ForwardBatch,
        cosines: torch.Tensor,
        sines: torch.Tensor,
    ) -> torch.Tensor:
        """x is what the layer before has yet to add to `residual`; None for the first layer."""
        normed = self.attention_norm(residual) if x is None else self.attention_norm(x, residual)
        attended = self.attention(normed, batch, cosines, sines)
        return self.mlp(self.mlp_norm(attended, residual))


class LlamaForCausalLM:
    def __init__(self, spec: ModelSpec, max_model_len: int, policy: DevicePolicy) -> None:
        self._tied = spec.tie_word_embeddings
        self.embedding = torch.empty(spec.vocab_size, spec.hidden_size, dtype=policy.dtype, device=policy.device)
        self.layers = [DecoderLayer(spec, layer, policy) for layer in range(spec.num_layers)]
        self.norm = RMSNorm(spec.hidden_size, spec.norm_eps, policy)
        self.rotary = Rotary(spec, max_model_len, policy.device)
        self.head = None if self._tied else Linear(spec.hidden_size, [spec.vocab_size], False, policy)

    def weights(self) -> dict[str, torch.Tensor]:
        table = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm.weight}
        for layer in self.layers:
            table |= layer.weights()
        return table if self.head is None else table | self.head.slices(["lm_head"])

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        residual = F.embedding(batch.input_ids, self.embedding)
        cosines, sines = self.rotary(batch.positions)
        x = None
        for layer in self.layers:
            x = layer(x, residual, batch, cosines, sines)
        assert x is not None
        # The last norm and the head see only the tokens that need them: of a long prompt, one.
        return self.norm(x[batch.sampled_tokens], residual[batch.sampled_tokens])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return (F.linear(hidden, self.embedding) if self.head is None else self.head(hidden)).float()
