"""Decoder: what Llama, Mistral, Qwen2 and Gemma 3 share; the ModelSpec says how they differ."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
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

    Angles = tuple[torch.Tensor, torch.Tensor]
    """Cosines and sines [T, pairs] of the tokens' positions."""


class DecoderLayer:
    """x + attention(norm(x)), then y + mlp(norm(y)); the sums live in `residual`, in place.

    With post_norms, x + norm(attention(norm(x))), and the MLP likewise.
    """

    def __init__(self, spec: ModelSpec, layer: int, policy: DevicePolicy) -> None:
        self._prefix = f"model.layers.{layer}."
        self.attention_norm = RMSNorm(spec.hidden_size, spec.norm_eps, policy)
        self.attention = Attention(spec, layer, policy)
        self.mlp_norm = RMSNorm(spec.hidden_size, spec.norm_eps, policy)
        self.mlp = GatedMLP(spec, policy)
        self.is_local = spec.is_local(layer)
        self.post_norms = [RMSNorm(spec.hidden_size, spec.norm_eps, policy) for _ in range(2 * spec.post_norms)]

    def weights(self) -> dict[str, torch.Tensor]:
        table = {
            "input_layernorm.weight": self.attention_norm.weight,
            **self._norm_weights(),
            **self.attention.qkv.slices(["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
            **self.attention.out.slices(["self_attn.o_proj"]),
            **self.mlp.gate_up.slices(["mlp.gate_proj", "mlp.up_proj"]),
            **self.mlp.down.slices(["mlp.down_proj"]),
        }
        return {self._prefix + name: target for name, target in table.items()}

    def _norm_weights(self) -> dict[str, torch.Tensor]:
        """`post_attention_layernorm` is behind the attention or, where there is but one norm, before the MLP."""
        table = {}
        if self.attention.query_norm is not None and self.attention.key_norm is not None:
            table["self_attn.q_norm.weight"] = self.attention.query_norm.weight
            table["self_attn.k_norm.weight"] = self.attention.key_norm.weight
        if not self.post_norms:
            return table | {"post_attention_layernorm.weight": self.mlp_norm.weight}
        return table | {
            "post_attention_layernorm.weight": self.post_norms[0].weight,
            "pre_feedforward_layernorm.weight": self.mlp_norm.weight,
            "post_feedforward_layernorm.weight": self.post_norms[1].weight,
        }

    def __call__(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor,
        batch: ForwardBatch,
        angles: Angles,
    ) -> torch.Tensor:
        """x is what the layer before has yet to add to `residual`; None for the first layer."""
        normed = self.attention_norm(residual) if x is None else self.attention_norm(x, residual)
        attended = self.attention(normed, batch, *angles)
        if not self.post_norms:
            return self.mlp(self.mlp_norm(attended, residual))
        after_attention, after_mlp = self.post_norms
        return after_mlp(self.mlp(self.mlp_norm(after_attention(attended), residual)))


class Decoder:
    def __init__(self, spec: ModelSpec, max_model_len: int, policy: DevicePolicy) -> None:
        self._tied = spec.tie_word_embeddings
        self.embedding = torch.empty(spec.vocab_size, spec.hidden_size, dtype=policy.dtype, device=policy.device)
        self.layers = [DecoderLayer(spec, layer, policy) for layer in range(spec.num_layers)]
        self.norm = RMSNorm(spec.hidden_size, spec.norm_eps, policy)
        self.rotary = Rotary(spec, max_model_len, policy.device)
        self.local_rotary = self.rotary
        if spec.local_rope is not None:
            local = msgspec.structs.replace(spec, rope=spec.local_rope)
            self.local_rotary = Rotary(local, max_model_len, policy.device)
        self._embedding_scale = torch.tensor(spec.embedding_scale, dtype=policy.dtype).item()
        self.head = None if self._tied else Linear(spec.hidden_size, [spec.vocab_size], False, policy)

    def weights(self) -> dict[str, torch.Tensor]:
        table = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm.weight}
        for layer in self.layers:
            table |= layer.weights()
        return table if self.head is None else table | self.head.slices(["lm_head"])

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        residual = F.embedding(batch.input_ids, self.embedding)
        if self._embedding_scale != 1.0:
            residual *= self._embedding_scale
        angles = self.rotary(batch.positions)
        local_angles = angles if self.local_rotary is self.rotary else self.local_rotary(batch.positions)
        x = None
        for layer in self.layers:
            x = layer(x, residual, batch, local_angles if layer.is_local else angles)
        assert x is not None
        # The last norm and the head see only the tokens that need them: of a long prompt, one.
        return self.norm(x[batch.output_tokens], residual[batch.output_tokens])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return (F.linear(hidden, self.embedding) if self.head is None else self.head(hidden)).float()
