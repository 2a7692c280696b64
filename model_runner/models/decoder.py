"""Decoder: what models with rotary embeddings, RMS norms and gated MLPs, one or many, share; the ModelSpec says how
they differ."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import torch

from model_runner.layers.attention import Attention
from model_runner.layers.mlp import GatedMLP
from model_runner.layers.moe import MoE
from model_runner.layers.norm import NoNorm, RMSNorm
from model_runner.layers.rotary import Rotary
from model_runner.layers.vocabulary import Vocabulary
from model_runner.stage import stage_layers

if TYPE_CHECKING:
    from model_runner.device import DevicePolicy
    from model_runner.forward_batch import ForwardBatch
    from model_runner.layers.attention import Angles
    from model_runner.target import Target
    from protos.model_spec import ModelSpec


class DecoderLayer:
    """x + attention(norm(x)), then y + mlp(norm(y)); the sums live in `residual`, in place.

    By the spec's norm_place what each half adds passes a norm of its own, too or instead.
    """

    def __init__(self, spec: ModelSpec, layer: int, policy: DevicePolicy) -> None:
        self._prefix = f"model.layers.{layer}."
        self._norm_place = spec.norm_place
        self.is_local, self.is_rotated = spec.is_local(layer), spec.is_rotated(layer)

        def norm_if(exists: bool) -> RMSNorm | NoNorm:
            return RMSNorm(spec.hidden_size, spec.norm_eps, policy) if exists else NoNorm(policy)

        self.attention_norm = norm_if(spec.norm_place != "behind")
        self.attention = Attention(spec, layer, policy)
        self.attended_norm = norm_if(spec.norm_place != "before")
        self.mlp_norm = norm_if(spec.norm_place != "behind")
        self.mlp = MoE(spec, policy) if spec.is_sparse(layer) else GatedMLP(spec, policy)
        self.mlp_out_norm = norm_if(spec.norm_place != "before")

    def weights(self) -> dict[str, Target]:
        parts = {"self_attn": self.attention, "mlp": self.mlp, "input_layernorm": self.attention_norm}
        if self._norm_place == "before":
            parts |= {"post_attention_layernorm": self.mlp_norm}
        else:
            parts |= {"post_attention_layernorm": self.attended_norm, "pre_feedforward_layernorm": self.mlp_norm}
            parts |= {"post_feedforward_layernorm": self.mlp_out_norm}
        return {
            f"{self._prefix}{part}.{name}": target
            for part, module in parts.items()
            for name, target in module.weights().items()
        }

    def __call__(
        self, x: torch.Tensor | None, residual: torch.Tensor, batch: ForwardBatch, angles: Angles
    ) -> torch.Tensor:
        """x is what the layer before has yet to add to `residual`; None for the first layer."""
        normed = self.attention_norm(residual) if x is None else self.attention_norm(x, residual)
        attended = self.attended_norm(self.attention(normed, batch, angles if self.is_rotated else None))
        return self.mlp_out_norm(self.mlp(self.mlp_norm(attended, residual)))


class Decoder:
    def __init__(self, spec: ModelSpec, max_model_len: int, policy: DevicePolicy) -> None:
        place, self._tied = policy.workers.place, spec.tie_word_embeddings
        self.embedding = self.head = self.norm = None
        if place.is_first_stage or (place.is_last_stage and self._tied):
            self.embedding = Vocabulary(spec.vocab_size, spec.hidden_size, policy)
        self.layers = [DecoderLayer(spec, layer, policy) for layer in stage_layers(spec.num_layers, place)]
        if place.is_last_stage:
            self.norm = RMSNorm(spec.hidden_size, spec.norm_eps, policy)
            self.head = self.embedding if self._tied else Vocabulary(spec.vocab_size, spec.hidden_size, policy)
        self.rotary = Rotary(spec, max_model_len, policy.device, policy.ops)
        self.local_rotary = self.rotary
        if spec.local_rope is not None:
            local = msgspec.structs.replace(spec, rope=spec.local_rope)
            self.local_rotary = Rotary(local, max_model_len, policy.device, policy.ops)
        self._logits_softcap, self._ops = spec.logits_softcap, policy.ops
        self._embedding_scale = torch.tensor(spec.embedding_scale, dtype=policy.dtype).item()

    def weights(self) -> dict[str, Target]:
        table = {} if self.embedding is None else self.embedding.slices("model.embed_tokens")
        if self.norm is not None:
            table |= {f"model.norm.{name}": target for name, target in self.norm.weights().items()}
        for layer in self.layers:
            table |= layer.weights()
        return table if self._tied or self.head is None else table | self.head.slices("lm_head")

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        residual = self._embed(batch.input_ids) if batch.hidden is None else batch.hidden
        angles = self.rotary(batch.positions)
        local_angles = angles if self.local_rotary is self.rotary else self.local_rotary(batch.positions)
        x = None
        for layer in self.layers:
            x = layer(x, residual, batch, local_angles if layer.is_local else angles)
        assert x is not None
        if self.norm is None:
            return self._ops.add(residual, x)
        # The last norm and the head see only the tokens that need them: of a long prompt, one.
        return self.norm(self._ops.rows(x, batch.output_tokens), self._ops.rows(residual, batch.output_tokens))

    def _embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        assert self.embedding is not None
        embedded = self.embedding.embed(input_ids)
        if self._embedding_scale != 1.0:
            self._ops.scale(embedded, self._embedding_scale)
        return embedded

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        assert self.head is not None
        logits = self.head.logits(hidden)
        if self._logits_softcap:
            self._ops.softcap(logits, self._logits_softcap)
        return logits
