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


class Attention:
    def __init__(self, spec: ModelSpec, layer: int, policy: DevicePolicy) -> None:
        self._layer = layer
        self._heads, self._kv_heads, self._head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self._scale = spec.attention_scale or spec.head_dim**-0.5
        self._sliding_window = spec.window(layer)
        self._ops = policy.ops
        query_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.qkv = Linear(spec.hidden_size, [query_size, kv_size, kv_size], spec.attention_bias, policy)
        self.out = Linear(query_size, [spec.hidden_size], spec.attention_out_bias, policy)
        self.query_norm = RMSNorm(spec.head_dim, spec.norm_eps, policy) if spec.qk_norm else None
        self.key_norm = RMSNorm(spec.head_dim, spec.norm_eps, policy) if spec.qk_norm else None

    def __call__(
        self, x: torch.Tensor, batch: ForwardBatch, cosines: torch.Tensor, sines: torch.Tensor
    ) -> torch.Tensor:
        """x [T, hidden]; cosines and sines [T, pairs] of the tokens' positions."""
        tokens = x.shape[0]
        heads = self.qkv(x).view(tokens, -1, self._head_dim)
        with_keys = self._heads + self._kv_heads
        if self.query_norm is not None and self.key_norm is not None:
            self.query_norm.norm_heads(heads[:, : self._heads])
            self.key_norm.norm_heads(heads[:, self._heads : with_keys])
        self._ops.rotary(heads[:, :with_keys], cosines, sines)
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
        )
        return self.out(attended.view(tokens, -1))
