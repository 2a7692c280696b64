"""Attention: grouped-query attention over the paged KV cache, with its projections."""

from __future__ import annotations

from typing import TYPE_CHECKING

from model_runner.layers.linear import Linear
from model_runner.layers.norm import RMSNorm

if TYPE_CHECKING:
    import torch

    from model_runner.device import DevicePolicy
    from model_runner.forward_batch import ForwardBatch
    from protos.model_spec import ModelSpec

    Angles = tuple[torch.Tensor, torch.Tensor]
    """Cosines and sines [T, pairs] of the tokens' positions."""


class Attention:
    def __init__(self, spec: ModelSpec, layer: int, policy: DevicePolicy) -> None:
        self._layer = layer
        self._heads, self._kv_heads, self._head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self._scale = spec.attention_scale or spec.head_dim**-0.5
        self._softcap = spec.attention_softcap
        self._sliding_window = spec.window(layer)
        self._ops = policy.ops
        query_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self._qkv_names = ["qkv_proj"] if spec.merged_projections else ["q_proj", "k_proj", "v_proj"]
        self.qkv = Linear(spec.hidden_size, [query_size, kv_size, kv_size], spec.attention_bias, policy)
        self.out = Linear(query_size, [spec.hidden_size], spec.attention_out_bias, policy)
        self.query_norm = self.key_norm = None
        if spec.qk_norm:
            sizes = (spec.head_dim, spec.head_dim) if spec.qk_norm == "head" else (query_size, kv_size)
            self.query_norm, self.key_norm = (RMSNorm(size, spec.norm_eps, policy) for size in sizes)

    def weights(self) -> dict[str, torch.Tensor]:
        table = self.qkv.slices(self._qkv_names) | self.out.slices(["o_proj"])
        for part, norm in (("q_norm", self.query_norm), ("k_norm", self.key_norm)):
            if norm is not None:
                table[f"{part}.weight"] = norm.weight
        return table

    def __call__(self, x: torch.Tensor, batch: ForwardBatch, angles: Angles | None) -> torch.Tensor:
        """x [T, hidden]; without angles, queries and keys are not turned."""
        tokens = x.shape[0]
        heads = self.qkv(x).view(tokens, -1, self._head_dim)
        with_keys = self._heads + self._kv_heads
        if self.query_norm is not None and self.key_norm is not None:
            self.query_norm.norm_heads(heads[:, : self._heads])
            self.key_norm.norm_heads(heads[:, self._heads : with_keys])
        if angles is not None:
            self._ops.rotary(heads[:, :with_keys], *angles)
        key_cache, value_cache = batch.kv_caches[self._layer]
        self._ops.write_kv(heads[:, self._heads : with_keys], heads[:, with_keys:], key_cache, value_cache, batch.slots)
        attended = self._ops.attention(
            heads[:, : self._heads],
            key_cache,
            value_cache,
            batch.query_starts,
            batch.seq_lens,
            batch.block_tables,
            self._scale,
            self._sliding_window,
            self._softcap,
        )
        return self.out(attended.view(tokens, -1))
